"""Rules that fit, read from findings."""

from dataclasses import replace

import pytest

from zero_sim.findings.records import CaseResult, Finding
from zero_sim.judge.rules_tried import RulesTried, with_rules
from zero_sim.rules.declared import declared_by, without_advice


def test_declaration_is_read_from_the_first_finding():
    detail = "more\nIf this is intended, declare Numerics(divide='pre', divide_by='tokens')"
    finding = Finding(check="equality.grad", message="", detail=detail)
    result = CaseResult(id="a", verdict="fail", seconds=0.0, findings=(finding,))
    assert declared_by(result) == [{"divide": "pre", "divide_by": "tokens"}]
    assert declared_by(CaseResult(id="a", verdict="pass", seconds=0.0)) == []


def test_alternatives_are_read_separately():
    one = "If this is intended, declare Numerics(reported_grads='before-division')"
    tried = RulesTried(assumed="divide = 'post'", tried=9, fitting=("divide = 'none'",))
    found = (Finding(check="equality.grad", message="", detail=f"a\n\nb\n{one}"),)
    (finding,) = with_rules(found, replace(tried, what="gradient"))
    assert finding.detail.startswith("a\n\nb\nthe reference computed")
    assert finding.detail.endswith(
        "If this is intended, declare one of: "
        "Numerics(reported_grads='before-division'), Numerics(divide='none')"
    )
    result = CaseResult(id="a", verdict="fail", seconds=0.0, findings=(finding,))
    assert declared_by(result) == [{"reported_grads": "before-division"}, {"divide": "none"}]
    assert "declare" not in without_advice(result).findings[0].detail


@pytest.mark.parametrize(
    "fitting",
    [
        ("clip = 'a'", "clip = 'b'", "clip = 'c'"),
        ("divide = 'pre', sync = 'every'", "divide_by = 'tokens'"),
        ("divide = 'pre'",),
    ],
)
@pytest.mark.parametrize("blind", ["", "No rule is proposed: why"])
def test_fitting_rules_are_read_even_if_not_proposed(fitting, blind):
    tried = RulesTried(assumed="clip = 'x'", tried=9, fitting=fitting, blind=blind)
    finding = Finding(check="equality.grad", message="", detail=tried.in_words())
    read = declared_by(CaseResult(id="a", verdict="fail", seconds=0.0, findings=(finding,)))
    assert [", ".join(f"{n} = {v!r}" for n, v in each.items()) for each in read] == list(fitting)
