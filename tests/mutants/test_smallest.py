"""Shipped table of smallest cases: each mutant has one, and it finds the mutant."""

import json
from dataclasses import replace

import pytest

from zero_sim import run_case
from zero_sim.errors import UsageError
from zero_sim.mutants import find_mutants
from zero_sim.mutants.campaign import found_by
from zero_sim.mutants.records import HuntResult
from zero_sim.mutants.smallest import SHIPPED, features_that_found, record_smallest, smallest_cases
from zero_sim.scenario.dump import to_chosen_toml
from zero_sim.shrink import Size, size_of

IDS = sorted(smallest_cases())


def test_exactly_the_mutants_have_a_smallest_case():
    assert {*IDS} == {one.id for one in find_mutants()}


@pytest.mark.parametrize("id", IDS)
def test_smallest_case_finds_its_mutant_only(pool, id):
    (one,) = find_mutants([id])
    case = smallest_cases()[id]
    with one.apply() as patches:
        assert found_by(run_case(case, pool=pool))
    assert not patches.outdated, "it is found by an error in its own lines"
    assert run_case(case, pool=pool).verdict in ("pass", "inconclusive")


@pytest.mark.parametrize(
    ("id", "least"),
    [
        # A shard boundary with an element on either side of it.
        ("L01", (2, 1, 2, 1, 0)),
        # A rank without elements: one element, two ranks.
        ("E03", (2, 1, 1, 1, 0)),
        # The last of several buckets: two, so two params, each as large as a bucket.
        ("B04", (1, 2, 2, 1, 1)),
        # A param that exactly fills its bucket.
        ("M13", (1, 1, 1, 1, 1)),
        # Two replicas of the state, on one rank each.
        ("M29", (2, 1, 1, 1, 1)),
        # Replicas, and a sum after each of two micro-batches.
        ("M43", (2, 1, 1, 1, 3)),
        # Division by two is exact, so three ranks.
        ("S03", (3, 1, 1, 1, 0)),
        # State carried over to the next step, when accumulation restarts.
        ("M41", (1, 1, 1, 2, 1)),
        # As strings, "10" sorts before "2": eleven pieces.
        ("M95", (11, 1, 11, 2, 1)),
        # Two groups of two ranks each.
        ("M65", (4, 1, 1, 1, 1)),
        # A scale that grows a step late: grown after one step, used in the next.
        ("I05", (1, 1, 1, 2, 2)),
    ],
)
def test_size_of_the_smallest_case_is_as_derived(id, least):
    names = ("ranks", "params", "elements", "steps", "features")
    assert size_of(smallest_cases()[id]) == Size(**dict(zip(names, least, strict=True)))


def test_features_of_smallest_cases_are_known():
    features = features_that_found()
    assert features.keys() == {*IDS}
    assert {"layout: param cut once", "model.name=params"} <= features["L01"]


class TestRecording:
    def trial(self, id, **more):
        return HuntResult(id=id, killed=True, **more)

    def test_cases_of_other_mutants_are_kept(self, tmp_path):
        case = replace(smallest_cases()[IDS[0]], name="drawn", description="from somewhere")
        path = tmp_path / "table.json"
        path.write_text('{"A": {"schema": 1}, "B": {"schema": 1}}')
        trials = [self.trial("B", smallest=to_chosen_toml(case)), self.trial("C")]
        assert record_smallest(trials, path) == 1
        table = json.loads(path.read_text())
        assert [*table] == ["A", "B"]
        assert table["A"] == {"schema": 1}
        assert table["B"] == json.loads(SHIPPED.read_text())[IDS[0]]

    @pytest.mark.parametrize("text", ["", "[]", '{"A": 1}', "\x00"])
    def test_another_file_is_not_overwritten(self, tmp_path, text):
        path = tmp_path / "table.json"
        path.write_text(text)
        with pytest.raises(UsageError, match="expected a table of smallest cases in"):
            record_smallest([], path)
        assert path.read_text() == text

    def test_unwritable_path_is_refused(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match="expected to write smallest cases to"):
            record_smallest([], tmp_path / "file" / "table.json")
