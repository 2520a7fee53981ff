"""The `-k` expression."""

import pytest

from zero_sim.errors import UsageError
from zero_sim.scenario.discover import compile_expression

IDS = ("toy/size=1,dtype=bf16", "toy/size=2,dtype=fp32", "digits", "my case (old)")


def selected(expression):
    """Return the indices of the ids that an expression selects."""
    matches = compile_expression(expression)
    return [place for place, case_id in enumerate(IDS) if matches(case_id)]


@pytest.mark.parametrize(
    ("expression", "places"),
    [
        ("", [0, 1, 2, 3]),
        ("  ", [0, 1, 2, 3]),
        ("toy", [0, 1]),
        ("TOY", [0, 1]),
        ("not toy", [2, 3]),
        ("not not toy", [0, 1]),
        ("toy and bf16", [0]),
        ("toy and not bf16", [1]),
        ("digits or toy and bf16", [0, 2]),
        ("(digits or toy) and bf16", [0]),
        ("not (digits or toy)", [3]),
        ("digits or bf16 or fp32", [0, 1, 2]),
        ("size=2,dtype=fp32", [1]),
        ("toy/size=1", [0]),
        ('"my case"', [3]),
        ("'(old)'", [3]),
        ("nothing", []),
    ],
)
def test_expression_selects_ids(expression, places):
    """`not` binds before `and`, `and` before `or`."""
    assert selected(expression) == places


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("(", "expected a word, `not` or `(`, got the end"),
        ("a and", "expected a word, `not` or `(`, got the end"),
        ("and a", "expected a word, `not` or `(`, got `and` at column 1"),
        ("a or or b", "expected a word, `not` or `(`, got `or` at column 6"),
        ("(a", "expected `)`, got the end"),
        ("a)", "expected `and`, `or` or the end, got `)` at column 2"),
        ("a b", "expected `and`, `or` or the end, got `b` at column 3"),
        ("()", "expected a word, `not` or `(`, got `)` at column 2"),
        ("a or 'b", "expected a closing quote for the one at column 6"),
        ("(" * 5000, "expected at most 100 levels"),
    ],
)
def test_malformed_expression_is_refused(expression, said):
    with pytest.raises(UsageError) as caught:
        compile_expression(expression)
    assert said in str(caught.value)
