"""Replacing functions of the system at run time, and putting them back.

A mutant is written against a function as it was. Were that function rewritten, the mutant could go
on without breaking anything, and the score would be about nothing. So every patch names a function
that must exist and whose code must still have the fingerprint that is on record.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

from zero_sim.errors import MutantError
from zero_sim.mutants.fingerprints import FINGERPRINTS

_DIGEST_BYTES = 6


class Patches:
    """The functions that one mutant has replaced.

    Attributes:
        armed: How often one of the replacements was called.
        names: The names under which the fingerprints of what was replaced are on record.
    """

    def __init__(self) -> None:
        self.armed = 0
        self.names: set[str] = set()
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
            MutantError: If there is no such function, or its code is not what mutants know.
        """
        present = vars(owner).get(name)
        original = present.fget if isinstance(present, property) else present
        if not inspect.isfunction(original):
            raise MutantError(
                f"Expected a function {owner.__name__}.{name} to replace but got {present!r}. "
                f"Try its new name, or the module that calls it."
            )
        check_fingerprint(original)
        self.names.add(name_of(original))

        def place(wrong: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(*args: Any, **named: Any) -> Any:
                self.armed += 1
                return wrong(original, *args, **named)

            self._replaced.append((owner, name, present))
            is_property = isinstance(present, property)
            setattr(owner, name, property(replacement) if is_property else replacement)
            return wrong

        return place

    def restore(self) -> None:
        """Put everything back."""
        while self._replaced:
            owner, name, present = self._replaced.pop()
            setattr(owner, name, present)


def name_of(function: Callable[..., object]) -> str:
    """The name under which a function's fingerprint is on record."""
    return f"{function.__module__}:{function.__qualname__}"


def check_fingerprint(function: Callable[..., object]) -> None:
    """Refuse a function whose code changed since mutants were written against it.

    Raises:
        MutantError: If it did, or is not on record.
    """
    name = name_of(function)
    got, known = fingerprint(function), FINGERPRINTS.get(name)
    if got != known:
        raise MutantError(
            f"Expected {name} with fingerprint {known}, as mutants were written against it, but "
            f"got {got}. Try to see whether those that replace it still break what they say, and "
            f"then put the new one into zero_sim/mutants/fingerprints.py."
        )


@cache
def fingerprint(function: Callable[..., object]) -> str:
    """Hash what a function does: its syntax tree, without docstrings, comments and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    text = " ".join(_words(tree))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _words(node: object) -> Iterator[str]:
    # Not ast.dump, which says the same tree differently in different versions of Python.
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if value not in (None, []) and not isinstance(value, ast.expr_context):
                yield name
                yield from _words(value)
        yield ")"
    elif isinstance(node, list):
        for item in node:
            yield from _words(item)
    else:
        yield repr(node)
