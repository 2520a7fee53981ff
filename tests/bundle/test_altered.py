"""Altered bundles: refused, or shown and replayed as far as possible."""

import json
import random

import pytest

from tests.bundle.altering import altered, files_of, reseal, write
from zero_sim.bundle import freeze, frozen_path, read_bundle, replay_bundle
from zero_sim.errors import ZeroSimError
from zero_sim.report.html import render_page
from zero_sim.report.text import render_bundle
from zero_sim.report.timeline import read_timeline
from zero_sim.report.traces import chrome_trace, write_chrome_trace, write_flight_recorder
from zero_sim.scenario.load import load_cases
from zero_sim.sim import EventLog, Moment

ALTERED = 150
"""Each takes about twenty milliseconds."""


@pytest.fixture
def files(path):
    return files_of(path)


def show(bundle, folder):
    """Render, freeze and export a bundle into a new folder."""
    folder.mkdir()
    assert render_bundle(bundle).replace("\n", "").isprintable()
    assert "<script" not in render_page([bundle])
    frozen = frozen_path(bundle, folder=folder / "frozen")
    freeze(bundle, frozen)
    load_cases(frozen)
    assert {path.parent for path in folder.rglob("*.toml")} == {folder / "frozen"}
    if bundle.logs:
        write_chrome_trace(folder / "trace.json", bundle.logs, name=bundle.scenario.name)
        write_flight_recorder(folder / "dumps", bundle.logs[-1])


def test_altered_bundles_are_refused_or_shown(files, tmp_path):
    """Only our own errors are raised, and many bundles can be shown."""
    shown, refused = 0, []
    for number in range(ALTERED):
        draw = random.Random(number)
        what, changed = altered(files, draw)
        home = tmp_path / str(number)
        what += write(changed, home, draw)
        try:
            show(read_bundle(home), tmp_path / f"{number}-shown")
            shown += 1
        except ZeroSimError as error:
            refused.append(error)
        except Exception as error:
            error.add_note(f"alteration {number}: {what}")
            raise
    assert {error.exit_status for error in refused} == {2}
    assert all(str(error).replace("\n", "").isprintable() for error in refused)
    assert ALTERED / 5 < shown < ALTERED * 4 / 5


def test_bundle_with_other_turns_is_replayed_to_an_outcome(files, tmp_path, pool):
    outcomes = []
    for number, edit in enumerate((list.clear, list.reverse, lambda turns: turns.append(1))):
        changed = dict(files)
        turns = json.loads(changed["turns.json"])
        for own in turns:
            edit(own)
        changed["turns.json"] = json.dumps(turns).encode()
        reseal(changed)
        write(changed, tmp_path / str(number), random.Random(0))
        replayed = replay_bundle(read_bundle(tmp_path / str(number)), pool=pool)
        outcomes.append(replayed.outcome)
        assert not replayed.same_events
    assert outcomes == ["fixed"] * 3


def test_bundle_with_an_edited_case_is_refused(files, tmp_path):
    """The file would differ from the replayed case."""
    text = files["case.toml"].replace(b"seed = 7", b"seed = 8")
    assert text != files["case.toml"]
    write({**files, "case.toml": text}, tmp_path / "x", random.Random(0))
    with pytest.raises(ZeroSimError, match="got another case: the bundle was changed after"):
        read_bundle(tmp_path / "x")


def test_other_files_in_the_folder_are_ignored(files, tmp_path):
    write(files, tmp_path / "x", random.Random(0))
    (tmp_path / "x" / "notes.txt").symlink_to("notes.txt")
    assert read_bundle(tmp_path / "x").id == json.loads(files["bundle.json"])["id"]


@pytest.mark.parametrize("name", ["bundle.json", "events.jsonl", "case.toml"])
def test_symlink_in_a_bundle_is_refused(files, tmp_path, name):
    """It could reveal files elsewhere."""
    write(files, tmp_path / "x", random.Random(0))
    (tmp_path / "elsewhere").write_bytes(files[name])
    (tmp_path / "x" / name).unlink()
    (tmp_path / "x" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ZeroSimError, match=f"expected to read {name}, got: a link"):
        read_bundle(tmp_path / "x")


class Counted(list):
    """A list that counts its look-ups."""

    looked = 0

    def __getitem__(self, place):
        self.looked += 1
        return super().__getitem__(place)


def test_calls_without_turns_are_read_in_linear_time(failed):
    """A search through all turns for each of many forged calls would take hours."""
    log = EventLog()
    call = failed.logs[0].collectives[0]
    log.collectives = [call._replace(sequence=i) for i in range(200)]
    log.turns = Counted([call.rank ^ 1] * 200)
    log.moments = [Moment(1, call.rank, "land", 0)]
    assert len(read_timeline(log).calls) == 200
    assert log.turns.looked < 1_000


def test_trace_lanes_are_named_only_for_ranks_that_use_them(failed):
    log = EventLog()
    call = failed.logs[0].collectives[0]
    log.collectives = [call._replace(sequence=i) for i in range(200)]
    log.moments = [Moment(1, call.rank, "land", 0)]
    events = chrome_trace([log], name="x")["traceEvents"]
    lanes = [event["pid"] for event in events if event["name"] == "thread_name"]
    assert {lanes.count(rank) for rank in call.group_ranks} == {2, 2 + 200}
