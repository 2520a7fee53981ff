"""Nodes, the links inside and between them, and what a group's traffic puts on each.

[Note: rings]
Ranks of a group send round a ring, each to its next neighbour, except in an all-to-all, where each
sends to every other. A ring that is laid out node by node leaves and enters each of its nodes once.
One that goes across has no neighbour on its own node, as far as that can be: its worst layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Literal

GIGA = 10**9
Where = Literal["inside", "between"]
Ring = Literal["by-node", "across"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One kind of link."""

    name: str
    """As tables show it."""
    gigabytes_per_second: float
    """What a rank, or between nodes a card, sends each second: GB of 10^9 bytes."""
    microseconds: float
    """What a message takes besides, however short."""

    def seconds(self, sent: float) -> float:
        """How long a message of so many bytes takes."""
        return self.microseconds * 1e-6 + sent / (self.gigabytes_per_second * GIGA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """How fast a rank computes, for what communication can hide behind."""

    teraflops: float
    """Of 10^12 operations a second, as reached."""
    tokens: int
    """That a rank sees in a micro-batch."""

    def forward_seconds(self, elems: int) -> float:
        """Two operations a param and token; backward takes twice that."""
        return 2 * elems * self.tokens / (self.teraflops * 1e12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What joins the ranks of a world."""

    ranks_per_node: int = 8
    """Consecutive ranks are on one node."""
    inside: Link = field(
        default_factory=lambda: Link(name="nvlink", gigabytes_per_second=450.0, microseconds=3.0)
    )
    between: Link = field(
        default_factory=lambda: Link(name="nic", gigabytes_per_second=50.0, microseconds=8.0)
    )
    cards: int = 8
    """Network cards of a node, which its ranks share."""
    ring: Ring = "by-node"
    """How rings are laid out; see [Note: rings]."""
    compute: Compute | None = None
    """None where nothing is said of it: then nothing hides, and only communication takes time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """How the traffic of one group, and of all like it, meets the links."""

    size: int
    between: Fraction
    """Part of what the group sends that goes between nodes."""
    flows: Fraction
    """Messages that leave a node at the same time, of all groups like it."""


@lru_cache(maxsize=4096)
def route_of(ranks: Sequence[int], *, network: Network, kind: str) -> Route:
    """Place a group on the nodes.

    Args:
        ranks: Its members in the world, a hashable sequence.
        network: The nodes.
        kind: Of its collective.
    """
    size = len(ranks)
    counts = Counter(rank // network.ranks_per_node for rank in ranks)
    if size < 2 or len(counts) == 1:
        return Route(size=size, between=Fraction(0), flows=Fraction(0))
    if kind.startswith("all_to_all"):
        pairs = size * size - sum(count * count for count in counts.values())
        between = Fraction(pairs, size * (size - 1))
    elif network.ring == "by-node":
        between = Fraction(len(counts), size)
    else:
        most = max(counts.values())
        between = Fraction(min(size, 2 * (size - most)), size)
    return Route(size=size, between=between, flows=between * network.ranks_per_node)


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


def seconds_of(kind: str, sent_bytes: float, route: Route, *, network: Network) -> float:
    """How long one collective takes: its messages one after another, each as slow as its link.

    Args:
        kind: Of the collective.
        sent_bytes: What a rank sends in all of it.
        route: Of its group.
        network: The links.
    """
    count = messages(kind, route.size)
    if not count:
        return 0.0
    each = sent_bytes / count
    if kind == "gather":
        # One after another at the rank that all send to.
        count, each = route.size - 1, sent_bytes * route.size / (route.size - 1)
    slowest = network.inside.seconds(each)
    if route.between:
        # More messages than cards leave a node at once, so that each has a part of one.
        crowding = max(1.0, float(route.flows) / network.cards)
        slowest = max(slowest, network.between.seconds(each * crowding))
    return count * slowest
