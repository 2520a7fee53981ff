"""Replacing functions of the system at run time, and putting them back.

A mutant is written against a function as it was. Were that function rewritten, the mutant could go
on without breaking anything: then no case finds it, and the campaign says so. Or it could break in
a way of its own, by a name that is gone: that is noted, and never counts as found.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from zero_sim.errors import MutantError

_OWN_MISTAKES = (AttributeError, NameError, TypeError)


class Patches:
    """The functions that one mutant has replaced.

    Attributes:
        armed: How often one of the replacements was called.
        outdated: What a replacement raised of its own, as it does where the names that it uses are
            gone; empty while none did.
    """

    def __init__(self) -> None:
        self.armed = 0
        self.outdated = ""
        self._replaced: list[tuple[ModuleType | type, str, object]] = []

    def __call__(
        self, owner: ModuleType | type, name: str
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make a decorator that puts a function in the place of another.

        Args:
            owner: A module of the system, at the place where the function is used, or a class.
            name: Function, method or property there.

        Returns:
            A decorator. What it decorates is called with the original first.

        Raises:
            MutantError: If there is no such function.
        """
        present = vars(owner).get(name)
        original = present.fget if isinstance(present, property) else present
        if not inspect.isfunction(original):
            raise MutantError(
                f"expected a function {owner.__name__}.{name} to replace, got {present!r}. "
                f"Try its new name, or the module that calls it."
            )

        def install(wrong: Callable[..., Any]) -> Callable[..., Any]:
            _check_takes(wrong, original, name=f"{owner.__name__}.{name}")

            def replacement(*args: Any, **named: Any) -> Any:
                self.armed += 1
                try:
                    return wrong(original, *args, **named)
                except _OWN_MISTAKES as error:
                    self._note(error, wrong)
                    raise

            self._replaced.append((owner, name, present))
            is_property = isinstance(present, property)
            setattr(owner, name, property(replacement) if is_property else replacement)
            return wrong

        return install

    def restore(self) -> None:
        """Put everything back."""
        while self._replaced:
            owner, name, present = self._replaced.pop()
            setattr(owner, name, present)

    def _note(self, error: Exception, wrong: Callable[..., Any]) -> None:
        """Note what was raised by a replacement itself, and not by what it called."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        if last.filename in (wrong.__code__.co_filename, __file__):
            self.outdated = f"{type(error).__name__}: {error}, at {last.name}:{last.lineno}"


def _check_takes(wrong: Callable[..., Any], original: Callable[..., Any], *, name: str) -> None:
    """Refuse a replacement that cannot be called as the original is.

    Raises:
        MutantError: If it has no place for an argument of the original.
    """
    kind = inspect.Parameter
    taken, owed = (list(inspect.signature(each).parameters.values()) for each in (wrong, original))
    takes_all = {one.kind for one in taken} & {kind.VAR_POSITIONAL, kind.VAR_KEYWORD}
    missing: list[str] = []
    if kind.VAR_KEYWORD not in takes_all:
        names = {one.name for one in taken}
        missing = [
            one.name for one in owed if one.kind is kind.KEYWORD_ONLY and one.name not in names
        ]
    # The first place of a replacement is the original's.
    by_place = (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)
    places, wanted = (sum(one.kind in by_place for one in each) for each in (taken, owed))
    if kind.VAR_POSITIONAL not in takes_all and places <= wanted:
        missing.append(f"{wanted} arguments by place")
    if missing:
        raise MutantError(
            f"expected a replacement that takes what {name} takes, got one without "
            f"{', '.join(missing)}. Try to take it and hand it on."
        )
