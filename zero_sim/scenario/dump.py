"""Scenarios as plain data and TOML, with all fields or only non-default fields."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from zero_sim.scenario.spec import Scenario


def to_data(scenario: Scenario) -> dict[str, object]:
    """Return all fields with a value, as data for TOML or JSON."""
    return {
        name: value
        for name, value in _plain(dataclasses.asdict(scenario)).items()
        # Empty strings are their defaults, and mean nothing in a file.
        if not (name in ("name", "description") and value == "")
    }


def to_chosen_data(scenario: Scenario) -> dict[str, object]:
    """Return the non-default fields, so that a new field in a later version changes nothing."""
    return _chosen(scenario)


def to_toml(scenario: Scenario) -> str:
    """Return TOML text that loads as an equal scenario."""
    return _document(to_data(scenario))


def to_chosen_toml(scenario: Scenario) -> str:
    """Return TOML text with non-default fields only, for people to read."""
    return _document(_plain(to_chosen_data(scenario)))


def _document(data: Mapping[str, object]) -> str:
    # Plain values come before the first table, because TOML counts later keys to that table.
    tables = {name: value for name, value in data.items() if isinstance(value, dict)}
    lines = [f"{name} = {_inline(value)}" for name, value in data.items() if name not in tables]
    for name, table in tables.items():
        lines.extend(_table(name, table))
    return "\n".join(lines) + "\n"


def _chosen(record: Any) -> dict[str, object]:
    found: dict[str, object] = {}
    for column in dataclasses.fields(record):
        value, default = getattr(record, column.name), column.default
        if column.default_factory is not dataclasses.MISSING:
            default = column.default_factory()
        if value != default:
            found[column.name] = _chosen_value(value)
    return found


def _chosen_value(value: object) -> object:
    if isinstance(value, tuple):
        return [_chosen_value(item) for item in value]
    return _chosen(value) if dataclasses.is_dataclass(value) else value


def _plain(table: Mapping[str, object]) -> dict[str, object]:
    # Omit fields without a value, because TOML has no null.
    return {name: _value(item) for name, item in table.items() if item is not None}


def _value(value: object) -> object:
    if isinstance(value, dict):
        return _plain(value)
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    return value


def _table(path: str, table: Mapping[str, object]) -> Iterator[str]:
    yield f"\n[{path}]"
    # Plain values come before inner tables, as in a document.
    inner = {name: value for name, value in table.items() if isinstance(value, dict)}
    for name, value in table.items():
        if name not in inner:
            yield f"{name} = {_inline(value)}"
    for name, value in inner.items():
        yield from _table(f"{path}.{name}", value)


def _inline(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are valid in TOML. Invisible characters, which JSON keeps, are escaped too.
        text = json.dumps(value, ensure_ascii=False)
        return text if text.isprintable() else "".join(map(_seen, text))
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{name} = {_inline(item)}" for name, item in value.items())
        return f"{{ {pairs} }}"
    # repr is the shortest text that reads back as the same float.
    return repr(value)


def _seen(char: str) -> str:
    # Lone surrogates have no escape in TOML.
    if char.isprintable() or "\ud800" <= char <= "\udfff":
        return char
    # TOML has escapes with 4 and with 8 digits.
    return f"\\u{ord(char):04x}" if ord(char) < 2**16 else f"\\U{ord(char):08x}"
