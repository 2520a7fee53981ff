"""Nodes, links inside and between nodes, and the part of a group's traffic on each.

[Note: rings]
Each rank in a group sends to its next neighbour on a ring; in an all-to-all it sends to all others.
A ring laid out by node enters and leaves each node once. A ring across nodes is the worst layout:
as few ranks as possible have a neighbour on their own node.
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
    """The nodes and links that connect a world's ranks."""

    ranks_per_node: int = 8
    """Number of consecutive ranks on a node."""
    inside: str = "nvlink"
    """Name for links inside a node, for tables."""
    between: str = "nic"
    """Name for links between nodes, for tables."""
    cards: int = 8
    """Network cards per node, shared by its ranks."""
    ring: Ring = "by-node"
    """Ring layout; see [Note: rings]."""


@lru_cache(maxsize=4096)
def part_between(ranks: Sequence[int], *, network: Network, kind: str) -> Fraction:
    """Return the part of a group's traffic between nodes, from 0 to 1.

    Args:
        ranks: The group's world ranks, in a hashable sequence.
        network: Nodes and links.
        kind: The collective's kind.
    """
    size = len(ranks)
    counts = Counter(rank // network.ranks_per_node for rank in ranks)
    if size < 2 or len(counts) == 1:
        return Fraction(0)
    if kind.startswith("all_to_all"):
        # Ordered pairs of ranks on different nodes, among all ordered pairs.
        pairs = size * size - sum(count * count for count in counts.values())
        return Fraction(pairs, size * (size - 1))
    # The ring has `size` links, and one of them leaves each node.
    if network.ring == "by-node":
        return Fraction(len(counts), size)
    # Each rank outside the fullest node has only two links, so a node with more than half of the
    # ranks keeps some links inside.
    most = max(counts.values())
    return Fraction(min(size, 2 * (size - most)), size)


def sent_elems(kind: str, elems: int, ranks: int) -> Fraction:
    """Return the elements that a rank sends on a ring; if ranks differ, the group's mean.

    Args:
        kind: The collective's kind.
        elems: Elements that the rank contributes, counted as in the event log.
        ranks: Group size.

    Source:
        PERFORMANCE.md in nccl-tests.
    """
    if kind == "send":
        return Fraction(elems)
    if ranks < 2 or kind in ("recv", "barrier"):
        return Fraction(0)
    # A reduce-scatter, then an all-gather.
    if kind == "all_reduce":
        return Fraction(2 * elems * (ranks - 1), ranks)
    # `elems` is a single shard here, and each rank passes on all shards except its neighbour's.
    if kind in ("all_gather", "all_gather_list"):
        return Fraction(elems * (ranks - 1))
    # Reduce-scatter and all-to-all: all except the rank's own part. To or from a root: a mean,
    # because one rank does not send.
    return Fraction(elems * (ranks - 1), ranks)


def first_rank_elems(kind: str, elems: int, ranks: int) -> int:
    """Return the elements that pass through the first rank if it adds for its group.

    Args:
        kind: The collective's kind; 0 elements unless it is a gather or a broadcast.
        elems: Elements that a rank contributes, counted as in the event log.
        ranks: Group size.
    """
    # The first rank receives from all others (gather), and sends each the sum (broadcast).
    return elems * (ranks - 1) if kind in ("gather", "broadcast") else 0


def messages(kind: str, ranks: int) -> int:
    """Return the number of messages that a rank sends on a ring; 1 to or from a root."""
    if kind == "send":
        return 1
    if ranks < 2 or kind in ("recv", "barrier"):
        return 0
    if kind == "all_reduce":
        return 2 * (ranks - 1)
    if kind.startswith(("all_gather", "reduce_scatter", "all_to_all")):
        return ranks - 1
    return 1
