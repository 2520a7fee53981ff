"""Every check that the code can give is explained, and nothing else is."""

import ast
import dataclasses
from pathlib import Path

import pytest

from zero_sim.errors import UsageError
from zero_sim.findings import describe as findings
from zero_sim.report.explain import EXPLANATIONS, explain
from zero_sim.scenario.spec import WorldSpec

PACKAGE = Path(__file__).parents[2] / "zero_sim"
EXPLAINING = PACKAGE / "report" / "explain.py"
FAMILIES = ("backend", "equality", "expect", "guard", "input", "internal", "invariant", "world")


def strings_of_checks(path):
    """The ids of checks that a module spells out, in whatever it does with them."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.keyword(arg="check", value=value):
                yield from strings(value)
            case ast.Assign(targets=[ast.Name(id="check")], value=value):
                yield from strings(value)
            case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id="check"), *_])], value=value):
                yield from strings(value.elts[0])
            case ast.Dict(keys=keys):
                yield from (text for key in keys if key is not None for text in strings(key))
            case ast.Call(args=[ast.Constant(value=str(text)), *_]):
                yield text


def strings(node):
    """All plain strings in an expression."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def said_of_a_step():
    """Checks whose ids are made from the names of what an engine says."""
    for module in ("judge", "exact"):
        for node in ast.walk(ast.parse((PACKAGE / "judge" / f"{module}.py").read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="said"), args=[ast.Constant(value=name), *_]):
                    yield name
                case ast.Assign(targets=[ast.Name(id="said")], value=ast.Tuple(elts=pairs)):
                    yield from (pair.elts[0].value for pair in pairs)


def given():
    """Every check that the code can give."""
    found = {
        text
        for path in PACKAGE.rglob("*.py")
        if path != EXPLAINING
        for text in strings_of_checks(path)
        if text.partition(".")[0] in FAMILIES and text.count(".") == 1 and text[-1] != "."
    } - {f"world.{column.name}" for column in dataclasses.fields(WorldSpec)}
    names = set(said_of_a_step())
    assert {"norm", "zeros", "skipped", "loss_scale"} <= names
    return found | {findings.said(name, 0, 0, expected=1, got=2).check for name in names}


def test_every_check_is_explained_and_no_other():
    assert given() == set(EXPLANATIONS)


@pytest.mark.parametrize("explanation", EXPLANATIONS.values(), ids=lambda e: e.check)
def test_an_explanation_is_complete_and_ascii(explanation):
    assert explanation.meaning.endswith(".")
    assert explanation.why
    assert explanation.causes
    texts = [explanation.meaning, explanation.why, *explanation.causes, *explanation.seen_in]
    assert all(text.isascii() for text in texts)
    assert all("#" in bug.partition(":")[0] for bug in explanation.seen_in)


def test_an_unknown_check_names_the_known_ones():
    with pytest.raises(UsageError, match=r"equality\.grad.*got 'equality\.gard'"):
        explain("equality.gard")
