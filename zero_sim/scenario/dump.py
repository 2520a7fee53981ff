"""A scenario as data and as TOML again: one case, complete, or only what was chosen in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from zero_sim.scenario.spec import Scenario


def to_data(scenario: Scenario) -> dict[str, object]:
    """Every field that has a value, as tables, lists and plain values: what TOML and JSON hold."""
    return {
        name: value
        for name, value in _plain(dataclasses.asdict(scenario)).items()
        if not (name in ("name", "description") and value == "")
    }


def to_chosen_data(scenario: Scenario) -> dict[str, object]:
    """The same without what is as by default, so that a field added later changes nothing."""
    return _chosen(scenario)


def to_toml(scenario: Scenario) -> str:
    """A scenario file of this one case, which loads as an equal scenario."""
    return _document(to_data(scenario))


def to_chosen_toml(scenario: Scenario) -> str:
    """The same without what is as by default: short, for a person to read."""
    return _document(_plain(to_chosen_data(scenario)))


def _document(data: Mapping[str, object]) -> str:
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
    return {name: _value(item) for name, item in table.items() if item is not None}


def _value(value: object) -> object:
    if isinstance(value, dict):
        return _plain(value)
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    return value


def _table(path: str, table: Mapping[str, object]) -> Iterator[str]:
    yield f"\n[{path}]"
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
        # JSON's escapes are TOML's; what it leaves as it is and nobody sees is escaped as well.
        text = json.dumps(value, ensure_ascii=False)
        return text if text.isprintable() else "".join(map(_seen, text))
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{name} = {_inline(item)}" for name, item in value.items())
        return f"{{ {pairs} }}"
    return repr(value)


def _seen(char: str) -> str:
    # Halves of characters have no escape in TOML.
    if char.isprintable() or "\ud800" <= char <= "\udfff":
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 2**16 else f"\\U{ord(char):08x}"
