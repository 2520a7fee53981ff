"""Case discovery by path, and selection by a `-k` expression as in pytest.

    expression = conjunction ("or" conjunction)*
    conjunction = negation ("and" negation)*
    negation = "not" negation | "(" expression ")" | word

A word matches every id that contains it, ignoring case. Quote a word with blanks or brackets, or
one that is an operator's name.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_sim.errors import Problem, ScenarioError, UsageError
from zero_sim.scenario.load import load_cases
from zero_sim.scenario.spec import Scenario
from zero_sim.scenario.texts import NAME_CHARS_MAX
from zero_sim.untrusted import printable

_NOT_SCENARIOS = frozenset({"pyproject.toml"})
Matcher = Callable[[str], bool]

# A quoted word, a bracket, or a word without quotes.
_TOKEN = re.compile(r"""\s*("[^"]*"|'[^']*'|[()]|[^\s()"']+)""")
_OPERATORS = ("and", "or", "not", "(", ")")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A case and its file."""

    id: str
    """Unique among all cases found; equals the scenario's `name`."""
    file_id: str
    """Id within the file, without a prefix."""
    scenario: Scenario
    source: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """Cases found under given paths."""

    cases: tuple[Case, ...]
    passed_over_count: int
    """Cases that the expression did not select."""
    errors: tuple[ScenarioError, ...]
    """One error per invalid file. `cases` still has the cases of valid files."""


def discover(paths: Iterable[str | Path], *, expression: str = "") -> Discovery:
    """Load every scenario under some paths.

    Args:
        paths: Files, or folders to search for `*.toml` at any depth, in sorted order. Hidden files
            and folders and `pyproject.toml` are skipped.
        expression: A `-k` expression over case ids; blank selects all.

    Returns:
        The selected cases in order, each file once, and an error for each invalid file.

    Raises:
        UsageError: The expression is malformed.
    """
    selected = compile_expression(expression)
    cases: list[Case] = []
    errors: list[ScenarioError] = []
    for path in _files(paths, errors):
        try:
            scenarios = load_cases(path)
        except ScenarioError as error:
            # An invalid file must not hide cases in other files.
            errors.append(error)
            continue
        cases.extend(
            Case(id=scenario.name, file_id=scenario.name, scenario=scenario, source=path)
            for scenario in scenarios
        )
    unique = _with_unique_ids(cases)
    chosen = tuple(case for case in unique if selected(case.id))
    return Discovery(
        cases=chosen, passed_over_count=len(unique) - len(chosen), errors=tuple(errors)
    )


def _files(paths: Iterable[str | Path], errors: list[ScenarioError]) -> list[Path]:
    found: dict[str, Path] = {}
    for given in paths:
        path = Path(given)
        # Keep a path that does not exist, so that loading reports it.
        inside = _search(path, errors) if os.path.isdir(path) else [path]
        if not inside:
            problem = Problem(
                path="",
                message="expected a folder with scenarios, got one without any *.toml file.",
                suggestion="Name a scenario file or another folder.",
            )
            errors.append(ScenarioError(str(path), [problem]))
        for file in inside:
            # Resolve the folder but not the file: a link to a scenario is refused, and must not
            # hide the scenario itself, if another path names it.
            found.setdefault(os.path.join(os.path.realpath(file.parent), file.name), file)
    return list(found.values())


def _search(folder: Path, errors: list[ScenarioError]) -> list[Path]:
    def unreadable(error: OSError) -> None:
        problem = Problem(
            path="",
            message=f"expected a readable folder, got: {error.strerror}.",
            suggestion="Check its permissions.",
        )
        errors.append(ScenarioError(str(error.filename), [problem]))

    files: list[Path] = []
    for here, folders, names in os.walk(folder, onerror=unreadable):
        # In place, so that os.walk does not enter hidden folders.
        folders[:] = [name for name in folders if not name.startswith(".")]
        files.extend(
            Path(here, name)
            for name in names
            if name.endswith(".toml") and not name.startswith(".") and name not in _NOT_SCENARIOS
        )
    # os.walk has no fixed order, but ids and reports need one.
    return sorted(files)


