"""Nodes, links inside and between nodes, and the share of a group's traffic on each.

[Note: rings]
Each rank of a group sends to its next neighbour on a ring. In an all-to-all it sends to all others.
A ring laid out by node leaves and enters each of its nodes once. A ring across nodes is the worst
layout: as few ranks as possible have a neighbour on their own node.
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
    """Nodes and links of the ranks of a world."""

    ranks_per_node: int = 8
    """Number of ranks on a node; their numbers are consecutive."""
    inside: str = "nvlink"
    """Name of the links inside a node, for tables."""
    between: str = "nic"
    """Name of the links between nodes, for tables."""
    cards: int = 8
    """Network cards of a node, shared by its ranks."""
    ring: Ring = "by-node"
    """Layout of rings; see [Note: rings]."""


@lru_cache(maxsize=4096)
def part_between(ranks: Sequence[int], *, network: Network, kind: str) -> Fraction:
    """Return the part of a group's traffic that goes between nodes, from 0 to 1.

    Args:
        ranks: Members of the group as ranks of the world, in a hashable sequence.
        network: Nodes and links.
        kind: Kind of the collective.
    """
    size = len(ranks)
    counts = Counter(rank // network.ranks_per_node for rank in ranks)
    if size < 2 or len(counts) == 1:
        return Fraction(0)
    if kind.startswith("all_to_all"):
        # Ordered pairs of ranks on different nodes, among all ordered pairs.
        pairs = size * size - sum(count * count for count in counts.values())
        return Fraction(pairs, size * (size - 1))
    # One of the ring's `size` links leaves each node.
    if network.ring == "by-node":
        return Fraction(len(counts), size)
    # A rank outside the fullest node has only two links, so a node with more than half of the ring
    # keeps some links inside.
    most = max(counts.values())
    return Fraction(min(size, 2 * (size - most)), size)


def sent_elems(kind: str, elems: int, ranks: int) -> Fraction:
    """Return the elements that a rank sends: the mean over the group if ranks differ.

    The factors are those of rings, as in PERFORMANCE.md of nccl-tests.

    Args:
        kind: Kind of the collective.
        elems: Elements that the rank contributes, counted as in the event log.
        ranks: Number of members of the group.
    """
    if kind == "send":
        return Fraction(elems)
    if ranks < 2 or kind in ("recv", "barrier"):
        return Fraction(0)
    # A reduce-scatter, then an all-gather.
    if kind == "all_reduce":
        return Fraction(2 * elems * (ranks - 1), ranks)
    # `elems` is one shard here, and each rank passes on all shards except its neighbour's.
    if kind in ("all_gather", "all_gather_list"):
        return Fraction(elems * (ranks - 1))
    # Reduce-scatter and all-to-all: all but the own part. To or from a root: a mean, because one
    # rank does not send.
    return Fraction(elems * (ranks - 1), ranks)


def first_rank_elems(kind: str, elems: int, ranks: int) -> int:
    """Return the elements that pass through a first rank that adds for its group; else 0.

    Args:
        kind: Kind of the collective.
        elems: Elements that a rank contributes, counted as in the event log.
        ranks: Number of members of the group.
    """
    # It receives from all others (gather), and sends the sum to each of them (broadcast).
    return elems * (ranks - 1) if kind in ("gather", "broadcast") else 0


def messages(kind: str, ranks: int) -> int:
    """Return the number of messages that a rank sends on a ring; 1 from or to a root."""
    if kind == "send":
        return 1
    if ranks < 2 or kind in ("recv", "barrier"):
        return 0
    if kind == "all_reduce":
        return 2 * (ranks - 1)
    if kind.startswith(("all_gather", "reduce_scatter", "all_to_all")):
        return ranks - 1
    return 1
