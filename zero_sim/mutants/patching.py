"""Breaking functions of the system at run time, and putting them back.

[Note: a mutant is an edit]
A fragment of a function's source is replaced, the result is compiled, and the function gets its
code: every importer, hook and partial calls it from then on. Putting back is one assignment. The
fragment must occur exactly once, or the table of mutants does not load: a refactoring cannot disarm
a mutant unnoticed. The whole file is compiled, so that closures, `super()` and line numbers are
right.

What cannot be said as an edit is a function that takes the place of another. Either may break in a
way of its own, by a name that is gone: that is noted, and never counts as found.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from zero_sim.errors import MutantError

_OWN_MISTAKES = (AttributeError, NameError, TypeError)
_NAME = "__mutant__"
# Around the body of an edited function; the names are not mangled inside a class.
_WATCHED = f"""
{_NAME}.armed += 1
try:
    pass
except Exception as __error__:
    {_NAME}.note_edited(__error__)
    raise
"""


@dataclass(slots=True)
class _Edited:
    """One function with its source as edited.

    Attributes:
        function: What is edited, without decorators.
        first: Its first line in its file, from 1.
        length: Its number of lines there.
        source: Its lines, edited.
        news: Lines that edits put there, without indentation.
    """

    function: FunctionType
    first: int
    length: int
    source: str
    news: list[str]

    @classmethod
    def of(cls, function: FunctionType) -> _Edited:
        lines, first = inspect.getsourcelines(function)
        return cls(function, first, len(lines), "".join(lines), [])

    def replace(self, fragment: str, by: str) -> None:
        """Replace a fragment; `...` in `by` stands for it.

        Raises:
            MutantError: If it does not occur exactly once.
        """
        fragment = _plain(fragment)
        found = list(_find(fragment, self.source))
        if len(found) != 1:
            raise MutantError(
                f"expected {fragment!r} once in {self.function.__qualname__}, got it "
                f"{len(found)} times. Adapt the edit."
            )
        ((start, present),) = found
        by = _plain(by)
        self.news += by.replace("...", "\n").splitlines()
        lines = [line.replace("...", _indented(fragment, like=line)) for line in by.split("\n")]
        new = _indented("\n".join(lines), like=_line_of(self.source, start))
        self.source = self.source[:start] + new + self.source[start + len(present) :]

    def compile(self) -> CodeType:
        """Return the code of the edited function."""
        path = self.function.__code__.co_filename
        lines = Path(path).read_text().splitlines(keepends=True)
        lines[self.first - 1 : self.first - 1 + self.length] = [self.source]
        tree = ast.parse("".join(lines), path)
        node = next(
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and node.name == self.function.__name__
            and 0 <= node.lineno - self.first < self.source.count("\n")
        )
        watched = ast.parse(_WATCHED)
        for each in ast.walk(watched):
            if "lineno" in each._attributes:
                ast.copy_location(each, node.body[0])
        guarded = watched.body[1]
        assert isinstance(guarded, ast.Try)
        guarded.body, node.body = node.body, watched.body
        return next(
            code
            for code in _codes_in(compile(tree, path, "exec", dont_inherit=True))
            if code.co_qualname == self.function.__qualname__
            and code.co_firstlineno == self.function.__code__.co_firstlineno
        )


class Patches:
    """What one mutant changes.

    `patches[function, fragment] = by` edits the source of a function, method or property; several
    edits of one are made one after another. `@patches(owner, name)` puts a function in the place of
    another. Nothing is changed before `install`.

    Attributes:
        armed: How often changed code was called.
        outdated: What changed code raised of its own, as it does where the names that it uses are
            gone; empty while none did.
        kept: What edits remember from call to call, as `__mutant__.kept`.
    """

    def __init__(self) -> None:
        self.armed = 0
        self.kept: dict[Any, Any] = {}
        self.outdated = ""
        self._edited: dict[FunctionType, _Edited] = {}
        self._replacements: list[tuple[ModuleType | type, str, object]] = []
        self._restores: list[Callable[[], None]] = []

    def __setitem__(self, place: tuple[Callable[..., Any] | property, str], by: str) -> None:
        """Replace a fragment of a function by another, in which `...` stands for the first.

        Lines behind the first are indented as the line in which the fragment begins.

        Raises:
            MutantError: If the fragment does not occur exactly once in the function.
        """
        where, fragment = place
        function = _function_of(where)
        self._edited.setdefault(function, _Edited.of(function)).replace(fragment, by)

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

        def collect(wrong: Callable[..., Any]) -> Callable[..., Any]:
            _check_takes(wrong, original, name=f"{owner.__name__}.{name}")

            def replacement(*args: Any, **named: Any) -> Any:
                self.armed += 1
                try:
                    return wrong(original, *args, **named)
                except _OWN_MISTAKES as error:
                    last = traceback.extract_tb(error.__traceback__)[-1]
                    if last.filename in (wrong.__code__.co_filename, __file__):
                        self._note(error)
                    raise

            is_property = isinstance(present, property)
            self._replacements.append(
                (owner, name, property(replacement) if is_property else replacement)
            )
            return wrong

        return collect

    def install(self) -> None:
        """Break the system."""
        for function, edited in self._edited.items():
            code = edited.compile()
            self._restores.append(_setter(function, "__code__"))
            function.__code__ = code
            self._restores.append(lambda names=function.__globals__: names.pop(_NAME, None))
            function.__globals__[_NAME] = self
        for owner, name, replacement in self._replacements:
            self._restores.append(_setter(owner, name))
            setattr(owner, name, replacement)

    def restore(self) -> None:
        """Put everything back."""
        while self._restores:
            self._restores.pop()()

    def note_edited(self, error: Exception) -> None:
        """Note what an edit itself raised, and not what it called or what it left as it was."""
        raised = error.__traceback__
        if isinstance(error, _OWN_MISTAKES) and raised is not None and raised.tb_next is None:
            edited = next(
                each
                for function, each in self._edited.items()
                if function.__code__ is raised.tb_frame.f_code
            )
            line = edited.source.splitlines()[raised.tb_lineno - edited.first]
            if any(new.strip() and new.strip() in line for new in edited.news):
                self._note(error)

    def _note(self, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        self.outdated = f"{type(error).__name__}: {error}, at {last.name}:{last.lineno}"


def _function_of(where: Callable[..., Any] | property) -> FunctionType:
    inner = where.fget if isinstance(where, property) else where
    function = inspect.unwrap(getattr(inner, "__func__", inner))
    if not isinstance(function, FunctionType):
        raise MutantError(f"expected a function with a source to edit, got {where!r}.")
    return function


def _plain(text: str) -> str:
    """Take the indentation from a text that begins in a line of its own."""
    return textwrap.dedent(text).strip("\n") if text.startswith("\n") else text


def _find(fragment: str, source: str) -> Iterator[tuple[int, str]]:
    """Where a fragment begins, and how it stands there, its lines indented."""
    first = fragment.split("\n")[0]
    start = source.find(first)
    while start >= 0:
        present = _indented(fragment, like=_line_of(source, start))
        if source.startswith(present, start):
            yield start, present
        start = source.find(first, start + 1)


def _line_of(source: str, place: int) -> str:
    return source[source.rfind("\n", 0, place) + 1 :]


def _indented(text: str, *, like: str) -> str:
    """Indent all lines but the first as another line is."""
    return text.replace("\n", "\n" + like[: len(like) - len(like.lstrip())])


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes_in(each)


def _setter(owner: Any, name: str) -> Callable[[], None]:
    present = owner.__code__ if name == "__code__" else vars(owner)[name]
    return lambda: setattr(owner, name, present)


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
