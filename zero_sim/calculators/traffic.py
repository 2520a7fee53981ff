"""A rank's traffic in a step by kind, group, dtype and link, from closed forms or from a log."""

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
"""Returns world ranks for group ranks in a dp-cp group, or for model parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """A rank's calls in a step with equal kind, group and dtype."""

    kind: str
    group: str
    """In a closed form, the members' relation, such as `block`; in a log, the group's name."""
    ranks: int
    """Group size."""
    dtype: str
    calls: int
    messages: int
    contributed_bytes: int
    sent: Mapping[str, Fraction]
    """Bytes that the rank sends, by link name; if ranks differ, the group's mean."""

    @property
    def total_sent(self) -> Fraction:
        """Bytes sent over all links."""
        return sum(self.sent.values(), Fraction(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """A rank's calls and sent bytes in a step."""

    flows: Sequence[Flow]
    network: Network

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Return the sent bytes by kind and link, rounded up."""
        # Add first and round once, because rounded flows would overstate the sum.
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
        """Return the bytes that a rank sends over a link; if ranks differ, their mean."""
        return sum((flow.sent.get(link, Fraction(0)) for flow in self.flows), Fraction(0))

    @property
    def sent(self) -> Fraction:
        """Bytes that a rank sends over all links."""
        return sum((flow.total_sent for flow in self.flows), Fraction(0))

    @property
    def sent_per_card(self) -> Fraction:
        """Bytes that leave a node through each network card."""
        # sent_over() is a mean over ranks, so a node sends this times its ranks.
        network = self.network
        return self.sent_over(network.between) * network.ranks_per_node / network.cards

    @property
    def through_first(self) -> int:
        """Bytes that pass through the first rank if it adds for its group, else 0."""
        # A gather occurs only with `sum_by = "first-rank"`; a broadcast has other uses too.
        if all(flow.kind != "gather" for flow in self.flows):
            return 0
        return sum(
            first_rank_elems(flow.kind, flow.contributed_bytes, flow.ranks) for flow in self.flows
        )


def _world_ranks_of(scenario: Scenario, *, rank: int) -> _WorldRanks:
    """Return the function from group ranks to world ranks, by the scenario's topology.

    Args:
        scenario: The case for a dp-cp group.
        rank: Group rank in the first dp-cp group.
    """
    spec = scenario.topology
    # The only dp-cp group is the whole world.
    if spec.tp * spec.pp == 1:
        return lambda among, members: members
    # `world.size` in a dp-cp group's case is cp * dp.
    topology = Topology(
        tp=spec.tp, cp=spec.cp, pp=spec.pp, dp=scenario.world.size // spec.cp, order=spec.order
    )
    own = topology.dp_cp_groups()[0]
    parts = next(g for g in topology.groups_over("tp", "pp") if own[rank] in g)
    return lambda among, members: parts if among == "parts" else tuple(own[i] for i in members)


def traffic_of(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, network: Network
) -> Traffic:
    """Return a rank's traffic by closed form, in a step that is not skipped.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case for a dp-cp group.
        rank: Group rank.
        network: Nodes and links.
    """
    calls = planned_calls(sizes, scenario=scenario, rank=rank)
    place = _world_ranks_of(scenario, rank=rank)
    # Keyed by ranks, not by group size, because equally large groups can use other links (experts).
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
    """Return a rank's traffic from its calls in an event log.

    Args:
        records: The rank's calls in a step.
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
    """Return the flow for a row; `counts` has calls by elements and bytes per element."""
    # Fractions, because (n-1)/n of a bucket need not be whole bytes.
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
