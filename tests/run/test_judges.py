"""Cases on several processes: results and their order equal those of one process."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from zero_sim.errors import UsageError, ZeroSimError
from zero_sim.rules.judging import EXPLAINER
from zero_sim.run.judges import Chosen, JobsJudge, open_judge
from zero_sim.scenario.spec import FaultSpec, ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec

CASE = Scenario(
    schema=1,
    name="plain",
    model=ModelSpec(name="mlp", hidden=5),
    world=WorldSpec(size=2),
    run=RunSpec(steps=2),
)
LONG = replace(CASE, name="long", run=RunSpec(steps=40))
FLIP = FaultSpec(kind="corrupt", rank=1, collective="reduce_scatter", element=1, bit=30)
WRONG = replace(CASE, name="wrong", faults=(FLIP,))
REFUSED = replace(CASE, name="refused", system=SystemSpec(target="torch-ddp", redundancy=2))
CASES = (LONG, CASE, WRONG, REFUSED, replace(CASE, name="last"))
MODULE = """
import os
import signal
from zero_sim.errors import EnvironmentProblem
from zero_sim.targets import find_target

class Mine:
    name = "mine"
    capabilities = None

    def build(self, module, *, scenario, group):
        if scenario.name == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if scenario.name == "lacks":
            raise EnvironmentProblem("expected a device, got none")
        return find_target("zero_sim").build(module, scenario=scenario, group=group)

    def refuses(self, scenario):
        if scenario.name == "crashes":
            raise _Unpicklable(1, 2)
        return ()

class _Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__("boom")
"""


@contextmanager
def on_processes(cases, chosen):
    with JobsJudge(cases, jobs=2, chosen=chosen) as judge:
        yield judge


@pytest.fixture(scope="module")
def results():
    """Results of every case, on one process and on two."""
    with open_judge(Chosen(explainer=EXPLAINER)) as judge:
        alone = [judge(case) for case in CASES]
    with on_processes(CASES, Chosen(explainer=EXPLAINER)) as judge:
        return alone, [judge(case) for case in CASES]


def test_results_keep_the_order_of_cases(results):
    _, shared = results
    assert [result.id for result in shared] == [case.name for case in CASES]


def test_verdicts_and_findings_equal_those_of_one_process(results):
    def told(result):
        found = [(each.check, each.message, each.rank, each.got) for each in result.findings]
        return result.verdict, result.error, found, result.guarantees, result.log_digest

    alone, shared = results
    assert [told(result) for result in shared] == [told(result) for result in alone]
    verdicts = ["pass", "pass", "fail", "error", "pass"]
    assert [result.verdict for result in shared] == verdicts


def test_failing_case_returns_its_log_and_evidence(results):
    alone, shared = results
    assert [log.digest() for log in shared[2].logs] == [log.digest() for log in alone[2].logs]
    here, there = (result.findings[0].evidence for result in (alone[2], shared[2]))
    assert torch.equal(here.got, there.got)


def test_logs_of_passing_cases_are_returned_if_kept():
    with on_processes([CASE] * 2, Chosen(keep_logs=True, explainer=EXPLAINER)) as judge:
        assert all(judge(CASE).logs for _ in range(2))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "a_target_of_jobs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Chosen(target="a_target_of_jobs:Mine", explainer=EXPLAINER)


def test_dead_process_costs_its_current_case(mine):
    cases = [replace(CASE, name=name) for name in ("dies", "one", "two", "dies", "three")]
    with on_processes(cases, mine) as judge:
        results = [judge(case) for case in cases]
    verdicts = [result.verdict for result in results]
    assert verdicts == ["error", "pass", "pass", "error", "pass"]
    assert [found.check for found in results[0].findings] == ["internal.process-died"]


def test_errors_of_judging_equal_those_of_one_process(mine):
    cases = [replace(CASE, name=name) for name in ("lacks", "crashes", "one")]
    with on_processes(cases, mine) as judge:
        with pytest.raises(ZeroSimError, match="expected a device, got none") as raised:
            judge(cases[0])
        assert raised.value.exit_status == 4
        crashed = judge(cases[1])
        assert crashed.verdict == "error"
        assert crashed.error.endswith("got _Unpicklable: boom.")
        assert judge(cases[2]).verdict == "pass"


def test_missing_target_is_an_error_before_a_process_starts():
    with pytest.raises(UsageError, match="importable module"):
        JobsJudge([CASE], jobs=2, chosen=Chosen(target="no_such_module:Mine", explainer=""))
