"""`zero-sim fuzz`: options, exit status and output."""

import json
import shlex
from concurrent.futures import Future
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.cli.ended import assert_ended
from tests.fuzz.corpus_reports import report_of
from zero_sim.cli.main import main
from zero_sim.errors import EnvironmentProblem
from zero_sim.fuzz import campaign, corpus
from zero_sim.fuzz.corpus import read_corpus
from zero_sim.fuzz.known import Rechecked
from zero_sim.fuzz.records import Found
from zero_sim.host import device
from zero_sim.mutants import find_mutants
from zero_sim.shrink import Key

FOUND = Found(
    key=Key("equality.grad", "reduce", "dense", "values"), message="differs", seed=5, case=3,
    scenario="", bundle="0123456789ab", text="FAIL  drawn", size="2 ranks, 1 param [[2]], 1 step",
)  # fmt: skip


class BatchPool:
    slots = 1

    def __init__(self):
        self.outcome = {}

    def prepare(self, *call):
        pass

    def submit(self, run, job, render):
        self.job = job
        future = Future()
        report = report_of(job.index, **({"cases": job.cases} | self.outcome))
        future.set_result(replace(report, seed=job.seed))
        return future

    def interrupt(self):
        pass


@pytest.fixture
def pool(monkeypatch):
    made = BatchPool()
    monkeypatch.setattr(campaign, "OwnProcess", lambda: made)
    return made


def fuzz(tmp_path, *options):
    return CliRunner().invoke(main, ["fuzz", "--corpus", str(tmp_path), *options])


def test_campaign_is_written_as_a_page(tmp_path, pool):
    page = tmp_path / "page.html"
    assert fuzz(tmp_path / "corpus", "--cases", "50", "--html", str(page)).exit_code == 0
    assert "50 generated cases" in page.read_text()


def test_campaign_without_findings_has_exit_status_0(tmp_path, pool):
    assert_ended(fuzz(tmp_path, "--cases", "60"), 0, "60 cases", "0 distinct findings")


def test_finding_has_exit_status_1_and_a_replay_command(tmp_path, pool):
    pool.outcome = {"found": (FOUND,), "keys": {"equality.grad|reduce|dense|values|": 4}}
    done = fuzz(tmp_path, "--cases", "10", "--target", "a:b")
    assert done.exit_code == 1
    assert "FAIL  drawn" in done.output
    assert "smallest    2 ranks" in done.output
    assert "met         in 4 cases" in done.output
    assert f"zero-sim replay {tmp_path}/bundles/0123456789ab --target a:b" in done.output


def test_limits_of_a_campaign_without_findings_are_listed(tmp_path, pool):
    pool.outcome = {
        "verdicts": {"pass": 7, "inconclusive": 3},
        "unproved": {"guard.nothing-stepped": 3},
        "unobserved": {"norm": 10, "zeros": 7},
    }
    done = fuzz(tmp_path, "--cases", "10")
    assert done.exit_code == 0
    assert "Inconclusive by guard.nothing-stepped: 3 cases; zero-sim explain" in done.output
    assert "does not report it: norm (in all), zeros (in 7)" in done.output


def test_passes_by_params_only_are_counted(tmp_path, pool):
    pool.outcome = {"verdicts": {"pass": 17, "inconclusive": 3}, "params_only": 12}
    done = fuzz(tmp_path / "a", "--cases", "20")
    assert "; 3 inconclusive, 17 pass (12 by params only); " in done.output
    told = json.loads(fuzz(tmp_path / "b", "--cases", "20", "--json").stdout)
    assert (told["verdicts"]["pass"], told["params_only"]) == (17, 12)
    pool.outcome = {"verdicts": {"pass": 20}}
    assert "; 20 pass; " in fuzz(tmp_path / "c", "--cases", "20").output


