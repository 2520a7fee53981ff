"""Topology files in TOML: nodes, and the links inside and between nodes.

ranks_per_node = 8
ring = "by-node"    # or "across": the worst ring layout
inside = "nvlink"   # name for links inside a node
between = "nic"     # name for links between nodes
cards = 8           # network cards per node, shared by its ranks; default: ranks_per_node
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from zero_sim.calculators.network import Network
from zero_sim.errors import Problem, ScenarioError
from zero_sim.scenario.load import read_toml

_COUNT_MAX, _TEXT_MAX = 10**6, 40
_INSTEAD = "Name a topology file, such as one with ranks_per_node = 8 and cards = 4."
_KNOWN = tuple(each.name for each in fields(Network))
_COUNT = (f"a whole number of at least 1 and at most {_COUNT_MAX:,}", "Try 8.")
_NAME = (f"1 to {_TEXT_MAX} characters that can be printed", 'Try "nic".')
_RING = ("'by-node' or 'across'", 'Try "by-node".')
# For each field, the expected value and the remedy in its message.
_WANTED = {
    "ranks_per_node": _COUNT, "cards": _COUNT, "inside": _NAME, "between": _NAME, "ring": _RING,
}  # fmt: skip


def load_network(path: str | Path) -> Network:
    """Read a topology file.

    Raises:
        ScenarioError: If the file has mistakes; the error lists all of them.
    """
    return parse_network(read_toml(path, instead=_INSTEAD), source=str(path))


def parse_network(raw: Mapping[str, object], *, source: str) -> Network:
    """Return a network from a parsed table.

    Args:
        raw: The file's contents.
        source: The file's name, for messages.

    Raises:
        ScenarioError: If the table has mistakes; the error lists all of them.
    """
    # Collect all mistakes, so that a file needs a single round of corrections.
    problems = list(map(_unknown, (name for name in raw if name not in _KNOWN)))
    sound: dict[str, Any] = {}
    for name, (wanted, suggestion) in _WANTED.items():
        if name not in raw:
            continue
        value = raw[name]
        if _is_sound(name, value):
            sound[name] = value
        else:
            message = f"expected {wanted}, got {repr(value)[:80]}."
            problems.append(Problem(path=name, message=message, suggestion=suggestion))
    plain = Network()
    # By default each rank has a card, so the default follows `ranks_per_node` in the file.
    sound.setdefault("cards", sound.get("ranks_per_node", plain.ranks_per_node))
    network = replace(plain, **sound)
    # Names must differ, because tables and sums of bytes are keyed by them.
    if network.inside == network.between:
        message = f"expected a name different from `inside`, got {network.between!r}."
        problems.append(Problem(path="between", message=message, suggestion='Try "nic".'))
    if problems:
        raise ScenarioError(source, problems)
    return network


def _is_sound(name: str, value: object) -> bool:
    if _WANTED[name] is _COUNT:
        # type(), because bool is a subclass of int.
        return type(value) is int and 1 <= value <= _COUNT_MAX
    if _WANTED[name] is _RING:
        return value in ("by-node", "across")
    return isinstance(value, str) and 0 < len(value) <= _TEXT_MAX and value.isprintable()


def _unknown(name: str) -> Problem:
    close = get_close_matches(name, _KNOWN, n=1)
    meant = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(_KNOWN)}."
    return Problem(path=name, message="unknown field.", suggestion=meant)
