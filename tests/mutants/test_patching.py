"""Patches: they refuse missing fragments, record outdated edits, and revert completely."""

import traceback
from dataclasses import dataclass

import pytest

from zero_sim.errors import MutantError
from zero_sim.mutants.patching import Patches


def twice(function):
    """Decorate with a wrapper, as `torch.no_grad` does."""
    from functools import wraps

    @wraps(function)
    def wrapper(*args):
        return 2 * function(*args)

    return wrapper


class Base:
    def number(self):
        return 1


class Child(Base):
    scale = 10

    def number(self):
        """Return a number; not 2."""
        own = super().number()
        own = own + 1
        return self.scale * own

    @property
    def prop(self):
        return "right"

    @staticmethod
    @twice
    def static(number):
        if number:
            return number
        return -1


@dataclass(frozen=True, slots=True)
class Record:
    value: int

    def __post_init__(self):
        if self.value < 0:
            raise ValueError("negative")


def count_up(start):
    def count():
        nonlocal start
        start += 1
        return start

    return count


@pytest.fixture
def patches():
    made = Patches()
    yield made
    made.restore()


class TestEdits:
    def test_edit_applies_until_it_is_restored(self, patches):
        code, child = Child.number.__code__, Child()
        patches[Child.number, "own + 1"] = "own + 2"
        assert child.number() == 20
        patches.install()
        assert (child.number(), patches.armed) == (30, 1)
        patches.restore()
        assert child.number() == 20
        assert Child.number.__code__ is code

    def test_edits_of_one_function_are_applied_in_order(self, patches):
        patches[Child.number, "own + 1"] = "own + 2"
        patches[Child.number, "own + 2"] = "own + 3"
        patches[Child.number, "return self"] = """
            if own == 4:
                own = 5
            ..."""
        patches.install()
        assert Child().number() == 50

    def test_several_lines_are_matched_with_their_indentation(self, patches):
        patches[Child.static, "if number:\n    return number"] = """
            if number > 1:
                ..."""
        patches.install()
        assert [Child.static(number) for number in (0, 1, 2)] == [-2, -2, 4]

    def test_property_can_be_edited(self, patches):
        patches[Child.prop, "right"] = "wrong"
        patches.install()
        assert Child().prop == "wrong"

    def test_method_of_a_slotted_dataclass_can_be_edited(self, patches):
        patches[Record.__post_init__, "self.value < 0"] = "self.value < 1"
        patches.install()
        with pytest.raises(ValueError, match="negative"):
            Record(0)

    def test_closure_keeps_its_variables(self, patches):
        count = count_up(1)
        count()
        patches[count, "+= 1"] = "+= 10"
        patches.install()
        assert count() == 12

    def test_second_mutant_of_a_module_is_refused(self, patches):
        patches[Child.number, "own + 1"] = "own + 2"
        patches.install()
        second = Patches()
        second[Child.prop, "right"] = "wrong"
        with pytest.raises(MutantError, match="one mutant at a time"):
            second.install()
        second.restore()
        assert (Child().number(), Child().prop) == (30, "right")

    def test_traceback_contains_the_original_line(self, patches):
        patches[Child.number, "own + 1"] = "own + int('x')"
        patches.install()
        with pytest.raises(ValueError, match="invalid literal") as raised:
            Child().number()
        last = traceback.extract_tb(raised.value.__traceback__)[-1]
        assert (last.filename, last.line) == (__file__, "own = own + 1")

    @pytest.mark.parametrize(("fragment", "times"), [("own + 7", 0), ("own", 4), ("number", 3)])
    def test_fragment_that_does_not_occur_once_is_refused(self, patches, fragment, times):
        with pytest.raises(MutantError, match=rf"once in Child\.number, got it {times} times"):
            patches[Child.number, fragment] = "pass"

    def test_function_without_a_source_is_refused(self, patches):
        with pytest.raises(MutantError, match="with a source to edit, got <built-in"):
            patches[len, "x"] = "y"

    def test_missing_name_in_an_edit_is_recorded(self, patches):
        patches[Child.number, "own + 1"] = "own + self.gone"
        patches.install()
        with pytest.raises(AttributeError):
            Child().number()
        assert "no attribute 'gone'" in patches.outdated

    def test_error_outside_of_the_edit_is_not_recorded(self, patches):
        patches[Child.number, "own + 1"] = "None"
        patches.install()
        with pytest.raises(TypeError):
            Child().number()
        assert patches.outdated == ""
