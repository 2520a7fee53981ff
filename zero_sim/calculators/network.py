"""Nodes, the links inside and between them, and what a group's traffic puts on each.

[Note: rings]
Ranks of a group send round a ring, each to its next neighbour, except in an all-to-all, where each
sends to every other. A ring that is laid out node by node leaves and enters each of its nodes once.
One that goes across has no neighbour on its own node, as far as that can be: its worst layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

Ring = Literal["by-node", "across"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Nodes and the links that join the ranks of a world."""

    ranks_per_node: int = 8
    """Consecutive ranks are on one node."""
    inside: str = "nvlink"
    """Name of the links inside a node, as tables show it."""
    between: str = "nic"
    """Name of the links between nodes, as tables show it."""
    cards: int = 8
    """Network cards of a node, which its ranks share."""
    ring: Ring = "by-node"
    """How rings are laid out; see [Note: rings]."""


@lru_cache(maxsize=4096)
def part_between(ranks: Sequence[int], *, network: Network, kind: str) -> Fraction:
    """Part of what a group sends that goes between nodes.

    Args:
        ranks: Its members in the world, a hashable sequence.
        network: The nodes.
        kind: Of its collective.
    """
    size = len(ranks)
    counts = Counter(rank // network.ranks_per_node for rank in ranks)
    if size < 2 or len(counts) == 1:
        return Fraction(0)
    if kind.startswith("all_to_all"):
        pairs = size * size - sum(count * count for count in counts.values())
        return Fraction(pairs, size * (size - 1))
    if network.ring == "by-node":
        return Fraction(len(counts), size)
    most = max(counts.values())
    return Fraction(min(size, 2 * (size - most)), size)


def sent_elems(kind: str, elems: int, ranks: int) -> Fraction:
    """Elements that a rank sends, a mean over the group where they differ.

    Args:
        kind: Of the collective.
        elems: What the rank contributes, counted as the event log does.
        ranks: Members of the group.
    """
    if kind == "send":
        return Fraction(elems)
    if ranks < 2 or kind in ("recv", "barrier"):
        return Fraction(0)
    if kind == "all_reduce":
        return Fraction(2 * elems * (ranks - 1), ranks)
    if kind in ("all_gather", "all_gather_list"):
        return Fraction(elems * (ranks - 1))
    return Fraction(elems * (ranks - 1), ranks)


def first_rank_elems(kind: str, elems: int, ranks: int) -> int:
    """Elements that pass the first rank of a group, which adds what others send it; of others none.

    What it sends back it sends to each of the others.

    Args:
        kind: Of the collective.
        elems: What a rank contributes, counted as the event log does.
        ranks: Members of the group.
    """
    return elems * (ranks - 1) if kind in ("gather", "broadcast") else 0


def messages(kind: str, ranks: int) -> int:
    """Messages that a rank sends; of a broadcast, or to a root, one."""
    if kind == "send":
        return 1
    if ranks < 2 or kind in ("recv", "barrier"):
        return 0
    if kind == "all_reduce":
        return 2 * (ranks - 1)
    if kind.startswith(("all_gather", "reduce_scatter", "all_to_all")):
        return ranks - 1
    return 1
