"""`zero-sim merge`: what shards found together, and its exit status."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.fuzz.test_merging import HEAD, shard
from zero_sim.cli.main import main
from zero_sim.fuzz.corpus import open_corpus
from zero_sim.fuzz.records import BatchReport, batch_seed


def merge(*arguments):
    return CliRunner().invoke(main, ["merge", *map(str, arguments)])


def test_all_shards_without_a_finding_are_0(tmp_path):
    folders = [shard(tmp_path / f"{n}", n, batches=[n - 1]) for n in (1, 2)]
    done = merge(*folders, "--into", tmp_path / "all")
    assert done.exit_code == 0, done.output
    assert "100 cases" in done.output
    assert "100 pass" in done.output


def test_a_shard_that_is_missing_is_3_and_named(tmp_path):
    head = replace(HEAD, shard=(1, 3))
    one = shard(tmp_path / "a", 2, batches=[1], head=head)
    done = merge(one, "--into", tmp_path / "all")
    assert done.exit_code == 3
    assert "Not there of 3 shards: 1, 3." in done.output


def test_shards_that_are_missing_are_told_in_runs(tmp_path):
    head = replace(HEAD, shard=(1, 100_000))
    one = shard(tmp_path / "a", 500, batches=[499], head=head)
    done = merge(one, "--into", tmp_path / "all")
    assert "Not there of 100,000 shards: 1-499, 501-100000." in done.output


def test_a_corpus_of_more_shards_than_any_campaign_has_is_2(tmp_path):
    (tmp_path / "a").mkdir()
    head = json.dumps({**HEAD.as_dict(), "shard": [1, 10**9]})
    (tmp_path / "a" / "batches-1-of-1000000000.jsonl").write_text(f"{head}\n")
    done = merge(tmp_path / "a", "--into", tmp_path / "all")
    assert done.exit_code == 2
    assert "to begin with the head of a corpus" in done.output


def test_shards_that_ran_no_batch_are_told_of(tmp_path):
    done = merge(shard(tmp_path / "a", 1), "--into", tmp_path / "all", "--json")
    assert done.exit_code == 3
    done = merge(tmp_path / "a", "--into", tmp_path / "again")
    assert done.exit_code == 3
    assert "No case was run" in done.output


def test_a_campaign_goes_on_from_what_was_merged(tmp_path):
    def fuzz(*arguments):
        return CliRunner().invoke(
            main, ["fuzz", "--seed", "7", "--jobs", "1", *map(str, arguments)]
        )

    for number in (1, 2):
        folder = tmp_path / f"{number}"
        assert fuzz("--cases", 51, "--shard", f"{number}/2", "--corpus", folder).exit_code == 0
    assert merge(tmp_path / "1", tmp_path / "2", "--into", tmp_path / "all").exit_code == 0
    done = fuzz("--cases", 51, "--corpus", tmp_path / "all", "--json")
    told = json.loads(done.stdout)
    assert (told["cases"], told["earlier_cases"]) == (51, 51)


@pytest.mark.parametrize("arguments", [[], ["a"], ["nowhere", "--into", "b"]])
def test_what_is_not_said_rightly_is_2(arguments):
    assert merge(*arguments).exit_code == 2


def test_the_coverage_of_shards_is_that_of_all_their_cases(tmp_path):
    shards = []
    for number, cases_with in enumerate(
        ({"reload": 0b11, "world.races=true": 0b01}, {"reload": 0b100, "world.races=true": 0b100}),
        1,
    ):
        folder = shard(tmp_path / f"{number}", number)
        corpus = open_corpus(folder, head=replace(HEAD, shard=(number, 2)))
        usual = {"asked": 50, "cases": 50, "seconds": 1.0, "verdicts": {"pass": 50}}
        seed = batch_seed(HEAD.seed, number - 1)
        corpus.append(BatchReport(index=number - 1, seed=seed, cases_with=cases_with, **usual))
        shards.append(folder)
    done = merge(*shards, "--into", tmp_path / "all", "--coverage", "--json")
    told = json.loads(done.stdout)["coverage"]
    assert (told["cases"], told["features"]) == (100, {"reload": 3, "world.races=true": 2})
    assert told["pairs"] == {"reload + world.races=true": 2}
    assert told["new_pair_share"] == 0
    shown = merge(tmp_path / "all", "--into", tmp_path / "again", "--coverage").stdout
    assert "What 100 cases had" in shown
