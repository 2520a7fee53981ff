"""`zero-sim fuzz --join`: joined results of shards, and exit status."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.cli.ended import assert_ended
from tests.fuzz.corpus_reports import HEAD, make_shard, report_of
from zero_sim.cli.main import main
from zero_sim.fuzz.corpus import open_corpus


def join(*places, into, options=()):
    words = [word for place in places for word in ("--join", place)]
    return CliRunner().invoke(main, ["fuzz", *map(str, words), "--corpus", str(into), *options])


def test_all_shards_without_a_finding_have_exit_status_0(tmp_path):
    files = [make_shard(tmp_path / f"{n}", n, batches=[n - 1]) for n in (1, 2)]
    assert_ended(join(*files, into=tmp_path / "all"), 0, "100 cases", "100 pass")


def test_missing_shards_are_named_with_exit_status_3(tmp_path):
    one = make_shard(tmp_path / "a", 2, of=3, batches=[1])
    done = join(one, into=tmp_path / "all")
    assert_ended(done, 3, "Missing of 3 shards: 1, 3.")
    many = make_shard(tmp_path / "b", 500, of=100_000, batches=[499])
    done = join(many, into=tmp_path / "many")
    assert "Missing of 100,000 shards: 1-499, 501-100000." in done.output
    told = json.loads(join(one, into=tmp_path / "json", options=["--json"]).stdout)
    assert (told["shards"], told["shards_missing"], told["exit_status"]) == (3, [1, 3], 3)


def test_shards_without_batches_have_exit_status_3(tmp_path):
    assert_ended(join(make_shard(tmp_path / "a", 1), into=tmp_path / "all"), 3, "No case was run")


def test_joined_campaign_can_be_continued(tmp_path):
    def fuzz(*arguments):
        return CliRunner().invoke(
            main, ["fuzz", "--seed", "7", "--jobs", "1", *map(str, arguments)]
        )

    for number in (1, 2):
        folder = tmp_path / f"{number}"
        assert fuzz("--cases", 51, "--shard", f"{number}/2", "--corpus", folder).exit_code == 0
    assert join(tmp_path / "1", tmp_path / "2", into=tmp_path / "all").exit_code == 0
    done = fuzz("--cases", 51, "--corpus", tmp_path / "all", "--json")
    told = json.loads(done.stdout)
    assert (told["cases"], told["earlier_cases"]) == (51, 51)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--join", "."], "expected --corpus with --join"),
        (["--join", "nowhere", "--corpus", "b"], "'nowhere' does not exist"),
        (["--join", ".", "--corpus", "b", "--cases", "3"], "expected --cases without --join"),
        (["--join", ".", "--corpus", "b", "--seed", "0"], "expected --seed without --join"),
    ],
)
def test_invalid_options_have_exit_status_2(options, words):
    assert_ended(CliRunner().invoke(main, ["fuzz", *options]), 2, words, on="stderr")


def test_target_of_a_corpus_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with open_corpus(tmp_path / "1", head=replace(HEAD, target="stranger:Target")) as corpus:
        corpus.append(report_of(0, cases_with={"reload": 0b1}))
    done = join(corpus.path, into=tmp_path / "all", options=["--coverage"])
    assert "imported" not in done.output
    assert "Features of 50 cases" in done.stdout


def test_coverage_of_shards_is_that_of_all_their_cases(tmp_path):
    shards = []
    for number, cases_with in enumerate(
        ({"reload": 0b11, "world.races=true": 0b01}, {"reload": 0b100, "world.races=true": 0b100}),
        1,
    ):
        head = replace(HEAD, shard=(number, 2))
        with open_corpus(tmp_path / f"{number}", head=head) as corpus:
            corpus.append(report_of(number - 1, cases_with=cases_with))
        shards.append(corpus.path)
    done = join(*shards, into=tmp_path / "all", options=["--coverage", "--json"])
    told = json.loads(done.stdout)["coverage"]
    assert (told["cases"], told["features"]) == (100, {"reload": 3, "world.races=true": 2})
    assert told["pairs"] == {"reload + world.races=true": 2}
    assert told["new_pair_share"] == 0
    shown = join(tmp_path / "all", into=tmp_path / "again", options=["--coverage"]).stdout
    assert "Features of 100 cases" in shown