def test_counts_shared_with_similar_findings_are_marked(tmp_path, pool):
    other = replace(FOUND, scenario="another", places=("inside",))
    pool.outcome = {"found": (FOUND, other), "keys": {"equality.grad|reduce|dense|values|": 4}}
    done = fuzz(tmp_path, "--cases", "10")
    assert done.output.count("met         in 4 cases, including cases of similar findings") == 2


def test_findings_are_sorted_by_dataflow_and_difference(tmp_path, pool):
    noise = replace(FOUND, key=FOUND.key._replace(manner="one-ulp"), text="NOISE", apart=1e-7)
    large = replace(FOUND, text="LARGE", scenario="another", apart=0.7)
    loss = replace(FOUND, key=FOUND.key._replace(check="equality.loss"), text="LOSS")
    norm = replace(FOUND, key=FOUND.key._replace(check="equality.norm"), text="NORM", apart=0.9)
    race = replace(FOUND, key=FOUND.key._replace(check="world.race"), text="RACE")
    pool.outcome = {"found": (norm, noise, loss, large, race)}
    text = fuzz(tmp_path, "--cases", "10").output
    assert text.count("findings, the largest difference first") == 1
    order = ("RACE", "LOSS", "equality.grad: 2 findings", "LARGE", "NOISE", "NORM")
    places = [text.index(word) for word in order]
    assert places == sorted(places)


def test_unshrunk_case_is_not_called_smallest(tmp_path, pool):
    pool.outcome = {"found": (replace(FOUND, as_met=True),)}
    done = fuzz(tmp_path, "--cases", "10")
    assert "so far      2 ranks, 1 param [[2]], 1 step; to shrink it: zero-sim fuzz" in done.output
    assert "smallest" not in done.output


def test_corpus_folder_is_printed(tmp_path, pool):
    assert f"Saved in {tmp_path}\n" in fuzz(tmp_path, "--cases", "10").output


def test_interrupt_has_exit_status_130(tmp_path, pool):
    pool.outcome = {"complete": False, "cases": 2}
    done = fuzz(tmp_path, "--cases", "10")
    assert done.exit_code == 130
    assert f"Resume with:\n  zero-sim fuzz --corpus {tmp_path} --cases 10\n" in done.output


def test_resume_command_continues_the_same_campaign(tmp_path, pool):
    pool.outcome = {"complete": False, "cases": 2, "verdicts": {"pass": 2}}
    options = ["--target", "torch-ddp", "--seed", "3", "--family", "2", "--shard", "1/2"]
    options += ["--seconds", "50", "--option", "static_graph=1"]
    done = fuzz(tmp_path, *options)
    (command,) = [line for line in done.output.splitlines() if "zero-sim fuzz" in line]
    pool.outcome = {}
    again = CliRunner().invoke(main, [*shlex.split(command)[1:], "--cases", "100"])
    assert again.exit_code == 0, again.output
    assert (pool.job.target, pool.job.family, pool.job.options) == (
        "torch-ddp",
        2,
        (("static_graph", "1"),),
    )


