"""Grad units: whose gradients one reduce buffer takes at a time, and who owns what of them.

A layout says where params lie. Gradients may travel in another order and in pieces of another size:
in that in which backward is expected to give them, as many as fit into a buffer of fixed length.
The elements of such a buffer that lie behind each other and have one owner are a *run*.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero_sim.layout.plan import BufferPlan
from zero_sim.layout.span import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class GradRun:
    """Elements of one grad unit, one behind the other, that one shard owns."""

    shard: int
    span: Span
    """From the start of the unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedGrad:
    """A param's gradient and its place."""

    name: str
    """Name of the param."""
    span: Span
    """From the start of the unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradUnitPlan:
    """Gradients that are reduced together."""

    lane: Hashable
    """What they have in common: only such gradients share a buffer."""
    turn: int
    """How many units of the lane come before it."""
    grads: tuple[PlacedGrad, ...]
    """One behind the other, as they are expected to come; there is no padding."""
    runs: tuple[GradRun, ...]
    """One behind the other; together they are the unit."""
    is_large: bool
    """Whether its one gradient is longer than a buffer."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.grads[-1].span.stop


def plan_grad_units(
    plans: Sequence[BufferPlan],
    *,
    lanes: Sequence[Hashable],
    arrivals: Sequence[str],
    buffer_elems: int,
) -> tuple[GradUnitPlan, ...]:
    """Cut gradients into units that a reduce buffer takes.

    Every rank computes the same units, whatever gradients it gets, so that ranks meet in their
    collectives.

    Args:
        plans: All buffers of params.
        lanes: For each of them what its gradients have in common with those of others.
        arrivals: Names of all params, in the order in which their gradients are expected.
        buffer_elems: Elements of a reduce buffer, at least 1.

    Returns:
        The units in the order in which they are complete. Params without elements are in none.

    Source:
        DeepSpeed's stages 1 and 2 (`reduce_independent_p_g_buckets_and_remove_grads`): a gradient
        that does not fit any more goes into the next buffer, a longer one by itself. There the
        order is that in which gradients come, here the expected one.
    """
    homes = {placed.name: index for index, plan in enumerate(plans) for placed in plan.params}
    owners = _owners_of(plans)
    cut: dict[Hashable, list[list[str]]] = {}
    for name in arrivals:
        elems = _elems(owners[name])
        if not elems:
            continue
        units = cut.setdefault(lanes[homes[name]], [[]])
        held = sum(_elems(owners[other]) for other in units[-1])
        if units[-1] and held + elems > buffer_elems:
            units.append([])
        units[-1].append(name)
    place = {name: index for index, name in enumerate(arrivals)}
    made = [
        _plan_unit(lane, turn, names, owners=owners, buffer_elems=buffer_elems)
        for lane, units in cut.items()
        for turn, names in enumerate(units)
    ]
    return tuple(sorted(made, key=lambda unit: place[unit.grads[-1].name]))


def _owners_of(plans: Sequence[BufferPlan]) -> dict[str, list[tuple[int, int]]]:
    """By param: shards and how many elements each owns of it, in the order of elements."""
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
    owned = [each for name in names for each in owners[name]]
    return GradUnitPlan(
        lane=lane,
        turn=turn,
        grads=tuple(grads),
        runs=tuple(_runs(owned)),
        is_large=start > buffer_elems,
    )


def _runs(owned: Sequence[tuple[int, int]]) -> Iterator[GradRun]:
    start, index = 0, 0
    while index < len(owned):
        shard, stop = owned[index][0], start
        while index < len(owned) and owned[index][0] == shard:
            stop += owned[index][1]
            index += 1
        yield GradRun(shard=shard, span=Span(start, stop))
        start = stop
