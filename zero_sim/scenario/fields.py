"""Fields in `spec`: paths, types, values, and their form in messages.

Messages, matrix paths and the JSON Schema use this module, so a new field in `spec` needs no other
mention.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Literal

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario

Loc = tuple[str | int, ...]
"""Location in a parsed file: table keys and array indices."""

_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings", bool: "booleans"}
_LONGEST_SHOWN = 60


@functools.cache
def fields_of(record: type) -> dict[str, object]:
    """Return the types of a record's fields in order, without `None` for optional fields."""
    # `from __future__ import annotations` makes annotations strings.
    hints = typing.get_type_hints(record)
    return {field.name: _strip_none(hints[field.name]) for field in dataclasses.fields(record)}


def is_table(expected: object) -> bool:
    """Return True if a field of this type is written as a TOML table."""
    return isinstance(expected, type) and dataclasses.is_dataclass(expected)


def type_at(loc: Sequence[str | int]) -> object | None:
    """Return the type at a location; None if there is no such field."""
    here: object = Scenario
    for part in loc:
        if isinstance(part, int):
            # An index leads to a list entry.
            here = _element(here, part)
        elif isinstance(here, type) and dataclasses.is_dataclass(here):
            here = fields_of(here).get(part)
        else:
            return None
        if here is None:
            return None
    return here


@functools.cache
def field_paths() -> tuple[str, ...]:
    """Return the dotted paths of all fields. A table comes before its fields."""
    return tuple(_paths(Scenario, ""))


def path_of(loc: Sequence[str | int]) -> str:
    """Return a location as messages print it: `model.shapes[0][1]`."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def values_at(record: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield a field's path and value; for a list, those of each entry.

    Args:
        record: A scenario, or a record in it.
        path: The field's dotted path in the record. Names after a list are fields in its entries.
    """
    name, _, rest = path.partition(".")
    value = getattr(record, name)
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            at = f"{name}[{index}]"
            if not rest:
                # A list of plain values: yield the entry itself.
                yield at, item
            else:
                yield from ((f"{at}.{inner}", found) for inner, found in values_at(item, rest))
    elif not rest:
        yield name, value
    # A field in an omitted table has no value.
    elif value is not None:
        yield from ((f"{name}.{inner}", found) for inner, found in values_at(value, rest))


@functools.cache
def default_at(path: str) -> object | None:
    """Return a field's default; None if the field has none or is a table."""
    names = path.split(".")
    record = type_at(names[:-1])
    if not isinstance(record, type) or not dataclasses.is_dataclass(record):
        return None
    for field in dataclasses.fields(record):
        if field.name == names[-1] and field.default is not dataclasses.MISSING:
            return field.default
    return None


def choices_of(expected: object) -> tuple[object, ...]:
    """Return the values of a `Literal` type; empty for other types."""
    return typing.get_args(expected) if typing.get_origin(expected) is Literal else ()


def describe_type(expected: object) -> str:
    """Return a type in words: `an integer`, `an array of 2 numbers`, `a table`."""
    if isinstance(expected, type) and expected in _WORDS:
        return _WORDS[expected]
    choices = choices_of(expected)
    if choices:
        shown = ", ".join(show(choice) for choice in choices)
        return f"one of {shown}" if len(choices) > 1 else shown
    if typing.get_origin(expected) is tuple:
        return f"an array of {_elements_in_words(expected)}"
    return "a table"


def describe_value(value: object) -> str:
    """Return a value with its TOML type: `'three' (string)`."""
    return f"{show(value)} ({toml_type(value)})"


def show(value: object) -> str:
    """Return a value as written in the file, shortened if long."""
    # Before the test for int, because bool is a subclass of int.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key} = {show(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(show(item) for item in value) + "]"
    # Python refuses to convert very long integers to decimal digits; hexadecimal has no limit.
    elif isinstance(value, int) and value.bit_length() > 256:
        text = f"{'-' if value < 0 else ''}{hex(abs(value))}"
    elif isinstance(value, datetime.date | datetime.time):
        text = value.isoformat()
    else:
        text = repr(value)
    # Limit the length, because values come from strangers' files.
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def toml_type(value: object) -> str:
    """Return TOML's type name for a parsed value."""
    # Before "integer", because bool is a subclass of int.
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, dict):
        return "table"
    if isinstance(value, list):
        return f"array of {len(value)}"
    if isinstance(value, datetime.date | datetime.time):
        return "date or time"
    return {"int": "integer", "str": "string"}.get(type(value).__name__, type(value).__name__)


def check_index(path: str, value: int, *, stop: int, of: str, counted: str) -> Iterator[Problem]:
    """Check an index that counts from 0.

    Args:
        path: The field's path.
        value: The index.
        stop: How many things there are.
        of: Words for `stop` in the message.
        counted: Plural noun for these things.
    """
    # Another rule reports a count below 1, with which no index is valid.
    if stop >= 1 and not 0 <= value < stop:
        yield Problem(
            path=path,
            message=f"expected an integer at least 0 and less than {of}, "
            f"got {describe_value(value)}.",
            suggestion=f"Try {stop - 1 if value > 0 else 0}; {counted} count from 0.",
        )


def _strip_none(hint: object) -> object:
    # `Literal[...] | None` is a typing.Union, `int | None` a UnionType. `AnyModelName` is a union
    # with choices first: return these.
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (inner, *_) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
        return inner
    return hint


def _element(expected: object, index: int) -> object | None:
    if typing.get_origin(expected) is not tuple:
        return None
    args = typing.get_args(expected)
    # `tuple[X, ...]` is a list of any length, `tuple[X, Y]` a list of two entries.
    if len(args) == 2 and args[1] is Ellipsis:
        return args[0]
    return args[index] if index < len(args) else None


def _elements_in_words(expected: object) -> str:
    args = typing.get_args(expected)
    if len(args) == 2 and args[1] is Ellipsis:
        inner = args[0]
        if typing.get_origin(inner) is tuple:
            return f"arrays of {_elements_in_words(inner)}"
        return "tables" if is_table(inner) else _PLURALS[inner]
    return f"{len(args)} {_PLURALS[args[0]]}"


def _paths(record: type, prefix: str) -> list[str]:
    found: list[str] = []
    for name, expected in fields_of(record).items():
        found.append(prefix + name)
        if isinstance(expected, type) and dataclasses.is_dataclass(expected):
            found.extend(_paths(expected, f"{prefix}{name}."))
    return found
