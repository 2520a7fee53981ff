"""Batches: the same cases for the same seed, each finding once, shrunk."""

import signal
from dataclasses import replace

import pytest
import torch

from zero_sim import run_case
from zero_sim.bundle import read_bundle
from zero_sim.findings.records import Evidence, Finding, not_judged
from zero_sim.fuzz import batch, drawing
from zero_sim.fuzz.batch import run_batch
from zero_sim.fuzz.choices import Drawable
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.records import BatchReport, Job, batch_seed, from_json, to_json
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.host import signals
from zero_sim.report.text import render_case
from zero_sim.run import CaseResult
from zero_sim.run.sgd_twin import TWIN_EVERY
from zero_sim.scenario.dump import to_toml
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.shrink import key_of
from zero_sim.targets import import_target

SMALL = drawn_cases(ranks_max=3, steps_max=1, models_from=["params"], reload=False)
CUT = ("equality.master", "optimizer", "dense", "values")
"""Key of the finding, without the part of the buffer in which it was first observed."""
BROKEN, RAISING = "tests.fuzz.broken:Broken", "tests.fuzz.broken:Raising"


def job(tmp_path, **changes):
    usual = {"index": 0, "seed": 7, "cases": 12, "target": "zero_sim", "bundles": str(tmp_path)}
    # Without a time limit that a busy machine could reach.
    usual["shrink_seconds"] = 3600.0
    return Job(**(usual | changes))


