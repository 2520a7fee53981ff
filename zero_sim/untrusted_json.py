"""JSON from strangers, parsed strictly and turned into records with fields of the right types."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, TypeVar

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, SchemaValidator

from zero_sim.untrusted import NESTING_MAX, nests_too_deep

T = TypeVar("T")

# Limit of names in an object. zero_sim's largest object has about thirty.
_NAMES_MAX = 10_000
_SHOWN_CHARS_MAX = 80
# Most messages of pydantic begin with this.
_PREFIX = "Input should be "
_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class InvalidField(Exception):
    """A value other than expected. The message contains its place."""


def unfit(expected: str) -> PydanticCustomError:
    """Return the error that a field's validator raises."""
    return PydanticCustomError("unfit", "{expected}", {"expected": expected})


def matching(pattern: str, expected: str) -> AfterValidator:
    """Return a validator of texts, for annotating fields.

    The whole text must match the pattern. `expected` describes such a text, for the error.
    """
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise unfit(expected)
        return text

    return AfterValidator(check)


def parse(data: bytes, *, where: str, least: int = -(2**63)) -> Any:
    """Return the value in a JSON file. `where` is the file's name, for the error.

    Raises:
        InvalidField: It is no JSON, repeats a name, has an integer out of range, or is nested too
            deeply for recursion.
    """
    try:
        # Python accepts NaN, Infinity and repeated names, which JSON does not have or leaves open.
        value = json.loads(data, object_pairs_hook=_build_table, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{where}: expected JSON, got an error: {error}") from None
    if nests_too_deep(value):
        raise InvalidField(f"{where}: expected JSON, got more than {NESTING_MAX} levels of it")
    check_integers(value, where=where, least=least)
    return value


def check_integers(value: object, *, where: str, least: int = -(2**63)) -> None:
    """Check the range of every integer in parsed JSON: 64 bits, and at least `least`.

    Raises:
        InvalidField: An integer is out of range.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            check_integers(item, where=_join(where, name), least=least)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            # Skip texts and floats at once, because their lists may be long.
            if isinstance(item, int | dict | list):
                check_integers(item, where=f"{where}[{index}]", least=least)
    # Larger integers would overflow in numpy, torch or a file format.
    elif isinstance(value, int) and not least <= value < 2**63:
        raise InvalidField(
            f"{where}: expected an integer of at least {least} in 64 bits, got {show(value)}"
        )


def build_record(cls: type[T], value: object, *, where: str) -> T:
    """Build a record from parsed JSON, without converting any value.

    Args:
        cls: Dataclass, NamedTuple, or the type of one of their fields.
        value: Parsed value. Fields with a default may be missing. Unknown fields are refused.
        where: Place of the value, for the error.

    Raises:
        InvalidField: A value is missing, unknown, of another type, or rejected by its field.
    """
    try:
        # As text, because strict Python mode refuses lists for tuples and dicts for records.
        # Surrogates, which file names may contain, become question marks.
        text = json.dumps([value], ensure_ascii=False).encode(errors="replace")
        return _build_validator(cls).validate_json(text, strict=True)[0]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    # pydantic's location, without the position in the outer list.
    path = where
    for part in first["loc"][1:]:
        path = _join(path, part)
    match first["type"]:
        case "missing":
            raise InvalidField(f"{path}: expected a value, got none")
        case "unexpected_keyword_argument" | "extra_forbidden":
            raise InvalidField(f"{path}: expected no field of this name, got one")
        case "value_error":
            raise InvalidField(f"{path}: {first['msg'].removeprefix('Value error, ')}")
    got = show(first["input"])
    raise InvalidField(f"{path}: expected {first['msg'].removeprefix(_PREFIX)}, got {got}")


def show(value: object) -> str:
    """Return a short, printable form of a parsed value."""
    if isinstance(value, dict | list | tuple):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} values"
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[: _SHOWN_CHARS_MAX - 3]}..."


@functools.cache
def _build_validator(cls: type) -> SchemaValidator:
    # In a tuple, because pydantic takes no config for a dataclass itself.
    schema = TypeAdapter(tuple[cls], config=_CONFIG).core_schema
    _fail_fast(schema)
    return SchemaValidator(schema)


def _fail_fast(schema: Any) -> None:
    """Let tuples stop at their first error, because a million errors would fill memory."""
    if isinstance(schema, dict):
        if schema.get("type") == "tuple":
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


def _build_table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    # Python's dict keeps the last of two equal names, which could hide a value from a reviewer.
    if len(table) > _NAMES_MAX:
        raise ValueError(f"{len(table)} names in one object")
    if len(table) != len(pairs):
        raise ValueError(f"a name twice among {show(', '.join(sorted(name for name, _ in pairs)))}")
    return table


def _join(where: str, part: int | str) -> str:
    return f"{where}[{part}]" if isinstance(part, int) else f"{where}.{show(part)[1:-1]}"


def _refuse(word: str) -> Any:
    raise ValueError(f"{word}, which JSON does not have")
