"""Records out of parsed JSON: every value must be there and be of its field's type."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Collection, Mapping
from typing import Literal, TypeVar

Record = TypeVar("Record")

_WORDS: dict[type, str] = {
    int: "an integer",
    str: "a string",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    types.NoneType: "null",
}


class InvalidField(Exception):
    """A value is not what was expected; the message says where and what."""


def record_of(
    cls: type[Record], value: object, *, where: str, besides: Collection[str] = ()
) -> Record:
    """Make a record from a JSON object.

    A field with a default may be missing: the file may be older than the field.

    Args:
        cls: A dataclass or a NamedTuple.
        value: What was parsed.
        where: Place in the file, for the message.
        besides: Fields that are never in a file.

    Raises:
        InvalidField: A field is missing, unknown or of another type.
    """
    hints = {name: hint for name, hint in _hints(cls).items() if name not in besides}
    given = typed(value, dict, where=where).keys()
    names = [name for name in hints if name in given or name not in _defaulted(cls)]
    table = fields_of(value, names, where=where)
    checked = {name: _checked(table[name], hints[name], f"{where}.{name}") for name in names}
    return cls(**checked)


def fields_of(value: object, names: Collection[str], *, where: str) -> Mapping[str, object]:
    """A JSON object that has exactly these fields.

    Raises:
        InvalidField: It is none, or has others.
    """
    table = typed(value, dict, where=where)
    for name in names:
        if name not in table:
            raise InvalidField(f"{where}: expected a field {name!r}, got none")
    for name in table:
        if name not in names:
            raise InvalidField(
                f"{where}: expected the fields {', '.join(names)}, got {name!r} as well"
            )
    return table


def typed(value: object, kind: type[Record], *, where: str) -> Record:
    """A value that is of one plain type, `True` being no integer.

    Raises:
        InvalidField: It is of another.
    """
    if type(value) is not kind:
        got = _WORDS.get(type(value), "a number")
        raise InvalidField(f"{where}: expected {_WORDS[kind]}, got {got}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidField(f"{where}: expected an integer of at most 64 bits, got a larger one")
    return value


def integers(value: object, *, stop: int, where: str) -> list[int]:
    """A list of integers from 0 up to but without `stop`.

    Raises:
        InvalidField: It is none.
    """
    found = typed(value, list, where=where)
    for index, item in enumerate(found):
        if not 0 <= typed(item, int, where=f"{where}[{index}]") < stop:
            raise InvalidField(f"{where}[{index}]: expected 0 to {stop - 1}, got {item}")
    return found


@functools.cache
def _hints(cls: type) -> dict[str, object]:
    return typing.get_type_hints(cls)


@functools.cache
def _defaulted(cls: type) -> Collection[str]:
    if not dataclasses.is_dataclass(cls):
        return frozenset(getattr(cls, "_field_defaults", ()))
    missing = dataclasses.MISSING
    return frozenset(
        column.name
        for column in dataclasses.fields(cls)
        if column.default is not missing or column.default_factory is not missing
    )


def _checked(value: object, hint: object, where: str) -> object:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise InvalidField(f"{where}: expected one of {', '.join(choices)}, got {value!r}")
        return value
    if typing.get_origin(hint) is tuple:
        inner, *rest = typing.get_args(hint)
        items = typed(value, list, where=where)
        if rest != [...] and len(items) != 1 + len(rest):
            raise InvalidField(f"{where}: expected {1 + len(rest)} values, got {len(items)}")
        return tuple(_checked(item, inner, f"{where}[{i}]") for i, item in enumerate(items))
    assert isinstance(hint, type), hint
    if dataclasses.is_dataclass(hint):
        return record_of(hint, value, where=where)
    return typed(value, hint, where=where)
