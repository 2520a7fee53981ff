"""Violations that show at the end of a run: orders that go round in a circle, and missing waits.

[Note: inversions]
NCCL runs a rank's collectives of all its groups on one device, so ranks that share two groups must
issue them in one order, even asynchronously; otherwise each may fill the device with a collective
that the other has not come to, which hangs only sometimes. Draw an edge from each collective to the
next one of the same rank: there is one order for all just where the graph has no cycle.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from zero_sim.sim.failures import ContractViolation
from zero_sim.sim.log import CollectiveRecord

_MESSAGES = ("send", "recv")

_Hop = tuple[CollectiveRecord, CollectiveRecord]
"""Two calls of one rank, the earlier first."""


class Awaited(Protocol):
    """What a rank waits for."""

    @property
    def doing(self) -> str:
        """The wait in words."""
        ...

    @property
    def missing(self) -> tuple[int, ...]:
        """World ranks that have to act before it is done."""
        ...


def find_inversion(records: Sequence[CollectiveRecord]) -> tuple[_Hop, ...]:
    """Find ranks that issued collectives of several groups in different orders; linear time.

    Args:
        records: All calls of a run, in the order in which they happened.

    Returns:
        Pairs of calls, each of one rank, that form a circle: the later call of a pair is the same
        collective as the earlier one of the next. Through the first collective found to be on a
        circle it is one with the fewest ranks. Empty where all ranks agree.
    """
    chains: dict[int, list[CollectiveRecord]] = defaultdict(list)
    groups = set()
    for record in records:
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
    """Take away what nothing precedes, again and again; what is left leads back to a circle."""
    before: dict[tuple[str, int], int] = defaultdict(int)
    after: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for chain in chains.values():
        before[_node(chain[0])] += 0
        for earlier, later in pairwise(chain):
            after[_node(earlier)].append(_node(later))
            before[_node(later)] += 1
    free = [node for node, count in before.items() if count == 0]
    while free:
        for later in after[free.pop()]:
            before[later] -= 1
            if before[later] == 0:
                free.append(later)
    left = [node for node, count in before.items() if count]
    if not left:
        return None
    # Everything left has a predecessor that is left, so going backwards never ends: it circles.
    previous = {later: node for node in left for later in after[node] if before[later]}
    node, seen = left[0], set()
    while node not in seen:
        seen.add(node)
        node = previous[node]
    return node


def _shortest_circle(
    chains: Mapping[int, Sequence[CollectiveRecord]], start: tuple[str, int]
) -> tuple[_Hop, ...]:
    """A circle through `start` that changes rank as seldom as can be, breadth first.

    A step goes from a collective to any later one of one rank. Each place in a rank's program is
    walked over once only: what lies behind it was reached with as few changes of rank before.
    """
    places: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, chain in chains.items():
        for i, record in enumerate(chain):
            places[_node(record)].append((rank, i))
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
    hops = [came[start]]
    while _node(hops[-1][0]) != start:
        hops.append(came[_node(hops[-1][0])])
    return tuple(reversed(hops))


def describe_inversion(hops: Sequence[_Hop]) -> tuple[str, ...]:
    """An inversion as lines, a rank each; none where there is none."""
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
    """The error for a run whose ranks issued collectives in different orders; None if they agree.

    Args:
        records: All calls of the run.
    """
    hops = find_inversion(records)
    if not hops:
        return None
    lines = [*describe_inversion(hops), "Issue them in one order on all ranks that share groups."]
    return ContractViolation(
        "\n".join(lines),
        aspect="order-inversion",
        rank=hops[1][0].rank,
        other_rank=hops[0][0].rank,
    )


def describe_circle(waiting: Mapping[int, tuple[Awaited, str]]) -> tuple[str, ...]:
    """Ranks that wait for each other in a circle, as lines; empty where no such circle exists.

    Args:
        waiting: What each waiting rank waits for, and where.
    """
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
                # Ranks that wait for one thing lead to the same others; one of them is enough.
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
    """The error for a run that ended although these calls were not waited for.

    Outputs are not there for a rank before it has waited. On a device a program that never does
    reads whatever happens to be there, and mostly that is right.

    Args:
        records: At least one, in the order of their issue; every call site of theirs is named.
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
        lines.append(f"so did other ranks: {others}")
    lines.extend(f"  at {site}" for site in sites[:_SHOWN])
    lines.append(
        "Without it the results may not be there yet. Call wait() on the work or on its future, "
        "or poll the work's is_completed() until it says yes."
    )
    return ContractViolation(
        "\n".join(lines),
        aspect="never-waited",
        rank=ranks[0],
        other_rank=ranks[1] if ranks[1:] else ranks[0],
    )
