"""Puts changed code into functions that are loaded, and the code that they had back.

Not the function is replaced but what it runs (`__code__`): whoever holds it, under whatever name,
runs the changed code, and nothing has to be imported again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType

from zero_sim.errors import MutantError, UsageError
from zero_sim.mutants.changes import Change, changed_tree, find_changes

_MARKER = "__zero_sim_changed__"
_CACHE = type(functools.lru_cache(lambda: None))


@dataclass(slots=True)
class Runs:
    """How often a changed function ran."""

    armed: int = 0

    def note(self) -> None:
        """Count one run."""
        self.armed += 1


class Loaded:
    """Modules whose code can be changed.

    What functions of their package remember between calls (`functools.cache`) is forgotten with
    every change: it may be of other code.

    Args:
        names: Full names of modules.

    Raises:
        UsageError: There is no such module, or none of its source.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._modules = {name: _imported(name) for name in names}
        self._sources = {name: _source_of(module) for name, module in self._modules.items()}
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        for module in self._modules.values():
            for function in _functions_of(module):
                self._functions[_key_of(function.__code__)].append(function)
        packages = {name.partition(".")[0] for name in names}
        self._caches = [
            cache
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] in packages
            for cache in _members_of(module)
            if isinstance(cache, _CACHE)
        ]

    def changes(self) -> list[Change]:
        """Every change of all modules."""
        return [
            change
            for name, source in self._sources.items()
            for change in find_changes(source, module=name)
        ]

    @contextmanager
    def changed(self, change: Change) -> Iterator[Runs]:
        """Make a change, and take it back.

        Before a world runs, never while one does.

        Args:
            change: One of `changes`.

        Yields:
            How often the changed function ran.

        Raises:
            MutantError: Nothing that is loaded has the code that is to be changed.
        """
        module = self._modules[change.module]
        tree = changed_tree(self._sources[change.module], change, marker=_MARKER)
        filename = inspect.getsourcefile(module) or change.module
        code = _code_of(compile(tree, filename, "exec", dont_inherit=True), name=change.function)
        functions = self._functions[_key_of(code)]
        if not functions:
            raise MutantError(
                f"Expected a function {change.module}.{change.function} that is loaded, but there "
                f"is none with the code of line {code.co_firstlineno}. Try to start anew: the "
                "source may have changed since."
            )
        originals, runs = [function.__code__ for function in functions], Runs()
        vars(module)[_MARKER] = runs.note
        try:
            for function in functions:
                function.__code__ = code
            self._forget()
            yield runs
        finally:
            for function, original in zip(functions, originals, strict=True):
                function.__code__ = original
            del vars(module)[_MARKER]
            self._forget()

    def _forget(self) -> None:
        for cache in self._caches:
            cache.cache_clear()


@dataclass(frozen=True, slots=True)
class Changed:
    """A system with one change, to be hunted like any mutant."""

    loaded: Loaded
    change: Change
    id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self.change.id)

    @contextmanager
    def apply(self) -> Iterator[Runs]:
        """As `Loaded.changed`."""
        with self.loaded.changed(self.change) as runs:
            yield runs


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"Expected the name of a module that can be imported, such as zero_sim.zero.norm, but "
            f"got {name!r}: {error}."
        ) from None


def _source_of(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        raise UsageError(
            f"Expected a module with Python source but got {module.__name__!r}, which has none."
        ) from None


def _members_of(module: ModuleType) -> Iterator[object]:
    """What a module names, and what the classes do that it defines."""
    pending = list(vars(module).values())
    for member in pending:
        yield member
        if isinstance(member, type) and member.__module__ == module.__name__:
            pending.extend(vars(member).values())


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """The functions of a module's own code, also those within what decorators made of them."""
    pending, seen = list(_members_of(module)), set[int]()
    for member in pending:
        if id(member) in seen:
            continue
        seen.add(id(member))
        if isinstance(member, FunctionType) and member.__module__ == module.__name__:
            yield member
        pending.extend(_within(member))


def _within(member: object) -> Iterator[object]:
    """What a decorator was given."""
    match member:
        case property():
            yield from (member.fget, member.fset)
        case staticmethod() | classmethod():
            yield member.__func__
        case functools.cached_property():
            yield member.func
        case FunctionType() | _CACHE():
            yield getattr(member, "__wrapped__", None)


def _key_of(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _code_of(code: CodeType, *, name: str) -> CodeType:
    """The code of a function or method of a module, given the module's."""
    pending = [code]
    for each in pending:
        if each.co_qualname == name:
            return each
        pending.extend(part for part in each.co_consts if isinstance(part, CodeType))
    raise MutantError(f"Expected code of {name!r} in {code.co_filename!r} but found none.")