def test_resume_command_names_the_default_corpus(tmp_path, pool, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool.outcome = {"complete": False, "cases": 2}
    done = CliRunner().invoke(main, ["fuzz", "--cases", "10"])
    assert "zero-sim fuzz --corpus .zero-sim/corpus/zero_sim-0-1 --cases 10\n" in done.output


def test_lost_batch_has_exit_status_3(tmp_path, pool):
    pool.outcome = {"complete": False, "lost": "gone"}
    assert_ended(fuzz(tmp_path, "--cases", "10"), 3, "was lost: gone")


def test_json_is_one_object(tmp_path, pool):
    pool.outcome = {"found": (FOUND,), "cases_with": {"reload": 3}}
    done = fuzz(tmp_path, "--cases", "10", "--json")
    data = json.loads(done.stdout)
    assert data["exit_status"] == done.exit_code == 1
    assert data["findings"][0]["check"] == "equality.grad"
    assert data["coverage"]["features"] == {"reload": 2}
    assert "pairs" not in data["coverage"]


def test_options_reach_the_batches(tmp_path, pool):
    fuzz(tmp_path, "--cases", "150", "--seed", "9", "--shard", "2/3", "--seconds", "50")
    assert pool.job.index == 1
    assert 0 < pool.job.seconds <= 50
    assert (tmp_path / "shard-2-of-3.sqlite").exists()


def test_missing_device_has_exit_status_4_and_starts_nothing(tmp_path, pool):
    done = fuzz(tmp_path / "corpus", "--cases", "1", "--device", "cuda:7")
    assert_ended(done, 4, "expected a GPU that torch")
    assert not (tmp_path / "corpus").exists()


def test_device_reaches_batches_corpus_and_replay_command(tmp_path, pool, monkeypatch):
    monkeypatch.setattr(device, "check_device", lambda name: None)
    pool.outcome = {"found": (FOUND,), "keys": {"|".join(FOUND.key): 1}}
    done = fuzz(tmp_path, "--cases", "1", "--device", "cuda:1")
    assert pool.job.device == "cuda:1"
    assert f"zero-sim replay {tmp_path}/bundles/0123456789ab --device cuda:1" in done.output
    assert read_corpus(tmp_path / "shard-1-of-1.sqlite").head.device == "cuda:1"
    other = fuzz(tmp_path, "--cases", "1")
    assert_ended(other, 2, "Try another --corpus, or its original seed, target, device")


def test_order_reaches_batches_and_corpus(tmp_path, pool):
    fuzz(tmp_path, "--cases", "1", "--order", "unknown")
    assert pool.job.order == "unknown"
    assert read_corpus(tmp_path / "shard-1-of-1.sqlite").head.order == "unknown"


@pytest.mark.parametrize("options", [["--shard", "0/2"], ["--shard", "x"], ["--cases", "-1"]])
def test_invalid_options_have_exit_status_2(tmp_path, pool, options):
    assert fuzz(tmp_path, *options).exit_code == 2


class TestCoverage:
    def test_coverage_is_printed_as_a_table(self, tmp_path, pool):
        pool.outcome = {"cases_with": {"reload": 0b11, "system.stage=3": 0b01}}
        done = fuzz(tmp_path, "--cases", "4", "--coverage")
        assert done.exit_code == 0, done.output
        lines = [line.split() for line in done.output.splitlines()]
        assert ["reload", "2", "50.0%", "1"] in [line[:4] for line in lines]
        assert ["system.stage=3", "1", "25.0%", "1"] in [line[:4] for line in lines]
        assert "Never drawn: model.name=mlp, " in done.output
        assert "1 of 4 cases had a pair that no other case had, so about 25% of" in done.output

    def test_json_has_every_pair_and_the_mutants_found_by_features(self, tmp_path, pool):
        pool.outcome = {"cases_with": {"model.name=params": 0b11, "system.stage=3": 0b01}}
        coverage = json.loads(fuzz(tmp_path, "--cases", "4", "--coverage", "--json").stdout)[
            "coverage"
        ]
        assert coverage["pairs"] == {"model.name=params + system.stage=3": 1}
        assert "model.name=mlp" in coverage["features_never"]
        ids = coverage["mutants_by_feature"]["model.name=params"]
        assert {one.id for one in find_mutants(ids)} == {*ids}

    def test_options_not_followed_are_not_listed_as_missing(self, tmp_path, pool):
        pool.outcome = {"cases_with": {"reload": 0b11}}
        done = fuzz(tmp_path, "--cases", "4", "--coverage", "--target", "torch-ddp")
        assert "system.reduce_buffer_elems" not in done.output.partition("Never drawn:")[0]

    def test_order_of_lines_is_deterministic(self, tmp_path, pool):
        pool.outcome = {"cases_with": {"reload": 0b11, "world.races=true": 0b10}}
        one, other = (fuzz(tmp_path / name, "--cases", "4", "--coverage") for name in "ab")
        assert one.output.split("Not yet covered")[0] == other.output.split("Not yet covered")[0]


NO_CASE = {
    "none asked for": (["--cases", "0"], {}, "No case was run: --cases 0 leaves none."),
    "none for this shard": (
        ["--cases", "50", "--shard", "2/2"],
        {},
        "--cases 50 leaves none for shard 2/2.",
    ),
    "no time for one": (
        ["--seconds", "1e-9"],
        {"cases": 0, "complete": False},
        "--seconds 1e-09 ran out before the first one. Try more.",
    ),
    "none fits": (
        ["--cases", "200"],
        {"cases": 0, "verdicts": {}, "futile": "no case fits target 'mine': why"},
        "No case was run: no case fits target 'mine': why.",
    ),
}


@pytest.mark.parametrize(("options", "outcome", "said"), NO_CASE.values(), ids=NO_CASE)
def test_campaign_without_cases_has_exit_status_5(tmp_path, pool, options, outcome, said):
    pool.outcome = outcome
    assert_ended(fuzz(tmp_path, *options), 5, said)


def test_campaign_without_remaining_cases_has_exit_status_5(tmp_path, pool):
    fuzz(tmp_path, "--cases", "50")
    assert_ended(fuzz(tmp_path, "--cases", "50"), 5, "all 50 were run earlier. Try more --cases")


def test_stopped_campaign_prints_its_reason(tmp_path, pool):
    pool.outcome = {"verdicts": {"error": 50}, "futile": "all end in the same error: no module"}
    done = fuzz(tmp_path, "--cases", "200")
    assert "\nStopped: all end in the same error: no module.\n" in done.output
    assert done.output.startswith("50 cases") or "\n50 cases" in done.output


def test_case_of_a_finding_without_a_bundle_is_printed(tmp_path, pool):
    found = replace(FOUND, bundle="", scenario="schema = 1\n", unkept="No space left on device")
    pool.outcome = {"found": (found,)}
    done = fuzz(tmp_path, "--cases", "10")
    assert done.exit_code == 1
    assert "bundle      none: No space left on device; its case is\n    schema = 1\n" in done.output


def test_full_disk_has_exit_status_4(tmp_path, pool, monkeypatch):
    def full(self, report):
        raise EnvironmentProblem("got: No space left on device")

    monkeypatch.setattr(corpus.Corpus, "append", full)
    done = fuzz(tmp_path, "--cases", "100")
    assert_ended(done, 4, "got: No space left on device", on="stderr")
    assert "50 cases" in done.stdout


def test_earlier_findings_are_judged_again(tmp_path, pool, monkeypatch):
    pool.outcome = {"found": (FOUND,), "keys": {"equality.grad|reduce|dense|values|": 1}}
    fuzz(tmp_path, "--cases", "10")
    pool.outcome = {}
    fixed = [Rechecked(found=FOUND, outcome="fixed")]
    monkeypatch.setattr(campaign, "recheck", lambda findings, *, target, device: fixed)
    done = fuzz(tmp_path, "--cases", "10")
    assert done.exit_code == 0
    assert "Found earlier, now fixed: its case passes\n  equality.grad: differs" in done.output
    assert f"bundle      {tmp_path}/fixed/0123456789ab" in done.output


def test_conversion_of_an_old_corpus_is_printed(tmp_path, pool):
    head = {"format": "zero_sim corpus", "version": 1, "seed": 0, "target": "zero_sim"}
    old = tmp_path / "batches-1-of-1.jsonl"
    old.write_text(json.dumps(head | {"cases": 50, "shard": [1, 1]}) + "\n")
    done = fuzz(tmp_path, "--cases", "10")
    assert f"Converted {old}, of an earlier version, to SQLite. You can delete it." in done.stderr
    assert "Converted" not in fuzz(tmp_path, "--cases", "20").stderr
