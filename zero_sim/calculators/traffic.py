"""Traffic of a rank in a step by kind, group, dtype and link, from closed forms or from a log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from zero_sim.calculators.network import (
    Network,
    first_rank_elems,
    messages,
    part_between,
    sent_elems,
)
from zero_sim.cost.calls import Among, planned_calls
from zero_sim.cost.forms import ParamSize
from zero_sim.layout.topology import Topology
from zero_sim.scenario.spec import Scenario

if TYPE_CHECKING:
    from zero_sim.sim import CollectiveRecord

_WorldRanks = Callable[[Among, range], Sequence[int]]
"""Function from members of a dp-cp group, or from model parts, to ranks of the world."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Calls of one rank in a step with equal kind, group and dtype."""

    kind: str
    group: str
    """Relation of the members, such as `block`, in a closed form; the group's name in a log."""
    ranks: int
    dtype: str
    calls: int
    messages: int
    contributed_bytes: int
    sent: Mapping[str, Fraction]
    """Bytes that the rank sends by name of the link: the mean over its group if ranks differ."""

    @property
    def total_sent(self) -> Fraction:
        """Bytes over all links."""
        return sum(self.sent.values(), Fraction(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Calls and sent bytes of a rank in a step."""

    flows: Sequence[Flow]
    network: Network

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Return the sent bytes by kind and link, rounded up."""
        # Add first and round once: flows rounded one by one would overstate the sum.
        sums: dict[str, dict[str, Fraction]] = {}
        for flow in self.flows:
            of_kind = sums.setdefault(flow.kind, {})
            for link, sent in flow.sent.items():
                of_kind[link] = of_kind.get(link, Fraction(0)) + sent
        return {
            kind: {link: math.ceil(sent) for link, sent in links.items()}
            for kind, links in sums.items()
        }

    def sent_over(self, link: str) -> Fraction:
        """Return the bytes that a rank sends over one link, a mean over the ranks."""
        return sum((flow.sent.get(link, Fraction(0)) for flow in self.flows), Fraction(0))

    @property
    def sent(self) -> Fraction:
        """Bytes that a rank sends over all links."""
        return sum((flow.total_sent for flow in self.flows), Fraction(0))

    @property
    def sent_per_card(self) -> Fraction:
        """Bytes that leave a node by each of its network cards."""
        # Means over ranks, so a node sends that times its ranks.
        network = self.network
        return self.sent_over(network.between) * network.ranks_per_node / network.cards

    @property
    def through_first(self) -> int:
        """Bytes that pass through the first rank if it adds for all others, else 0."""
        # A gather occurs only with `sum_by = "first-rank"`; a broadcast alone has other uses.
        if all(flow.kind != "gather" for flow in self.flows):
            return 0
        return sum(
            first_rank_elems(flow.kind, flow.contributed_bytes, flow.ranks) for flow in self.flows
        )


def _world_ranks_of(scenario: Scenario, *, rank: int) -> _WorldRanks:
    """Return the function from group members to ranks of the world, by the scenario's topology.

    Args:
        scenario: The case of one dp-cp group.
        rank: Rank in the first dp-cp group.
    """
    spec = scenario.topology
    # The only dp-cp group is the whole world.
    if spec.tp * spec.pp == 1:
        return lambda among, members: members
    # The case of a dp-cp group counts only its own ranks, so dp is the rest after cp.
    topology = Topology(
        tp=spec.tp, cp=spec.cp, pp=spec.pp, dp=scenario.world.size // spec.cp, order=spec.order
    )
    own = topology.dp_cp_groups()[0]
    parts = next(g for g in topology.groups_over("tp", "pp") if own[rank] in g)
    return lambda among, members: parts if among == "parts" else tuple(own[i] for i in members)


def traffic_of(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, network: Network
) -> Traffic:
    """Return the traffic of a rank in a step by closed form, if the step is not skipped.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case of one dp-cp group.
        rank: Rank in that group.
        network: Nodes and links.
    """
    calls = planned_calls(sizes, scenario=scenario, rank=rank)
    place = _world_ranks_of(scenario, rank=rank)
    # Keyed by the ranks, not their number: groups of equal size, such as those of experts, can use
    # other links.
    rows: dict[tuple[str, Among, range, str], Counter[tuple[int, int]]] = {}
    for call, count in calls.items():
        key = (call.kind, call.among, call.ranks, call.dtype)
        rows.setdefault(key, Counter())[call.elems, call.elem_bytes] += count
    flows = [
        _flow(kind, among, place(among, ranks), dtype, counts, network=network)
        for (kind, among, ranks, dtype), counts in rows.items()
    ]
    return Traffic(flows=flows, network=network)


def traffic_in(records: Iterable[CollectiveRecord], *, network: Network) -> Traffic:
    """Return the traffic of a rank from its calls in an event log.

    Args:
        records: Calls of one rank in one step.
        network: Nodes and links.
    """
    rows: dict[tuple[str, str, tuple[int, ...], str], Counter[tuple[int, int]]] = {}
    for record in records:
        # A barrier carries no data.
        if record.kind != "barrier":
            key = (record.kind, record.group, record.group_ranks, record.dtype)
            rows.setdefault(key, Counter())[record.elems, record.elem_bytes] += 1
    flows = [
        _flow(kind, group, ranks, dtype, counts, network=network)
        for (kind, group, ranks, dtype), counts in rows.items()
    ]
    return Traffic(flows=flows, network=network)


def _flow(
    kind: str,
    group: str,
    ranks: Sequence[int],
    dtype: str,
    counts: Counter[tuple[int, int]],
    *,
    network: Network,
) -> Flow:
    """Return the flow of one row; `counts` has calls by elements and bytes per element."""
    # Fractions, because a ring's (n-1)/n of a bucket need not be whole bytes.
    between = part_between(ranks, network=network, kind=kind)
    sent = Fraction(0)
    for (elems, elem_bytes), count in counts.items():
        sent += count * sent_elems(kind, elems, len(ranks)) * elem_bytes
    calls = counts.total()
    return Flow(
        kind=kind,
        group=group,
        ranks=len(ranks),
        dtype=dtype,
        calls=calls,
        messages=calls * messages(kind, len(ranks)),
        contributed_bytes=sum(n * elems * size for (elems, size), n in counts.items()),
        sent={
            network.inside: sent * (1 - between),
            network.between: sent * between,
        },
    )