def run(tmp_path, *, cases_from=SMALL, **changes):
    return run_batch(job(tmp_path, **changes), render_case, cases_from=cases_from)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Report of a batch that finds an off-by-one."""
    folder = tmp_path_factory.mktemp("bundles")
    return run(folder, cases=40, target=BROKEN), folder


def test_correct_system_passes(tmp_path):
    report = run(tmp_path)
    assert report.complete
    assert report.found == ()
    assert report.counts.cases == 12
    assert sum(report.counts.verdicts.values()) == 12
    assert set(report.counts.verdicts) <= {"pass", "inconclusive"}
    assert report.cases_with


def test_batch_counts_unproved_guards_and_unobserved_parts(tmp_path):
    """Both are counts of cases without a finding."""
    report = run_batch(job(tmp_path, cases=100), render_case)
    assert report.found == ()
    assert sum(report.counts.unproved.values()) == report.counts.verdicts["inconclusive"] > 0
    assert all(name.startswith("guard.") for name in report.counts.unproved)
    assert "relations of calls, with ranks that join" in report.counts.unobserved


def test_cases_that_cannot_have_a_common_option_are_skipped(tmp_path):
    few = (("all_reduce_last", "true"),)
    asked = job(tmp_path, target="torch-fsdp2", options=few, cases=3)
    report = run_batch(asked, render_case)
    assert (report.found, report.counts.cases) == ((), 3)


def test_same_seed_gives_the_same_cases(tmp_path):
    reports = [run(tmp_path) for _ in range(2)]
    assert reports[0].cases_with == reports[1].cases_with
    other = run(tmp_path, seed=8)
    assert other.cases_with != reports[0].cases_with


def test_finding_does_not_end_the_batch(found):
    report, _ = found
    assert report.counts.cases == 40
    assert report.found[0].case < 39
    assert [one.key[:4] for one in report.found] == [CUT]
    assert {tuple(key.split("|"))[:4] for key in report.counts.keys} == {CUT}
    assert sum(report.counts.keys.values()) == report.counts.verdicts["fail"]
    assert all(map(report.found[0].is_met_by, report.counts.keys))


def test_case_with_the_largest_difference_is_shrunk(tmp_path, monkeypatch):
    apart = iter((1e-7, 1e-6, 0.5, 1e-7))
    known, begun = {}, []

    def judge(scenario, **_):
        by = known.setdefault(to_toml(scenario), next(apart, 1e-7))
        sides = {"expected": torch.ones(2), "got": torch.ones(2) * (1 - by)}
        at = Finding(check="a", message="m", manner="values", evidence=Evidence(start=0, **sides))
        return CaseResult(id="x", verdict="fail", seconds=0.0, findings=(at,))

    def interrupted(scenario, result, **_):
        begun.append(result.findings[0].evidence.got[0].item())
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "run_case", judge)
    monkeypatch.setattr(batch, "shrink_finding", interrupted)
    run(tmp_path)
    assert begun == [0.5]


def test_off_by_one_shrinks_to_two_ranks_and_one_param(found):
    report, _ = found
    assert report.found[0].size == "2 ranks, 1 param [[2]] in fp32, 1 step"


def test_finding_is_written_as_a_bundle(found):
    report, folder = found
    bundle = read_bundle(folder / report.found[0].bundle)
    assert bundle.findings[0].check == "equality.master"
    assert to_toml(bundle.scenario) == report.found[0].scenario


def test_bundle_of_an_imported_target_can_be_read(tmp_path):
    """Drawn cases name their target, but a file can name only a registered one."""
    drawn = drawn_cases(
        import_target(BROKEN),
        ranks_max=3,
        steps_max=1,
        models_from=["params"],
        reload=False,
    )
    report = run(tmp_path, cases=40, target=BROKEN, cases_from=drawn)
    assert report.found
    for one in report.found:
        bundle = read_bundle(tmp_path / one.bundle)
        assert bundle.ran.target == BROKEN


def test_known_finding_is_not_shrunk_again(found, tmp_path):
    known = found[0].found
    again = run(tmp_path, cases=40, target=BROKEN, known=known)
    assert again.found == ()
    assert again.counts.keys == found[0].counts.keys
    assert not list(tmp_path.iterdir())


def test_batch_resumes_after_its_last_case(tmp_path):
    """The features of both parts are those of the whole, bit by bit."""
    whole = run(tmp_path)
    first = run(tmp_path, cases=5)
    rest = run(tmp_path, start=5)
    assert (rest.start, rest.counts.cases, rest.complete) == (5, 7, True)
    names = whole.cases_with.keys()
    assert first.cases_with.keys() | rest.cases_with.keys() == names
    assert whole.cases_with == {
        name: first.cases_with.get(name, 0) | rest.cases_with.get(name, 0) << 5 for name in names
    }


def test_unshrunk_finding_of_an_earlier_part_is_shrunk(found, tmp_path):
    (one,) = found[0].found
    target = import_target(BROKEN)
    drawn = draws(SMALL.filter(lambda case: case.world.size == 3), seed="drawn")
    failing = next(case for case in drawn if key_of(run_case(case, target=target)) == one.key)
    left = replace(one, scenario=to_toml(failing), as_met=True, bundle="")
    report = run(tmp_path, start=12, target=BROKEN, unshrunk=(left,))
    assert (report.counts.cases, report.counts.keys) == (0, {})
    assert [(each.case, each.size, each.as_met) for each in report.found] == [
        (one.case, one.size, False)
    ]


def test_unshrunk_finding_of_another_version_is_kept(found, tmp_path):
    left = replace(found[0].found[0], scenario="schema = 0", as_met=True)
    report = run(tmp_path, start=12, unshrunk=(left,))
    assert (report.found, report.complete) == ((), True)


def test_no_case_starts_after_the_time_limit(tmp_path):
    report = run(tmp_path, seconds=0.0)
    assert report.counts.cases == 0
    assert not report.complete


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_the_batch_after_the_current_case(tmp_path, monkeypatch, number):
    monkeypatch.setattr(signals, "_last_heard", -signals.SAME_SECONDS)
    before = signal.getsignal(number)
    count = 0

    def interrupting(*args, **options):
        nonlocal count
        count += 1
        if count == 3:
            signal.raise_signal(number)
        return run_case(*args, **options)

    monkeypatch.setattr(batch, "run_case", interrupting)
    report = run(tmp_path)
    assert not report.complete
    assert report.counts.cases == count == 3
    assert signal.getsignal(number) is before


def test_second_interrupt_keeps_findings_unshrunk(tmp_path, monkeypatch):

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "shrink_finding", interrupted)
    report = run(tmp_path, cases=40, target=BROKEN)
    assert not report.complete
    assert {(one.key[:4], one.bundle, one.as_met) for one in report.found} == {(CUT, "", True)}
    assert "shapes" in report.found[0].scenario


def test_findings_are_written_before_shrinking(tmp_path, monkeypatch):
    path = tmp_path / "unfinished"

    def killed(*args, **options):
        kept.append(from_json(BatchReport, path.read_text()))
        raise KeyboardInterrupt

    kept = []
    monkeypatch.setattr(batch, "shrink_finding", killed)
    run(tmp_path, cases=40, target=BROKEN, unfinished=str(path))
    assert {one.key[:4] for one in kept[0].found} == {CUT}
    assert not kept[0].complete


def test_finding_without_a_bundle_contains_its_case(tmp_path):
    (tmp_path / "taken").touch()
    found = run(tmp_path / "taken" / "below", cases=3, target=RAISING).found[0]
    assert (found.bundle, found.unkept) == ("", "Not a directory")
    assert found.scenario


def test_exception_in_a_target_is_a_finding(tmp_path):
    report = run(tmp_path, cases=3, target=RAISING, shrink_seconds=5)
    assert [one.key[0] for one in report.found] == ["world.rank-failed"]


def test_batch_without_a_fitting_case_names_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "_FRUITLESS_DRAWS_MAX", 100)
    report = run_batch(job(tmp_path, target="tests.fuzz.broken:Excluded"), render_case)
    assert (report.counts.cases, report.complete) == (0, True)
    assert "Capabilities.only = (('world.strict', (False,)),) excludes all" in report.futile


@pytest.mark.parametrize(("errors", "cases"), [(1, 50), (2, 60)])
def test_fifty_cases_with_the_same_error_end_the_batch(tmp_path, monkeypatch, errors, cases):
    judged = []

    def judge(scenario, **_):
        judged.append(scenario)
        return not_judged(scenario.name, f"no module {len(judged) % errors}")

    monkeypatch.setattr(batch, "run_case", judge)
    monkeypatch.setattr(batch, "may_shrink", lambda key: False)
    report = run(tmp_path, cases=60)
    assert report.counts.cases == cases
    said = "all of its first 50 cases end in the same error: no module 0"
    assert report.futile == (said if errors == 1 else "")


def test_batch_seeds_differ():
    assert len({batch_seed(seed, index) for seed in range(5) for index in range(5)}) == 25


def test_two_causes_with_one_key_are_two_findings(tmp_path, monkeypatch):
    """Each shrinks to one rank without the other's cause."""

    def judge(scenario, **_):
        is_wrong = scenario.optimizer.clip_norm is not None or scenario.run.micro_batches > 1
        found = (Finding(check="equality.master", message="m", manner="values"),)
        verdict, found = ("fail", found) if is_wrong else ("pass", ())
        return CaseResult(id=scenario.name, verdict=verdict, seconds=0.0, findings=found)

    monkeypatch.setattr(batch, "run_case", judge)
    monkeypatch.setattr(batch, "write_bundle", lambda *_, folder, **__: folder)
    two = run(tmp_path, cases=40).found
    assert (len(two), len({one.key for one in two})) == (2, 1)
    cases = [parse_cases(one.scenario, source="x", stem="x")[0] for one in two]
    causes = {(case.optimizer.clip_norm is not None, case.run.micro_batches > 1) for case in cases}
    assert causes == {(True, False), (False, True)}
    assert {case.world.size for case in cases} == {1}