def _with_unique_ids(cases: Sequence[Case]) -> list[Case]:
    """Prefix repeated ids with the folder's name, or with the whole path if needed."""
    # The short prefix first. Ids in a file are unique, so whole paths always suffice.
    for prefix in (lambda source: source.resolve().parent.name, lambda source: source.as_posix()):
        times = Counter(case.id for case in cases)
        cases = [
            case if times[case.id] == 1 else _renamed(case, f"{prefix(case.source)}/{case.id}")
            for case in cases
        ]
    return list(cases)


def _renamed(case: Case, case_id: str) -> Case:
    # Folders can have any name and any depth.
    case_id = printable(case_id)[-NAME_CHARS_MAX:]
    scenario = dataclasses.replace(case.scenario, name=case_id)
    return dataclasses.replace(case, id=case_id, scenario=scenario)


def compile_expression(text: str) -> Matcher:
    """Compile a `-k` expression; a blank expression selects all ids.

    Raises:
        UsageError: The expression is malformed; the message has the column.
    """
    if not text.strip():
        return lambda case_id: True
    parser = _Parser(text)
    matcher = parser.expression()
    parser.expect_end()
    return matcher


@dataclass(frozen=True, kw_only=True, slots=True)
class _Token:
    text: str
    column: int
    """Counted from 1."""
    is_word: bool


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split(text.rstrip())
        self._next = 0
        self._depth = 0

    def expression(self) -> Matcher:
        parts = [self._conjunction()]
        while self._take("or"):
            parts.append(self._conjunction())
        return lambda case_id: any(part(case_id) for part in parts)

    def expect_end(self) -> None:
        token = self._peek()
        if token is not None:
            raise self._error("expected `and`, `or` or the end", token)

    def _conjunction(self) -> Matcher:
        parts = [self._negation()]
        while self._take("and"):
            parts.append(self._negation())
        return lambda case_id: all(part(case_id) for part in parts)

    def _negation(self) -> Matcher:
        token = self._peek()
        if token is None:
            raise self._error("expected a word, `not` or `(`", None)
        self._depth += 1
        # Limit the depth before Python's recursion limit does.
        if self._depth > 100:
            raise self._error("expected at most 100 levels of `not` and `(`", token)
        try:
            if self._take("not"):
                inner = self._negation()
                return lambda case_id: not inner(case_id)
            if self._take("("):
                inner = self.expression()
                if not self._take(")"):
                    raise self._error("expected `)`", self._peek())
                return inner
            if not token.is_word:
                raise self._error("expected a word, `not` or `(`", token)
            self._next += 1
            word = token.text.casefold()
            return lambda case_id: word in case_id.casefold()
        finally:
            self._depth -= 1

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self, operator: str) -> bool:
        token = self._peek()
        if token is None or token.is_word or token.text != operator:
            return False
        self._next += 1
        return True

    def _split(self, text: str) -> list[_Token]:
        tokens: list[_Token] = []
        start = 0
        while start < len(text):
            match = _TOKEN.match(text, start)
            if match is None:
                column = start + 1 + len(text[start:]) - len(text[start:].lstrip())
                raise UsageError(
                    f"-k {self._text!r}: expected a closing quote for the one at column {column}."
                )
            word = match[1]
            # A quoted `and` is a word.
            quoted = word[0] in "\"'"
            tokens.append(
                _Token(
                    text=word[1:-1] if quoted else word,
                    column=match.start(1) + 1,
                    is_word=quoted or word not in _OPERATORS,
                )
            )
            start = match.end()
        return tokens

    def _error(self, wanted: str, token: _Token | None) -> UsageError:
        got = f"`{token.text}` at column {token.column}" if token else "the end"
        return UsageError(f"-k {self._text!r}: {wanted}, got {got}. Try -k 'bf16 and not size=1'.")
