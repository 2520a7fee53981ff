"""Gradient schedules: when fresh gradients are taken, and when units are reduced.

[Note: one order for all ranks]
Ranks meet in collectives by the order in which each issues them. Gradients arrive in an order that
differs between ranks, as soon as they differ in which params they use, and on some ranks never. So
a unit that is ready still waits for all before it in one fixed order, which follows from the
layout alone; what never became ready is issued at the end, in that order too.

Where params are gathered under backward as well, see [Note: one order of gathers and reductions] in
`zero_sim.zero.gathers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from zero_sim.errors import UsageError
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.groups import Holders
from zero_sim.zero.unit import ParamMemory, Unit


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Wrapped:
    """The pieces of a wrapped module that schedules move."""

    module: nn.Module
    config: ZeroConfig
    buffers: tuple[Buffer, ...]
    units: tuple[Unit, ...]
    """In the order in which a forward is expected to need them."""
    unit_of: Mapping[nn.Parameter, Unit]
    """The unit of each param that has elements."""
    params: Mapping[str, nn.Parameter]
    """By name, in registration order."""
    holders: Holders
    """Ranks by kind of params."""
    before_sum: Callable[[Unit], None]
    """Called with what is reduced right before it is issued."""


def order_by_forward(
    buffers: Sequence[Buffer], *, params: Sequence[nn.Parameter]
) -> tuple[Unit, ...]:
    """Return the units in the order in which a forward is expected to need them.

    That of their first registered param, whatever the order of params inside a buffer; reversed it
    is the order in which backward is expected to complete them.

    Args:
        buffers: All buffers of a model.
        params: Their params in registration order.
    """
    place_of = {param: place for place, param in enumerate(params)}
    first_place: dict[Unit, int] = {}
    for buffer in buffers:
        for param in buffer.memory:
            unit = buffer.unit_of(param)
            if unit is not None:
                first_place[unit] = min(place_of[param], first_place.get(unit, len(params)))
    return tuple(sorted(first_place, key=first_place.__getitem__))


class AtEnd:
    """Reduces all units after the last backward, one after another.

    Args:
        wrapped: Its units are reduced, buffer by buffer.
    """

    sums_in_backward = False
    """True if sums can be issued while backward runs."""
    running = False
    """True from `begin` to `finish`, while sums are issued."""

    def __init__(self, wrapped: Wrapped) -> None:
        self._buffers = wrapped.buffers
        self._home_of = wrapped.unit_of
        self._before_sum = wrapped.before_sum

    def begin(self) -> None:
        """Issue units from now on, if they are issued before `finish`."""

    def check_open(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient whose unit is on its way already."""

    def take(self, memory: ParamMemory) -> None:
        """Add a fresh gradient to its unit and drop it; runs inside backward."""
        param = memory.param
        unit = self._home_of.get(param)
        # A param without elements is in no unit, and has nothing to add.
        if unit is not None:
            unit.fill()
            assert param.grad is not None
            # detach: with create_graph=True a gradient has a history that the buffer must not keep.
            unit.add_grad(memory, param.grad.detach())
        param.grad = None

    def finish(self) -> None:
        """Come back when every unit is reduced."""
        for buffer in self._buffers:
            for unit in buffer.units:
                unit.fill()
                self._before_sum(unit)
            buffer.reduce_grads()

    def accumulate_sums(self, *, is_first: bool) -> None:
        """Add the sums of one micro-batch to those before it, where gradients are kept."""
        for buffer in self._buffers:
            for unit in buffer.units:
                unit.accumulate_sum(is_first=is_first)

    def reset(self) -> None:
        """Forget the step's gradients."""
        for buffer in self._buffers:
            buffer.zero_grads()


class UnderBackward(AtEnd):
    """Reduces each unit as soon as it is ready; see [Note: one order for all ranks].

    Args:
        wrapped: Its units are issued in the order in which backward completes them. Where its
            config shards params, a unit is ready once it is closed, else once its gradients are
            there.
    """

    sums_in_backward = True

    def __init__(self, wrapped: Wrapped) -> None:
        super().__init__(wrapped)
        self._units: Sequence[Unit] = wrapped.units[::-1]
        self._unit_of: Mapping[nn.Parameter, Unit] = wrapped.unit_of
        self._by_arrival = not wrapped.config.sharding.params
        self._is_async = wrapped.config.overlap_grads
        self._missing: dict[Unit, set[nn.Parameter]] = {}
        self._issued_count = 0
        self._issued: set[Unit] = set()
        self.running = False

    def begin(self) -> None:
        """Issue units from now on; to be called before the backward that completes them."""
        self._missing = {unit: set() for unit in self._units}
        for param, unit in self._unit_of.items():
            # A param that is frozen now gets no gradient and nobody has to wait for it.
            if param.requires_grad or not self._by_arrival:
                self._missing[unit].add(param)
        self.running = True
        self._issue_ready()

    def check_open(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient whose unit is on its way already.

        Raises:
            UsageError: If the unit was issued.
        """
        if self.running and self._unit_of.get(param) in self._issued:
            raise UsageError(
                f"expected one gradient of {name!r} in the last micro-batch, got another one "
                f"after its bucket was sent. Try one backward between begin_last_micro_batch() and "
                f"end_micro_batch(), or overlap_grads=False."
            )

    def take(self, memory: ParamMemory) -> None:
        """Add a fresh gradient to its unit and drop it, and issue what became ready by it."""
        super().take(memory)
        self.mark_ready(memory.param)

    def mark_ready(self, param: nn.Parameter) -> None:
        """Note that a gradient is complete, and issue what became ready by it."""
        unit = self._unit_of.get(param)
        if self.running and self._by_arrival and unit is not None:
            self._missing[unit].discard(param)
            self._issue_ready()

    def close(self, unit: Unit) -> None:
        """Note that no further gradient of a unit comes, and issue what became ready by it."""
        if self.running:
            self._missing[unit].clear()
            self._issue_ready()

    def before_gather(self, group: dist.ProcessGroup | None) -> None:
        """Make room for a gather in a group between the sums that were issued; these need none."""

    def finish(self) -> None:
        """Issue the rest and wait until every unit is reduced."""
        while self._issued_count < len(self._units):
            self._issue_next()
        # Second sums are issued together, in order too, so that they overlap each other.
        for unit in self._units:
            unit.chain_reduce()
        for unit in self._units:
            unit.finish_reduce()
        self._issued_count = 0
        self._issued.clear()
        self.running = False

    def _issue_ready(self) -> None:
        while self._issued_count < len(self._units):
            if self._missing[self._units[self._issued_count]]:
                return
            self._issue_next()

    def _issue_next(self) -> None:
        unit = self._units[self._issued_count]
        if unit.frees_grads and self._issued_count:
            # One in flight, one that fills: more whole gradients are never in memory.
            self._units[self._issued_count - 1].finish_reduce()
        unit.fill()
        self._before_sum(unit)
        if self._is_async:
            unit.start_reduce()
        else:
            unit.reduce()
        self._issued.add(unit)
        self._issued_count += 1


GradSchedule = AtEnd
"""A schedule of the textbook or one that extends it."""


def schedule_grads(
    wrapped: Wrapped, *, under_backward: type[UnderBackward] = UnderBackward
) -> GradSchedule:
    """Return the gradient schedule that a config requests.

    Args:
        wrapped: With its config.
        under_backward: The class of a schedule that reduces while backward runs, or in its order.
    """
    config = wrapped.config
    if config.overlap_grads or config.sharding.grads:
        return under_backward(wrapped)
    return AtEnd(wrapped)
