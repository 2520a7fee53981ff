"""Violations found at the end of a run: collectives in circular order, and missing waits."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from zero_sim.sim.failures import ContractViolation
from zero_sim.sim.log import CollectiveRecord

_MESSAGES = ("send", "recv")

_Hop = tuple[CollectiveRecord, CollectiveRecord]
"""An earlier and a later call of the same rank."""


class Awaited(Protocol):
    """The object of a rank's wait."""

    @property
    def doing(self) -> str:
        """Description of the wait."""
        ...

    @property
    def missing(self) -> tuple[int, ...]:
        """World ranks that must act before the wait can end."""
        ...


# [Note: inversions] NCCL runs a rank's collectives of all groups on one device. So ranks that share
# two groups must issue their collectives in the same order, even asynchronous collectives. If not,
# each rank may fill its device with a collective that the other has not reached, which hangs only
# sometimes. Draw an edge from each collective to the same rank's next: a common order exists if and
# only if this graph has no cycle.
def find_inversion(records: Sequence[CollectiveRecord]) -> tuple[_Hop, ...]:
    """Find ranks that issued collectives of several groups in different orders, in linear time.

    Returns:
        A circle of calls, as pairs. Both calls of a pair are of the same rank, and the later call
        belongs to the same collective as the next pair's earlier call. Among circles through the
        first collective found, this has the fewest ranks. Empty if all ranks agree.
    """
    chains: dict[int, list[CollectiveRecord]] = defaultdict(list)
    groups = set()
    for record in records:
        # Groups with a single rank never wait, and messages match by tag instead of order.
        if len(record.group_ranks) > 1 and record.kind not in _MESSAGES:
            chains[record.rank].append(record)
            groups.add(record.group)
    if len(groups) < 2:
        return ()
    start = _on_a_circle(chains)
    return () if start is None else _shortest_circle(chains, start)


def _node(record: CollectiveRecord) -> tuple[str, int]:
    return record.group, record.sequence


def _on_a_circle(chains: Mapping[int, Sequence[CollectiveRecord]]) -> tuple[str, int] | None:
    """Return a collective on a circle, or None."""
    before: dict[tuple[str, int], int] = defaultdict(int)
    after: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for chain in chains.values():
        # The chain's first node may have no predecessor.
        before[_node(chain[0])] += 0
        for earlier, later in pairwise(chain):
            after[_node(earlier)].append(_node(later))
            before[_node(later)] += 1
    # Remove nodes without predecessor until none is left.
    free = [node for node, count in before.items() if count == 0]
    while free:
        for later in after[free.pop()]:
            before[later] -= 1
            if before[later] == 0:
                free.append(later)
    left = [node for node, count in before.items() if count]
    if not left:
        return None
    # Each remaining node has a remaining predecessor, so walking backwards reaches a circle.
    previous = {later: node for node in left for later in after[node] if before[later]}
    node, seen = left[0], set()
    while node not in seen:
        seen.add(node)
        node = previous[node]
    return node


def _shortest_circle(
    chains: Mapping[int, Sequence[CollectiveRecord]], start: tuple[str, int]
) -> tuple[_Hop, ...]:
    """Return a circle through `start` with the fewest changes of rank, by breadth-first search."""
    # A step leads from a collective to any later collective of the same rank. Each position in a
    # rank's program is visited once, because an earlier step, with no more changes of rank, has
    # reached all later positions.
    places: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, chain in chains.items():
        for i, record in enumerate(chain):
            places[_node(record)].append((rank, i))
    # In each rank's program, positions from here on are visited.
    walked = {rank: len(chain) for rank, chain in chains.items()}
    came: dict[tuple[str, int], _Hop] = {}
    queue = deque([start])
    while queue and start not in came:
        for rank, i in places[queue.popleft()]:
            chain = chains[rank]
            for later in chain[i + 1 : walked[rank]]:
                if _node(later) not in came:
                    came[_node(later)] = chain[i], later
                    queue.append(_node(later))
            walked[rank] = min(walked[rank], i + 1)
    # Back from `start` to `start`.
    hops = [came[start]]
    while _node(hops[-1][0]) != start:
        hops.append(came[_node(hops[-1][0])])
    return tuple(reversed(hops))


