"""JSON of strangers: parsed strictly, and made into records that have every field, of its type."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, FailFast, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from zero_sim.untrusted import NESTING_MAX, nests_too_deep

T = TypeVar("T")

Many = Annotated[tuple[T, ...], FailFast()]
"""A tuple as long as its file makes it. Errors are not collected: a million would fill memory."""

_SHOWN_CHARS_MAX = 80
_PREFIX = "Input should be "
"""Beginning of most messages of pydantic."""
_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class InvalidField(Exception):
    """A value is not what was expected; the message says where and what."""


def unfit(expected: str) -> PydanticCustomError:
    """Return the error for a validator of a field to raise."""
    return PydanticCustomError("unfit", "{expected}", {"expected": expected})


def parse(data: bytes, *, where: str) -> Any:
    """Return what a file of JSON holds.

    Args:
        data: Content of the file.
        where: Place of it, for the message.

    Raises:
        InvalidField: It is no JSON, has a name twice, or nests deeper than recursion may follow.
    """
    try:
        value = json.loads(data, object_pairs_hook=_build_table, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{where}: expected JSON, got an error: {error}") from None
    if nests_too_deep(value):
        raise InvalidField(f"{where}: expected JSON, got more than {NESTING_MAX} levels of it")
    return value


def build_record(cls: type[T], value: object, *, where: str) -> T:
    """Return the record that parsed JSON describes, without converting any value.

    Args:
        cls: A dataclass, a NamedTuple, or a type of a field of one.
        value: What was parsed. Fields with a default may be missing, but none may be unknown.
        where: Place of the value, for the message.

    Raises:
        InvalidField: A value is missing, unknown, of another type, or refused by its field.
    """
    try:
        # As text, because strict Python mode refuses lists for tuples and dicts for records.
        # Halves of characters, which names of files may have, become question marks.
        text = json.dumps([value], ensure_ascii=False).encode(errors="replace")
        return _build_adapter(cls).validate_json(text, strict=True)[0]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    path = where
    for part in first["loc"][1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{show(part)[1:-1]}"
    match first["type"]:
        case "missing":
            raise InvalidField(f"{path}: expected a value, got none")
        case "unexpected_keyword_argument" | "extra_forbidden":
            raise InvalidField(f"{path}: expected no field of this name, got one")
    got = show(first["input"])
    raise InvalidField(f"{path}: expected {first['msg'].removeprefix(_PREFIX)}, got {got}")


def show(value: object) -> str:
    """Return a parsed value in a few printable characters."""
    if isinstance(value, dict | list | tuple):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} values"
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[: _SHOWN_CHARS_MAX - 3]}..."


@functools.cache
def _build_adapter(cls: type[T]) -> TypeAdapter[tuple[T]]:
    # Within a tuple, because pydantic takes no config for a dataclass itself.
    return TypeAdapter(tuple[cls], config=_CONFIG)


def _build_table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError(f"a name twice among {show(sorted(name for name, _ in pairs))}")
    return table


def _refuse(word: str) -> Any:
    raise ValueError(f"{word}, which JSON does not have")