def test_batch_of_families_has_a_fixed_size_and_is_deterministic(tmp_path):
    """Members count as cases, so the last family may be cut short."""
    one, two = (run(tmp_path, family=5) for _ in "ab")
    assert one.counts.cases == 12
    assert (one.counts.verdicts, one.cases_with) == (two.counts.verdicts, two.cases_with)
    assert one.cases_with != run(tmp_path).cases_with


def test_failing_member_of_a_family_is_found_and_shrunk(tmp_path):
    """Even if the first member passes."""
    report = run(tmp_path, cases=60, target=BROKEN, family=6)
    found = {tuple(each.key)[:4] for each in report.found}
    assert CUT in {(key[0], key[1], key[2], key[3]) for key in found}
    assert all(each.bundle for each in report.found)


def test_family_members_have_the_common_options(tmp_path, monkeypatch):
    judged = []
    right = batch.run_case

    def run(scenario, **named):
        judged.append(scenario)
        return right(scenario, **named)

    monkeypatch.setattr(batch, "run_case", run)
    few = (("all_reduce_last", "true"),)
    asked = job(tmp_path, target="torch-fsdp2", options=few, cases=8, family=4)
    assert run_batch(asked, render_case).counts.cases == 8
    assert all(
        ("all_reduce_last", "true") in {(each.name, each.value) for each in case.system.options}
        for case in judged
    )
    models = [(case.model, case.run.seed) for case in judged]
    assert len(set(models)) < len(models)


UNDIVIDED = "tests.run.summing:Undivided"
OF_PARAMS = Drawable(lambda choices: choices.integer(0, 2**20)).map(
    lambda seed: Scenario(
        schema=1,
        name="drawn",
        model=ModelSpec(name="params", shapes=((1,),)),
        world=WorldSpec(size=3),
        system=SystemSpec(stage=0),
        run=RunSpec(seed=seed),
    )
)


def test_some_cases_judged_by_params_only_are_repeated_with_sgd(tmp_path):
    report = run(tmp_path, cases=2 * TWIN_EVERY, target=UNDIVIDED, cases_from=OF_PARAMS)
    assert report.counts.verdicts == {"fail": 2, "pass": 2 * TWIN_EVERY - 2}
    assert report.counts.params_only == 2 * TWIN_EVERY - 2
    (one,) = report.found
    assert "found with SGD in place of AdamW" in one.text
    bundle = read_bundle(tmp_path / one.bundle)
    assert bundle.scenario.optimizer.name == one.case_again().optimizer.name == "sgd"
    assert run_case(bundle.scenario, target=import_target(UNDIVIDED)).verdict == "fail"


def test_resumed_batch_has_the_same_variants(tmp_path):
    report = run(tmp_path, cases=TWIN_EVERY, start=1, target=UNDIVIDED, cases_from=OF_PARAMS)
    assert report.counts.verdicts == {"pass": TWIN_EVERY - 1}


def test_inferred_rule_is_reported(tmp_path):
    report = run(tmp_path, cases=3, target="tests.run.summing:ShowsMeans", cases_from=OF_PARAMS)
    assert report.counts.verdicts == {"pass": 3}
    assert "reported_grads = 'after-division'" in next(iter(report.counts.taken))
    assert from_json(BatchReport, to_json(report)) == report
