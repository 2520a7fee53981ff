"""The `-k` expression: which case ids to run, in the words of pytest.

    expression = conjunction ("or" conjunction)*
    conjunction = negation ("and" negation)*
    negation = "not" negation | "(" expression ")" | word

A word matches every id that contains it, whatever the case of its letters; a word with blanks,
brackets or the name of an operator is quoted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from zero_sim.errors import UsageError

Matcher = Callable[[str], bool]

_TOKEN = re.compile(r"""\s*("[^"]*"|'[^']*'|[()]|[^\s()"']+)""")
_OPERATORS = ("and", "or", "not", "(", ")")


def compile_expression(text: str) -> Matcher:
    """Compile a `-k` expression.

    Args:
        text: The expression; blank for all ids.

    Returns:
        A function that says whether an id is selected.

    Raises:
        UsageError: with the place of the mistake.
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
        left = self._conjunction()
        while self._take("or"):
            left = _either(left, self._conjunction())
        return left

    def expect_end(self) -> None:
        token = self._peek()
        if token is not None:
            raise self._error("expected `and`, `or` or the end", token)

    def _conjunction(self) -> Matcher:
        left = self._negation()
        while self._take("and"):
            left = _both(left, self._negation())
        return left

    def _negation(self) -> Matcher:
        token = self._peek()
        if token is None:
            raise self._error("expected a word, `not` or `(`", None)
        self._depth += 1
        if self._depth > 100:
            raise self._error("expected at most 100 levels of `not` and `(`", token)
        try:
            if self._take("not"):
                return _neither(self._negation())
            if self._take("("):
                inner = self.expression()
                if not self._take(")"):
                    raise self._error("expected `)`", self._peek())
                return inner
            if not token.is_word:
                raise self._error("expected a word, `not` or `(`", token)
            self._next += 1
            return _contains(token.text)
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


def _contains(word: str) -> Matcher:
    folded = word.casefold()
    return lambda case_id: folded in case_id.casefold()


def _both(left: Matcher, right: Matcher) -> Matcher:
    return lambda case_id: left(case_id) and right(case_id)


def _either(left: Matcher, right: Matcher) -> Matcher:
    return lambda case_id: left(case_id) or right(case_id)


def _neither(inner: Matcher) -> Matcher:
    return lambda case_id: not inner(case_id)
