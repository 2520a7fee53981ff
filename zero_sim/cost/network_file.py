"""Topology files: nodes, links and how fast ranks compute, as TOML; all mistakes are told at once.

ranks_per_node = 8
ring = "by-node"              # or "across": the worst layout of a ring

[inside]                      # what joins the ranks of a node
name = "nvlink"
gigabytes_per_second = 450    # of a rank, 10^9 bytes
microseconds = 3              # of a message, however short

[between]                     # what joins nodes
name = "nic"
gigabytes_per_second = 50     # of a card
microseconds = 8
cards = 8                     # of a node, shared by its ranks

[compute]                     # left out: nothing hides behind computing
teraflops = 400
tokens = 8192                 # of a rank in a micro-batch
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from zero_sim.cost.network import Compute, Link, Network
from zero_sim.errors import Problem, ScenarioError
from zero_sim.scenario.load import read_toml

_TABLES = ("inside", "between", "compute")
_COUNT_MAX, _NUMBER_MAX = 10**6, 10**9
_TEXT_MAX = 40
_INSTEAD = "Name a topology file: ranks_per_node, [inside] and [between] with their speeds."

_Want = Literal["count", "speed", "time", "text"]
_FIELDS: Mapping[str, Mapping[str, _Want]] = {
    "inside": {"name": "text", "gigabytes_per_second": "speed", "microseconds": "time"},
    "between": {
        "name": "text",
        "gigabytes_per_second": "speed",
        "microseconds": "time",
        "cards": "count",
    },
    "compute": {"teraflops": "speed", "tokens": "count"},
}
_IN_WORDS: Mapping[_Want, str] = {
    "count": f"a whole number of at least 1 and at most {_COUNT_MAX:,}",
    "speed": f"a number of more than 0 and at most {_NUMBER_MAX:,}",
    "time": f"a number of at least 0 and at most {_NUMBER_MAX:,}",
    "text": f"1 to {_TEXT_MAX} characters that can be printed",
}
_TRY: Mapping[_Want, str] = {
    "count": "Try 8.",
    "speed": "Try 50.",
    "time": "Try 5.",
    "text": 'Try "nic".',
}


def load_network(path: str | Path) -> Network:
    """Read a topology file.

    Raises:
        ScenarioError: with every mistake in it.
    """
    return parse_network(read_toml(path, instead=_INSTEAD), source=str(path))


def parse_network(raw: Mapping[str, object], *, source: str) -> Network:
    """A network from a parsed table.

    Args:
        raw: What the file says.
        source: What messages call it.

    Raises:
        ScenarioError: with every mistake.
    """
    reader = _Reader(raw)
    network = reader.read()
    if reader.problems:
        raise ScenarioError(source, reader.problems)
    return network


@dataclass(slots=True)
class _Reader:
    """Reads one file, and notes all that is wrong with it."""

    raw: Mapping[str, object]
    problems: list[Problem] = field(default_factory=list)

    def read(self) -> Network:
        plain = Network()
        self._check_names(self.raw, known=("ranks_per_node", "ring", *_TABLES), at="")
        per_node = self._value("count", self.raw.get("ranks_per_node", 8), "ranks_per_node")
        ring = self.raw.get("ring", "by-node")
        if ring not in ("by-node", "across"):
            self._wrong("ring", "'by-node' or 'across'", ring, 'Try "by-node".')
        tables = {name: self._table(name) for name in _TABLES}
        cards = tables["between"].pop("cards", per_node)
        inside = self._link("inside", tables["inside"], plain=plain.inside)
        between = self._link("between", tables["between"], plain=plain.between)
        if inside.name == between.name:
            self.problems.append(
                Problem(
                    path="between.name",
                    message=f"expected another name than that of [inside], got {between.name!r}.",
                    suggestion='Try "nic".',
                )
            )
        return Network(
            ranks_per_node=per_node,
            inside=inside,
            between=between,
            cards=cards,
            ring=ring,  # type: ignore[arg-type]
            compute=self._compute(tables["compute"]) if "compute" in self.raw else None,
        )

    def _table(self, name: str) -> dict[str, Any]:
        """The sound values of one table."""
        raw = self.raw.get(name, {})
        if not isinstance(raw, Mapping):
            self._wrong(name, "a table", raw, f"Write [{name}] on a line of its own.")
            return {}
        wanted = _FIELDS[name]
        self._check_names(raw, known=tuple(wanted), at=f"{name}.")
        return {
            key: self._value(wanted[key], value, f"{name}.{key}")
            for key, value in raw.items()
            if key in wanted
        }

    def _link(self, name: str, given: Mapping[str, Any], *, plain: Link) -> Link:
        if name in self.raw and "gigabytes_per_second" not in given:
            self._missing(f"{name}.gigabytes_per_second", "speed")
        values = {
            each.name: given.get(each.name, getattr(plain, each.name)) for each in fields(Link)
        }
        return Link(**values)

    def _compute(self, given: Mapping[str, Any]) -> Compute:
        for key, want in _FIELDS["compute"].items():
            if key not in given:
                self._missing(f"compute.{key}", want)
        return Compute(teraflops=given.get("teraflops", 1.0), tokens=given.get("tokens", 1))

    def _value(self, want: _Want, value: object, path: str) -> Any:
        """The value, or a sound one in its place."""
        if want == "text":
            if isinstance(value, str) and 0 < len(value) <= _TEXT_MAX and value.isprintable():
                return value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            is_whole = isinstance(value, int) and 1 <= value <= _COUNT_MAX
            is_sound = math.isfinite(value) and 0 <= value <= _NUMBER_MAX
            if is_whole if want == "count" else is_sound and (value > 0 or want == "time"):
                return value
        self._wrong(path, _IN_WORDS[want], value, _TRY[want])
        return path if want == "text" else 1

    def _check_names(self, raw: Mapping[str, object], *, known: tuple[str, ...], at: str) -> None:
        for name in raw:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                meant = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
                self.problems.append(
                    Problem(path=f"{at}{name}", message="unknown field.", suggestion=meant)
                )

    def _wrong(self, path: str, wanted: str, got: object, suggestion: str) -> None:
        shown = repr(got)[:80]
        self.problems.append(
            Problem(path=path, message=f"expected {wanted}, got {shown}.", suggestion=suggestion)
        )

    def _missing(self, path: str, want: _Want) -> None:
        message = f"missing; expected {_IN_WORDS[want]}."
        self.problems.append(Problem(path=path, message=message, suggestion=_TRY[want]))
