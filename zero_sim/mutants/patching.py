"""Run-time edits of the system's functions.

[Note: a mutant is an edit]
An edit replaces a fragment of a function's source. The result is compiled, and the function gets
the new code object, so every importer, hook and partial runs the edited code. Restoring is an
assignment. If the fragment does not occur exactly once, the mutant's module fails to import, so a
refactoring cannot disarm a mutant unnoticed. If an edited line uses a removed name, the error is
recorded and never counts as a kill.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from zero_sim.errors import MutantError

_NAME = "__mutant__"
"""Global name of the patches in edited code. It ends with two underscores, so Python does not
mangle it inside a class.
"""
_WATCHED = f"""
{_NAME}.armed += 1
try:
    pass
except (AttributeError, NameError, TypeError) as __error__:
    {_NAME}.note(__error__)
    raise
"""
"""Frame of an edited function. The function's body replaces `pass`."""


@dataclass(slots=True)
class _EditedFunction:
    function: FunctionType
    first_line: int
    """Line number of the function's first decorator in its file, 1-based."""
    length: int
    """Number of lines, including decorators."""
    source: str
    """Source with the edits so far."""
    news: list[str] = field(default_factory=list)
    """Added lines, stripped."""

    def replace(self, fragment: str, by: str) -> None:
        fragment, by = _plain(fragment), _plain(by)
        found = list(_find(fragment, self.source))
        if len(found) != 1:
            raise MutantError(
                f"expected {fragment!r} once in {self.function.__qualname__}, got it "
                f"{len(found)} times. Adapt the edit."
            )
        ((start, present),) = found
        self.news += filter(None, map(str.strip, by.replace("...", "\n").split("\n")))
        lines = [line.replace("...", _indented(fragment, like=line)) for line in by.split("\n")]
        new = _indented("\n".join(lines), like=_line_of(self.source, start))
        self.source = self.source[:start] + new + self.source[start + len(present) :]

    def compile(self) -> CodeType:
        """Return the edited code."""
        # Compile the whole file, so that line numbers, closures and `super()` are right.
        old = self.function.__code__
        lines = Path(old.co_filename).read_text().splitlines(keepends=True)
        lines[self.first_line - 1 : self.first_line - 1 + self.length] = [self.source]
        tree = ast.parse("".join(lines), old.co_filename)
        stop = self.first_line + self.source.count("\n")
        node = next(
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and node.name == self.function.__name__
            and self.first_line <= node.lineno < stop
        )
        watched = ast.parse(_WATCHED).body
        # `note` looks up lines by number, so give the frame's own nodes an existing number.
        for each in (inner for statement in watched for inner in ast.walk(statement)):
            if "lineno" in each._attributes:
                ast.copy_location(each, node.body[0])
        guarded = watched[-1]
        assert isinstance(guarded, ast.Try)
        guarded.body, node.body = node.body, watched
        # By name and line, because a file may define several functions with the same name.
        return next(
            code
            for code in _codes_in(compile(tree, old.co_filename, "exec", dont_inherit=True))
            if code.co_qualname == old.co_qualname and code.co_firstlineno == old.co_firstlineno
        )


class Patches:
    """Edits of a mutant.

    `patches[function, fragment] = by` edits a function, method or property. Edits of the same
    function apply in order. In `by`, `...` stands for the fragment. Lines after the first get the
    indentation of the line where the fragment begins. Nothing changes before `install`.

    Example:
        patches = Patches()
        patches[clip_by_norm_, "torch.minimum"] = "torch.maximum"
        patches.install()
        patches.restore()

    Attributes:
        armed: Calls of edited code.
        outdated: Error that an edited line raised because a name is gone; empty if there was none.
        kept: State between calls. Edits use it as `__mutant__.kept`.
    """

    def __init__(self) -> None:
        self.armed = 0
        self.outdated = ""
        self.kept: dict[Any, Any] = {}
        self._edited: dict[FunctionType, _EditedFunction] = {}
        self._right: dict[FunctionType, CodeType] = {}

    def __setitem__(self, place: tuple[Callable[..., Any] | property, str], by: str) -> None:
        """Replace a fragment of a function.

        Raises:
            MutantError: The fragment does not occur exactly once, or the function has no source.
        """
        where, fragment = place
        # A property's getter, or the function below decorators, has the code to exchange.
        inner = where.fget if isinstance(where, property) else where
        function = inspect.unwrap(inner) if inner is not None else None
        if not isinstance(function, FunctionType):
            raise MutantError(f"expected a function with a source to edit, got {where!r}.")
        if function not in self._edited:
            lines, first = inspect.getsourcelines(function)
            self._edited[function] = _EditedFunction(function, first, len(lines), "".join(lines))
        self._edited[function].replace(fragment, by)

    def install(self) -> None:
        """Replace the code of all edited functions.

        Raises:
            MutantError: Another mutant has edits in the same module.
        """
        # Compile all functions before exchanging any, so that an error leaves the system unbroken.
        codes = {function: edited.compile() for function, edited in self._edited.items()}
        # The patches are a global of the module, so two mutants would record into each other.
        if any(_NAME in function.__globals__ for function in codes):
            raise MutantError("expected one mutant at a time, got one beside another.")
        for function, code in codes.items():
            self._right[function] = function.__code__
            function.__globals__[_NAME] = self
            function.__code__ = code

    def restore(self) -> None:
        """Restore the original code of all functions."""
        while self._right:
            function, code = self._right.popitem()
            function.__code__ = code
            function.__globals__.pop(_NAME, None)

    def note(self, error: Exception) -> None:
        """Record an error if an edited line itself raised it.

        If a called function raised it, the error may be the fault's effect.
        """
        raised = error.__traceback__
        if raised is None or raised.tb_next is not None:
            return
        code = raised.tb_frame.f_code
        edited = next(each for each in self._edited.values() if each.function.__code__ is code)
        line = edited.source.splitlines()[raised.tb_lineno - edited.first_line]
        if any(new in line for new in edited.news):
            self.outdated = (
                f"{type(error).__name__}: {error}, in {code.co_qualname}: {line.strip()}"
            )


def _plain(text: str) -> str:
    """Dedent a text that begins with a line break."""
    return textwrap.dedent(text).strip("\n") if text.startswith("\n") else text


def _find(fragment: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield each position of a fragment, with its text indented as there."""
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
    """Indent all lines but the first like the line `like`."""
    return text.replace("\n", "\n" + like[: len(like) - len(like.lstrip())])


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes_in(each)
