"""When two findings are one, and which may be shrunk."""

import pytest

from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario
from zero_sim.shrink import Limits, key_of, may_shrink, shrink_finding
from zero_sim.verify.records import CaseResult, Finding


class TestKeys:
    def result(self, verdict, **finding):
        found = (Finding(message="m", **finding),) if finding else ()
        return CaseResult(id="x", verdict=verdict, seconds=0.0, findings=found)

    def test_two_values_of_one_finding_have_one_key(self):
        one = self.result("fail", check="a", phase="p", rank=1, param="0.weight", expected="1")
        other = self.result("fail", check="a", phase="p", rank=2, param="1.bias", step=3)
        assert key_of(one) == key_of(other) == ("a", "p", "dense")

    def test_experts_are_another_kind(self):
        one = self.result("fail", check="a", phase="p", param="experts.0.weight")
        assert key_of(one) == ("a", "p", "expert")

    def test_what_is_not_wrong_has_none(self):
        assert key_of(self.result("inconclusive", check="guard.x")) is None

    def test_a_case_that_was_refused_is_one(self):
        assert key_of(self.result("error")) == ("internal.refused", "", "")


@pytest.mark.parametrize(("check", "may"), [("equality.grad", True), ("expect.overlap", False)])
def test_an_expectation_is_of_a_case_at_its_size(check, may):
    assert may_shrink((check, "", "")) is may


def test_a_case_shrinks_only_to_cases_with_the_same_finding():
    def judge(case):
        check = "a" if case.run.steps > 1 else "b"
        return CaseResult(
            id="x", verdict="fail", seconds=0.0, findings=(Finding(check=check, message="m"),)
        )

    model = ModelSpec(name="params", shapes=((1,),))
    case = Scenario(schema=1, model=model, run=RunSpec(steps=4))
    reduced, result = shrink_finding(
        case, judge(case), judge=judge, may_ask=lambda other: True, limits=Limits(cases=200)
    )
    assert reduced.size.steps == 2
    assert result.findings[0].check == "a"