def describe_inversion(hops: Sequence[_Hop]) -> tuple[str, ...]:
    """Return lines that describe an inversion; empty if there is none."""
    if not hops:
        return ()
    return (
        "collectives of several groups in different order, which hangs only sometimes on a device:",
        *(
            f"  rank {a.rank}: {a.kind} #{a.sequence} of group {a.group} at {a.site}, before "
            f"{b.kind} #{b.sequence} of group {b.group} at {b.site}"
            for a, b in hops
        ),
    )


def inversion_error(records: Sequence[CollectiveRecord]) -> ContractViolation | None:
    """Return the error for collectives issued in different orders; None if all ranks agree."""
    hops = find_inversion(records)
    if not hops:
        return None
    lines = [*describe_inversion(hops), "Issue them in the same order on all ranks of both groups."]
    return ContractViolation(
        "\n".join(lines),
        aspect="order-inversion",
        rank=hops[1][0].rank,
        other_rank=hops[0][0].rank,
    )


def describe_circle(waiting: Mapping[int, tuple[Awaited, str]]) -> tuple[str, ...]:
    """Return lines about ranks that wait for each other in a circle; empty if there is none.

    `waiting` has each waiting rank's wait and call site.
    """
    # Depth-first search with an explicit stack, because 1,024 ranks exceed Python's recursion
    # limit.
    seen: set[int] = set()
    for first in waiting:
        path: list[int] = []
        depth: dict[int, int] = {}
        stack = [iter((first,))]
        while stack:
            rank = next(stack[-1], None)
            if rank is None:
                stack.pop()
                if path:
                    del depth[id(waiting[path.pop()][0])]
            elif rank in waiting:
                # Ranks that share a wait lead to the same ranks, so visit each wait once.
                awaited = waiting[rank][0]
                if id(awaited) in depth:
                    return _circle_lines([rank, *path[depth[id(awaited)] + 1 :]], waiting)
                if id(awaited) not in seen:
                    seen.add(id(awaited))
                    depth[id(awaited)] = len(path)
                    path.append(rank)
                    stack.append(iter(awaited.missing))
    return ()


def _circle_lines(
    circle: Sequence[int], waiting: Mapping[int, tuple[Awaited, str]]
) -> tuple[str, ...]:
    following = [*circle[1:], circle[0]]
    return (
        "ranks wait for each other in a circle:",
        *(
            f"  rank {rank} {waiting[rank][0].doing} at {waiting[rank][1]} for rank {other}"
            for rank, other in zip(circle, following, strict=True)
        ),
    )


_SHOWN = 16


def never_waited(records: Sequence[CollectiveRecord]) -> ContractViolation:
    """Return the error for a run that ended without waits for these calls.

    On a device, a program that never waits reads memory that usually, but not always, contains the
    result. `records` has at least one call.
    """
    ranks = sorted({record.rank for record in records})
    mine = [record for record in records if record.rank == ranks[0]]
    sites = sorted({record.site for record in records} - {record.site for record in mine})
    lines = [
        f"rank {ranks[0]} returned without having waited for {len(mine)} asynchronous "
        f"call{'s' if len(mine) > 1 else ''}:",
        *(f"  {record.text}" for record in mine[:_SHOWN]),
    ]
    if mine[_SHOWN:]:
        lines.append(f"  and {len(mine) - _SHOWN} more")
    if ranks[1:]:
        others = ", ".join(map(str, ranks[1 : 1 + _SHOWN])) + (", ..." * bool(ranks[_SHOWN + 1 :]))
        lines.append(f"other ranks did the same: {others}")
    lines.extend(f"  at {site}" for site in sites[:_SHOWN])
    lines.append(
        "The results may not be there yet. Call wait() on the work or on its future, or poll the "
        "work's is_completed() until it returns True."
    )
    return ContractViolation(
        "\n".join(lines),
        aspect="never-waited",
        rank=ranks[0],
        other_rank=ranks[1] if ranks[1:] else ranks[0],
    )
