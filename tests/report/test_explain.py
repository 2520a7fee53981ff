"""Explanations: every check has one, and nothing else has."""

import ast
from pathlib import Path

import pytest

from zero_sim.errors import UsageError
from zero_sim.report.explain import EXPLANATIONS, explain
from zero_sim.scenario.checks import Check

PACKAGE = Path(__file__).parents[2] / "zero_sim"


def test_every_check_is_explained_once_in_order():
    assert list(EXPLANATIONS) == list(Check)


def test_code_names_checks_and_phases_by_their_enums():
    """No check id and no phase is a plain string."""
    # The id of expect.finding is also a scenario field.
    ids, found = {check.value for check in Check} - {Check.EXPECT_FINDING.value}, []
    for path in PACKAGE.rglob("*.py"):
        # Verdicts on scripts have no checks.
        if path.name == "checks.py" or path.parent.name == "against":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.keyword(arg="check" | "phase", value=ast.Constant(value=str(text))):
                    found.append(f"{path.name}: {text}")
                case ast.Constant(value=str(text)) if text in ids:
                    found.append(f"{path.name}: {text}")
    assert found == []


@pytest.mark.parametrize("area", sorted({check.area for check in Check}))
def test_area_is_the_prefix_of_a_check(area):
    assert all(check.startswith(f"{area}.") for check in Check if check.area == area)
    assert area.isalpha()


@pytest.mark.parametrize("explanation", EXPLANATIONS.values(), ids=lambda e: e.check)
def test_explanation_is_complete_and_ascii(explanation):
    assert explanation.meaning.endswith(".")
    assert explanation.why
    assert explanation.causes
    assert explanation.next.endswith(".")
    texts = [
        explanation.meaning,
        explanation.why,
        explanation.next,
        *explanation.causes,
        *explanation.seen_in,
    ]
    assert all(text.isascii() for text in texts)
    assert all("#" in bug.partition(":")[0] for bug in explanation.seen_in)


def test_unknown_check_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match=r"equality\.grad.*got 'equality\.gard'"):
        explain("equality.gard")
