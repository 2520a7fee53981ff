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
"""From members of the dp-cp group, or of the parts of the model, to ranks of the world."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Calls of one rank in a step that are alike."""

    kind: str
    group: str
    """Who meets: what they are to each other in a closed form, the group's name in a log."""
    ranks: int
    dtype: str
    calls: int
    messages: int
    contributed_bytes: int
    sent: Mapping[str, Fraction]
    """Bytes that the rank sends, by name of the link; a mean over its group where they differ."""

    @property
    def total_sent(self) -> Fraction:
        """Over all links."""
        return sum(self.sent.values(), Fraction(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """All that a rank sends in a step."""

    flows: Sequence[Flow]
    network: Network

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Bytes sent by kind and link, rounded up to whole ones."""
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
        """Bytes that a rank sends over one link, a mean over the ranks."""
        return sum((flow.sent.get(link, Fraction(0)) for flow in self.flows), Fraction(0))

    @property
    def sent(self) -> Fraction:
        """Bytes that a rank sends over all links."""
        return sum((flow.total_sent for flow in self.flows), Fraction(0))

    @property
    def sent_per_card(self) -> Fraction:
        """Bytes that leave a node by each of its network cards."""
        network = self.network
        return self.sent_over(network.between) * network.ranks_per_node / network.cards

    @property
    def through_first(self) -> int:
        """Bytes that pass the first rank, where others send it what it adds; 0 elsewhere."""
        if all(flow.kind != "gather" for flow in self.flows):
            return 0
        return sum(
            first_rank_elems(flow.kind, flow.contributed_bytes, flow.ranks) for flow in self.flows
        )


def _world_ranks_of(scenario: Scenario, *, rank: int) -> _WorldRanks:
    """Where the members of a dp-cp group are in the world, by the scenario's topology.

    Args:
        scenario: The case as its dp-cp group sees it.
        rank: A rank of the first such group.
    """
    spec = scenario.topology
    if spec.tp * spec.pp == 1:
        return lambda among, members: members
    topology = Topology(
        tp=spec.tp, cp=spec.cp, pp=spec.pp, dp=scenario.world.size // spec.cp, order=spec.order
    )
    own = topology.dp_cp_groups()[0]
    parts = next(g for g in topology.groups_over("tp", "pp") if own[rank] in g)
    return lambda among, members: parts if among == "parts" else tuple(own[i] for i in members)


def traffic_of(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, network: Network
) -> Traffic:
    """What a rank sends in a step that is not skipped, by closed form.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
        network: What joins the ranks.
    """
    calls = planned_calls(sizes, scenario=scenario, rank=rank)
    place = _world_ranks_of(scenario, rank=rank)
    # Groups of as many ranks may be others, as those of experts are, and on other links.
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
    """What a rank sent by its calls in an event log.

    Args:
        records: The calls of one rank in one step.
        network: What joins the ranks.
    """
    rows: dict[tuple[str, str, tuple[int, ...], str], Counter[tuple[int, int]]] = {}
    for record in records:
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
    """The calls of one row; `counts` counts them by elements and bytes an element."""
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
