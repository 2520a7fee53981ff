"""A case shrinks to one with the same finding and reason, under its own name."""

from dataclasses import replace

import pytest
import torch

from zero_sim.findings.records import CaseResult, Evidence, Finding
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import (
    FaultSpec,
    LossScaleSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    WorldSpec,
)
from zero_sim.shrink import Limits, right_judge, settings_of, shrink_finding
from zero_sim.targets import find_target

MODEL = ModelSpec(name="params", shapes=((3,), (4,)))
CASE = Scenario(
    schema=1, name="before", description="Four steps", model=MODEL, world=WorldSpec(size=3),
    run=RunSpec(steps=4),
)  # fmt: skip
PASSED = CaseResult(id="x", verdict="pass", seconds=0.0)


def failed(check="a", manner=""):
    found = Finding(check=check, message="m", manner=manner)
    return CaseResult(id="x", verdict="fail", seconds=0.0, findings=(found,))


def apart(by):
    """Return a finding whose values differ by this fraction of the expected ones."""
    expected = torch.tensor([1.0, 0.5])
    evidence = Evidence(start=0, expected=expected, got=expected * (1 + by))
    found = Finding(check="a", message="m", manner="values", evidence=evidence)
    return CaseResult(id="x", verdict="fail", seconds=0.0, findings=(found,))


def shrunk(case, judge, **more):
    limits = Limits(cases=300)
    return shrink_finding(
        case, judge(case), judge=judge, may_run=lambda other: True, limits=limits, **more
    )


def test_smaller_case_has_the_same_check():
    reduced, result = shrunk(CASE, lambda case: failed("a" if case.run.steps > 1 else "b"))
    assert reduced.size.steps == 2
    assert result.findings[0].check == "a"


def test_smaller_case_differs_in_the_same_manner():
    reduced, result = shrunk(
        CASE, lambda case: failed(manner="zeros" if case.world.size > 1 else "values")
    )
    assert reduced.size.ranks == 2
    assert result.findings[0].manner == "zeros"


def test_large_difference_does_not_shrink_to_rounding():
    """On one rank values differ by two roundings, on several by a third."""
    reduced, _ = shrunk(CASE, lambda case: apart(0.3 if case.world.size > 1 else 2.4e-7))
    assert (reduced.size.ranks, reduced.size.steps) == (2, 1)


def test_large_difference_may_become_smaller():
    reduced, _ = shrunk(CASE, lambda case: apart(0.3 if case.world.size > 1 else 0.05))
    assert reduced.size.ranks == 1


def test_rounding_difference_shrinks():
    reduced, _ = shrunk(CASE, lambda case: apart(6e-8 if case.world.size > 1 else 5e-8))
    assert reduced.size.ranks == 1


def test_smaller_case_has_no_new_setting():
    """On one rank, another divisor would show another mistake, namely no division at all."""
    tried = []

    def judge(case):
        tried.append(case)
        return failed() if case.world.size > 1 or case.system.divide_by != "ranks" else PASSED

    reduced, _ = shrunk(CASE, judge)
    assert reduced.size.ranks == 2
    assert all(settings_of(case) <= {"optimizer.lr", "data.rows"} for case in tried)


def test_smaller_case_passes_on_a_right_system():
    """A case that is inconclusive there proves nothing."""

    def right(case):
        return PASSED if case.run.steps > 1 else replace(PASSED, verdict="inconclusive")

    reduced, _ = shrunk(CASE, lambda case: failed(), right=right)
    assert reduced.size.steps == 2


def test_case_that_no_system_passes_shrinks():
    reduced, _ = shrunk(CASE, lambda case: failed(), right=lambda case: failed("other"))
    assert reduced.size.steps == 1


class TestPlannedFaults:
    """Cases with a planned fault."""

    case = replace(CASE, faults=(FaultSpec(kind="drop", rank=0, collective="all_reduce"),))

    def test_fault_is_kept_if_the_case_passes_without_it(self):
        """Smaller cases fail without it too, by another cause."""

        def judge(case):
            return failed() if case.faults or case.run.steps < 3 else PASSED

        reduced, _ = shrunk(self.case, judge)
        assert reduced.scenario.faults
        assert judge(replace(reduced.scenario, faults=())) is PASSED
        assert reduced.size.steps == 3

    def test_fault_may_be_removed_if_the_case_fails_without_it(self):
        reduced, _ = shrunk(self.case, lambda case: failed())
        assert reduced.scenario.faults == ()


def test_name_and_description_are_new():
    reduced, result = shrunk(CASE, lambda case: failed())
    assert reduced.scenario.name == result.id == "1-rank-1-param-1-element-1-step"
    assert reduced.scenario.description == (
        "1 rank, 1 param [[1]] in fp32, 1 step. Made from 'before' as the smallest case found "
        "with a."
    )


def test_description_lists_a_default_table():
    scaled = replace(CASE, optimizer=OptimizerSpec(loss_scale=LossScaleSpec()))
    reduced, _ = shrunk(scaled, lambda case: failed(str(bool(case.optimizer.loss_scale))))
    assert "1 step; optimizer.loss_scale. Made" in reduced.scenario.description


def test_case_that_cannot_shrink_keeps_its_name():
    reduced, result = shrunk(CASE, lambda case: failed(str(case == CASE)))
    assert (reduced.scenario, result.id) == (CASE, "x")


def test_case_without_a_finding_is_refused():
    with pytest.raises(ValueError, match="expected a case with a finding, got 'before'"):
        shrunk(CASE, lambda case: PASSED)


class TestRightJudge:
    """System that decides if a case can be passed."""

    def test_own_system_judges_for_other_targets(self, pool):
        (case,) = parse_cases('schema = 1\n[model]\nname = "mlp"\n', source="x", stem="x")
        judge = right_judge(find_target("torch-ddp"), pool=pool)
        assert judge(case).verdict == "pass"

    def test_own_target_has_no_right_judge(self, pool):
        assert right_judge(find_target("zero_sim"), pool=pool) is None
