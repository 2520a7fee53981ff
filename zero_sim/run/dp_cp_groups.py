"""dp-cp groups of a world.

Each group trains its own params, and has its own judge and reference. Groups share two things: the
norm is over the params of all groups, and an overflow in any group counts for all.
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

# A large prime, so that cases with nearby seeds have no group seed in common.
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, kw_only=True, slots=True)
class DpCpGroup:
    """A dp-cp group."""

    ranks: tuple[int, ...]
    """World ranks by group rank."""
    scenario: Scenario
    """Case of this group alone, with its size and seed, and ranks counted from 0."""
    uncounted: tuple[str, ...] = ()
    """Name endings of params that another dp-cp group counts in the norm."""
    tp_index: int = 0
    """Tensor-parallel index of its ranks."""
    elsewhere: tuple[str, ...] = ()
    """Name endings of params that the reference has, but that only other groups train."""


def dp_cp_groups_of(scenario: Scenario) -> tuple[DpCpGroup, ...]:
    """Return the dp-cp groups of a case's world; with tp = pp = 1, the world itself."""
    spec = scenario.topology
    parts = spec.tp * spec.cp * spec.pp
    topology = Topology(
        tp=spec.tp, cp=spec.cp, pp=spec.pp, dp=scenario.world.size // parts, order=spec.order
    )
    groups = topology.dp_cp_groups()
    # A single group has the case itself, with the same seed.
    if len(groups) == 1:
        return (DpCpGroup(ranks=groups[0], scenario=scenario),)
    if is_tp_block(scenario):
        # All groups train parts of a single model, so they have the same data and seed, and each
        # group's reference has all parts.
        return tuple(_part(scenario, ranks, groups, topology=topology) for ranks in groups)
    return tuple(
        DpCpGroup(
            ranks=ranks,
            scenario=_as_viewed_by(scenario, ranks, index),
            uncounted=_replicas_at(scenario, topology.coordinates(ranks[0])),
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
    """Return a group that trains a part of a split model, with the data of all parts."""
    place = topology.coordinates(ranks[0])
    others = (index for index in range(topology.tp) if index != place["tp"])
    elsewhere = tuple(part_ending(index) for index in others)
    nan = scenario.data.nan
    if nan is not None:
        at = next((g.index(nan.rank) for g in groups if nan.rank in g), None)
        # The NaN's rank may exist only before, or only after, the checkpoint.
        nan = None if at is None else replace(nan, rank=at)
    return DpCpGroup(
        ranks=ranks,
        scenario=replace(
            scenario,
            world=replace(scenario.world, size=len(ranks)),
            data=replace(scenario.data, nan=nan),
        ),
        # This reference also has the params of other parts, but other groups count them.
        uncounted=(*_replicas_at(scenario, place), *elsewhere),
        tp_index=place["tp"],
        elsewhere=elsewhere,
    )


def _replicas_at(scenario: Scenario, place: Mapping[str, int]) -> tuple[str, ...]:
    """Return name endings of params that ranks at this place do not count in the norm."""
    spec = scenario.topology
    # Only index 0 counts a copy.
    return (*(spec.shared if place["tp"] else ()), *(spec.tied if place["pp"] else ()))


def _as_viewed_by(scenario: Scenario, ranks: Sequence[int], index: int) -> Scenario:
    nan = scenario.data.nan
    if nan is not None:
        # From world rank to group rank. A NaN in another group does not matter here.
        nan = replace(nan, rank=ranks.index(nan.rank)) if nan.rank in ranks else None
    return replace(
        scenario,
        world=replace(scenario.world, size=len(ranks)),
        # Each group has another seed, because groups have unrelated params and data.
        run=replace(scenario.run, seed=(scenario.run.seed + index * _SEED_STRIDE) % 2**63),
        data=replace(scenario.data, nan=nan),
    )


def check_crossing(
    records: Iterable[CollectiveRecord], dp_cp_groups: Sequence[DpCpGroup]
) -> Iterator[Finding]:
    """Check that collectives stay within a dp-cp group or a model-parallel group.

    Model-parallel groups agree on norm and overflow. No other data may pass between dp-cp groups. A
    barrier moves no data, so it may join any ranks.
    """
    homes = [set(dp_cp_group.ranks) for dp_cp_group in dp_cp_groups]
    # A model-parallel group has one rank of every dp-cp group.
    homes += [
        set(ranks)
        for ranks in zip(*(dp_cp_group.ranks for dp_cp_group in dp_cp_groups), strict=True)
    ]
    for record in records:
        # In a single group, all ranks train the same params.
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
