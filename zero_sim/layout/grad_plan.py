"""Grad units: gradients that share a reduce buffer, and the owners of their elements.

Gradients need not travel with their params' buckets. A grad unit contains as many gradients as fit
a buffer of fixed length, in the order in which backward should produce them. A *run* is a
contiguous part of the unit with a single owner.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero_sim.layout.plan import BufferPlan
from zero_sim.layout.span import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class GradRun:
    """Contiguous elements in a grad unit that belong to the same shard."""

    shard: int
    span: Span
    """Elements, counted from the start of the unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedGrad:
    """A param's gradient and its span in a unit."""

    name: str
    span: Span
    """Elements, counted from the start of the unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradUnitPlan:
    """Gradients that are reduced together."""

    lane: Hashable
    """Buffer key. Only gradients with equal keys share a buffer."""
    turn: int
    """Index in the lane, from 0."""
    grads: tuple[PlacedGrad, ...]
    """Contiguous, in expected arrival order, without padding."""
    runs: tuple[GradRun, ...]
    """Contiguous; together they cover the unit."""
    is_large: bool
    """True if the unit is a single gradient, longer than a buffer."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        # Gradients are contiguous, so the last gradient ends the unit.
        return self.grads[-1].span.stop


def plan_grad_units(
    plans: Sequence[BufferPlan],
    *,
    lanes: Sequence[Hashable],
    arrivals: Sequence[str],
    buffer_elems: int,
) -> tuple[GradUnitPlan, ...]:
    """Cut gradients into units that fit a reduce buffer.

    All ranks compute the same units, whichever gradients they produce, so their collectives match.

    Args:
        plans: All flat buffers.
        lanes: Lane for each buffer in `plans`. Gradients share units if their lanes are equal.
        arrivals: All param names, in expected gradient order.
        buffer_elems: Length of a reduce buffer in elements, at least 1.

    Returns:
        Units in completion order. Empty params are in no unit.

    Source:
        DeepSpeed, stages 1 and 2 (`reduce_independent_p_g_buckets_and_remove_grads`): a gradient
        that no longer fits opens the next buffer, and a gradient longer than a buffer gets its own.
        DeepSpeed uses arrival order; here it is the expected order, because arrival order may
        differ between ranks.
    """
    homes = {placed.name: index for index, plan in enumerate(plans) for placed in plan.params}
    owners = _owners_of(plans)
    cut: dict[Hashable, list[list[str]]] = {}
    for name in arrivals:
        elems = _elems(owners[name])
        # An empty gradient moves nothing, and an empty unit would still issue a collective.
        if not elems:
            continue
        units = cut.setdefault(lanes[homes[name]], [[]])
        held = sum(_elems(owners[other]) for other in units[-1])
        # Greedy, as upstream: only the open unit may take this gradient, never an earlier unit.
        if units[-1] and held + elems > buffer_elems:
            units.append([])
        units[-1].append(name)
    place = {name: index for index, name in enumerate(arrivals)}
    made = [
        _plan_unit(lane, turn, names, owners=owners, buffer_elems=buffer_elems)
        for lane, units in cut.items()
        for turn, names in enumerate(units)
    ]
    # A unit is complete when its last gradient arrives, so this orders units across lanes.
    return tuple(sorted(made, key=lambda unit: place[unit.grads[-1].name]))


def _owners_of(plans: Sequence[BufferPlan]) -> dict[str, list[tuple[int, int]]]:
    """Return (shard, owned elements) pairs for each param, in element order."""
    owners: dict[str, list[tuple[int, int]]] = {
        placed.name: [] for plan in plans for placed in plan.params
    }
    for plan in plans:
        for bucket in plan.buckets:
            for shard in range(bucket.shard_count):
                for fragment in bucket.fragments(shard):
                    owners[fragment.param].append((shard, fragment.in_param.numel))
    return owners


def _elems(owned: Sequence[tuple[int, int]]) -> int:
    return sum(elems for _, elems in owned)


def _plan_unit(
    lane: Hashable,
    turn: int,
    names: Sequence[str],
    *,
    owners: Mapping[str, Sequence[tuple[int, int]]],
    buffer_elems: int,
) -> GradUnitPlan:
    grads: list[PlacedGrad] = []
    start = 0
    for name in names:
        grads.append(PlacedGrad(name=name, span=Span(start, start + _elems(owners[name]))))
        start = grads[-1].span.stop
    # In element order, so that runs extend across params with the same owner.
    owned = [each for name in names for each in owners[name]]
    return GradUnitPlan(
        lane=lane,
        turn=turn,
        grads=tuple(grads),
        runs=tuple(_runs(owned)),
        # Only a unit with a single gradient can be longer than a buffer.
        is_large=start > buffer_elems,
    )


def _runs(owned: Sequence[tuple[int, int]]) -> Iterator[GradRun]:
    # Join consecutive fragments of a shard, so that a single copy moves them.
    start, index = 0, 0
    while index < len(owned):
        shard, stop = owned[index][0], start
        while index < len(owned) and owned[index][0] == shard:
            stop += owned[index][1]
            index += 1
        yield GradRun(shard=shard, span=Span(start, stop))
        start = stop
