"""Budgets of the code base: a figure may exceed its budget only by a commit with the reason."""

import json
from pathlib import Path

import pytest

from tests.house import (
    BUDGETS,
    PACKAGE,
    lower,
    measure_prose,
    measure_road,
    measure_shape,
    measure_size,
    read_modules,
)

KNOWN = json.loads(BUDGETS.read_text())
REMEDY = (
    "Make it smaller. If the growth is worth it, raise the number in tests/budgets.json in a "
    "commit of its own that says why."
)


@pytest.fixture(scope="module")
def modules():
    return read_modules()


def assert_within_budget(figures):
    above = {
        name: f"expected at most {KNOWN.get(name)}, got {value}"
        for name, value in figures.items()
        if value > KNOWN.get(name, 0)
    }
    assert above == {}, REMEDY


def test_size(modules):
    assert_within_budget(measure_size(modules))


def test_shapes_of_classes_and_functions(modules):
    assert_within_budget(measure_shape(modules))


def test_prose(modules):
    assert_within_budget(measure_prose(modules))


def test_road_of_the_smallest_case():
    assert_within_budget(measure_road())


def test_figure_above_budget_is_named():
    with pytest.raises(AssertionError, match="lines of attic"):
        assert_within_budget({"lines of attic": 1})


def test_lowering_never_raises():
    assert lower({"a": 3, "gone": 1}, {"a": 5, "b": 2}) == {"a": 3, "b": 2}


class TestFigures:
    """Measurements of two small modules."""

    SOURCE = '''"""Shards of a buffer."""
from dataclasses import dataclass

@dataclass
class Pair:
    """Where it lies."""

    left: int
    """What the left is."""
    right: int  # beside code

class Wide:
    def __init__(self, a, b, c, d, e, f, g, h, i):
        # a line of its own
        self.a, self.b = a, b
'''

    @pytest.fixture
    def small(self):
        spec = Path("scenario/spec.py")
        return {
            PACKAGE / spec: "class SystemSpec:\n    left: int\n    stage: int\n",
            PACKAGE / "zero/pair.py": self.SOURCE,
        }

    def test_size(self, small):
        size = measure_size(small)
        assert (size["modules"], size["lines of zero"], size["lines of scenario"]) == (2, 15, 3)

    def test_shape(self, small):
        shape = measure_shape(small)
        assert shape["most attributes of a class"] == 2
        assert shape["most fields of a record"] == 2
        assert shape["functions above 8 parameters"] == 1
        # `left` occurs in both modules, `stage` in one.
        assert shape["modules that name a field of SystemSpec, median"] == 1.5

    def test_prose(self, small):
        prose = measure_prose(small)
        assert prose["headless docstrings of a class, %"] == 100
        assert prose["lines without a comment per 100 lines"] == round(100 - 100 / 18, 1)
