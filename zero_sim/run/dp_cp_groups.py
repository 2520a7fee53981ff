"""dp-cp groups of a world: each trains its own params.

Each group has its own judge and reference. They share two things: the norm is over the params of
all dp-cp groups, and an overflow in one counts for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zero_sim.findings.records import Finding
from zero_sim.layout.topology import Topology
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.scenario.tp_block import is_tp_block, part_ending
from zero_sim.sim import CollectiveRecord

# A prime, far larger than the number of groups, so that seeds of groups do not collide.
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, kw_only=True, slots=True)
class DpCpGroup:
    """One dp-cp group."""

    ranks: tuple[int, ...]
    """World ranks of its members, in group order."""
    scenario: Scenario
    """The case of this group alone: its size, its seed, its ranks counted from 0."""
    uncounted: tuple[str, ...] = ()
    """Name endings of params that another dp-cp group counts in the norm."""
    tp_index: int = 0
    """Tensor-parallel index of its ranks."""
    elsewhere: tuple[str, ...] = ()
    """Name endings of params that one device has, but only ranks of other groups train."""


def dp_cp_groups_of(scenario: Scenario) -> tuple[DpCpGroup, ...]:
    """Return the dp-cp groups of a case's world; with tp = pp = 1, the world itself."""
    spec = scenario.topology
    parts = spec.tp * spec.cp * spec.pp
    topology = Topology(
        tp=spec.tp, cp=spec.cp, pp=spec.pp, dp=scenario.world.size // parts, order=spec.order
    )
    groups = topology.dp_cp_groups()
    # Without other groups the case is unchanged, seed included.
    if len(groups) == 1:
        return (DpCpGroup(ranks=groups[0], scenario=scenario),)
    if is_tp_block(scenario):
        # A split model is one model: all groups have the same data and seed, and each group's
        # reference has all parts.
        return tuple(_part(scenario, ranks, groups, topology=topology) for ranks in groups)
    return tuple(
        DpCpGroup(
            ranks=ranks,
            scenario=_as_seen_by(scenario, ranks, index),
            uncounted=_copies_at(scenario, topology.coordinates(ranks[0])),
        )
        for index, ranks in enumerate(groups)
    )


def _part(
    scenario: Scenario,
    ranks: tuple[int, ...],
    groups: Sequence[Sequence[int]],
    *,
    topology: Topology,
) -> DpCpGroup:
    """Return a part of one model, with the data of all parts.

    One device has the weights of all parts, so the reference of each group has them too.
    """
    place = topology.coordinates(ranks[0])
    others = (index for index in range(topology.tp) if index != place["tp"])
    elsewhere = tuple(part_ending(index) for index in others)
    nan = scenario.data.nan
    if nan is not None:
        at = next((g.index(nan.rank) for g in groups if nan.rank in g), None)
        # A rank may exist only before a checkpoint, or only after it.
        nan = None if at is None else replace(nan, rank=at)
    return DpCpGroup(
        ranks=ranks,
        scenario=replace(
            scenario,
            world=replace(scenario.world, size=len(ranks)),
            data=replace(scenario.data, nan=nan),
        ),
        # Params of other parts are in this reference, but other groups count them.
        uncounted=(*_copies_at(scenario, place), *elsewhere),
        tp_index=place["tp"],
        elsewhere=elsewhere,
    )


def _copies_at(scenario: Scenario, place: Mapping[str, int]) -> tuple[str, ...]:
    """Return name endings of params that the first tp or pp rank counts in the norm."""
    spec = scenario.topology
    # Index 0 counts the copy, all other indices skip it.
    return (*(spec.shared if place["tp"] else ()), *(spec.tied if place["pp"] else ()))


def _as_seen_by(scenario: Scenario, ranks: Sequence[int], index: int) -> Scenario:
    nan = scenario.data.nan
    if nan is not None:
        # World rank to group rank; a NaN in another group does not concern this one.
        nan = replace(nan, rank=ranks.index(nan.rank)) if nan.rank in ranks else None
    return replace(
        scenario,
        world=replace(scenario.world, size=len(ranks)),
        # Another seed for each group, because their params and data are unrelated.
        run=replace(scenario.run, seed=(scenario.run.seed + index * _SEED_STRIDE) % 2**63),
        data=replace(scenario.data, nan=nan),
    )


def check_crossing(
    records: Iterable[CollectiveRecord], dp_cp_groups: Sequence[DpCpGroup]
) -> Iterator[Finding]:
    """Check that collectives join ranks of one dp-cp group, or one group rank in all dp-cp groups.

    Ranks at one group rank agree on norm and overflow. No other data may pass between groups. A
    barrier moves no data and may join any ranks.
    """
    homes = [set(dp_cp_group.ranks) for dp_cp_group in dp_cp_groups]
    # Model-parallel groups: one group rank of every dp-cp group.
    homes += [
        set(ranks)
        for ranks in zip(*(dp_cp_group.ranks for dp_cp_group in dp_cp_groups), strict=True)
    ]
    for record in records:
        # With one group, every set of ranks trains the same params.
        if record.kind == "barrier" or len(dp_cp_groups) == 1:
            continue
        if not any(home.issuperset(record.group_ranks) for home in homes):
            yield Finding(
                check=Check.INVARIANT_CROSSING,
                rank=record.rank,
                message=f"{record.kind} at {record.site} joins ranks {list(record.group_ranks)}, "
                "which train different params and have different group ranks",
            )
            return
