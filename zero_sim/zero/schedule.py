"""Gradient schedules: when new gradients are added to units, and when units are reduced.

[Note: one order for all ranks]
Ranks pair collectives by call order. But if ranks use different params, gradients arrive in
different orders, and some never arrive. So units are issued in a fixed order, which follows from
the layout alone: a ready unit waits for all units before it. Units that are still not ready when
backward ends are issued then, in the same order.

If params are also gathered during backward, see [Note: one order of gathers and reductions] in
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
    """A wrapped module, as seen by schedules."""

    module: nn.Module
    config: ZeroConfig
    buffers: tuple[Buffer, ...]
    units: tuple[Unit, ...]
    """Units in the order in which forward should use them."""
    unit_of: Mapping[nn.Parameter, Unit]
    """The unit of each non-empty param."""
    params: Mapping[str, nn.Parameter]
    """Trained params by name, in registration order."""
    holders: Holders
    """The ranks that hold each kind of params."""
    before_sum: Callable[[Unit], None]
    """Called with each unit right before its sum is issued."""


def order_by_forward(
    buffers: Sequence[Buffer], *, params: Sequence[nn.Parameter]
) -> tuple[Unit, ...]:
    """Return the units in the order in which forward should use them.

    Units are sorted by their first registered param, even if a buffer has its params in reverse.
    Backward should complete units in the opposite order.

    Args:
        buffers: All buffers of a model.
        params: Their params in registration order.
    """
    # The smallest registration index in each unit. `buffer.memory` may be in reverse order.
    place_of = {param: place for place, param in enumerate(params)}
    first_place: dict[Unit, int] = {}
    for buffer in buffers:
        for param in buffer.memory:
            unit = buffer.unit_of(param)
            if unit is not None:
                first_place[unit] = min(place_of[param], first_place.get(unit, len(params)))
    return tuple(sorted(first_place, key=first_place.__getitem__))


class AtEnd:
    """Reduces all units after the last backward, in turn.

    Args:
        wrapped: The module; its units are reduced buffer by buffer.
    """

    sums_in_backward = False
    """True if sums can be issued during backward."""
    running = False
    """True from `begin` to `finish`, while sums may be issued."""

    def __init__(self, wrapped: Wrapped) -> None:
        self._buffers = wrapped.buffers
        self._home_of = wrapped.unit_of
        self._before_sum = wrapped.before_sum

    def begin(self) -> None:
        """Start to issue units, if the schedule issues before `finish`."""

    def check_open(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient whose unit was already issued."""

    def take(self, memory: ParamMemory) -> None:
        """Add a new gradient to its unit and drop it; runs in backward."""
        param = memory.param
        unit = self._home_of.get(param)
        # An empty param may have no unit, and has nothing to add.
        if unit is not None:
            unit.fill()
            assert param.grad is not None
            # detach(), or with create_graph=True the buffer would keep the gradient's graph.
            unit.add_grad(memory, param.grad.detach())
        param.grad = None

    def finish(self) -> None:
        """Reduce every unit and wait for the sums."""
        for buffer in self._buffers:
            for unit in buffer.units:
                # Even without any gradient on this rank, because other ranks wait for the sum.
                unit.fill()
                self._before_sum(unit)
            buffer.reduce_grads()

    def accumulate_sums(self, *, is_first: bool) -> None:
        """Add a micro-batch's sums to the step's previous sums, if gradients are unsharded."""
        for buffer in self._buffers:
            for unit in buffer.units:
                unit.accumulate_sum(is_first=is_first)

    def reset(self) -> None:
        """Zero the step's gradients."""
        for buffer in self._buffers:
            buffer.zero_grads()


class UnderBackward(AtEnd):
    """Reduces each unit as soon as it is ready; see [Note: one order for all ranks].

    A unit is ready once its gradients have arrived or, if params are sharded, once it is closed.

    Args:
        wrapped: The module. Its units are issued in the order in which backward should complete
            them.
    """

    sums_in_backward = True

    def __init__(self, wrapped: Wrapped) -> None:
        super().__init__(wrapped)
        self._units: Sequence[Unit] = wrapped.units[::-1]
        self._unit_of: Mapping[nn.Parameter, Unit] = wrapped.unit_of
        # At stage 3 the arrival of gradients must not decide, see [Note: one order of gathers and
        # reductions].
        self._by_arrival = not wrapped.config.sharding.params
        # Without overlap the order is the same, but each sum ends before the next starts.
        self._is_async = wrapped.config.overlap_grads
        # Params whose gradients have not arrived yet, by unit.
        self._missing: dict[Unit, set[nn.Parameter]] = {}
        self._issued_count = 0
        self._issued: set[Unit] = set()
        self.running = False

    def begin(self) -> None:
        """Start to issue units. Call it before the backward that completes them."""
        self._missing = {unit: set() for unit in self._units}
        for param, unit in self._unit_of.items():
            # Do not wait for frozen params: they get no gradient.
            if param.requires_grad or not self._by_arrival:
                self._missing[unit].add(param)
        self.running = True
        # Units without any trainable param are ready at once.
        self._issue_ready()

    def check_open(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient whose unit was already issued.

        Raises:
            UsageError: If the unit was already issued.
        """
        if self.running and self._unit_of.get(param) in self._issued:
            raise UsageError(
                f"expected one gradient of {name!r} in the last micro-batch, got a second one "
                f"after its bucket was issued. Run one backward between begin_last_micro_batch() "
                f"and end_micro_batch(), or set overlap_grads=False."
            )

    def take(self, memory: ParamMemory) -> None:
        """Add a new gradient to its unit, drop it, and issue units that are now ready."""
        super().take(memory)
        self.mark_ready(memory.param)

    def mark_ready(self, param: nn.Parameter) -> None:
        """Mark a gradient as complete, and issue units that are now ready."""
        unit = self._unit_of.get(param)
        if self.running and self._by_arrival and unit is not None:
            self._missing[unit].discard(param)
            self._issue_ready()

    def close(self, unit: Unit) -> None:
        """Mark a unit as complete, and issue units that are now ready."""
        if self.running:
            self._missing[unit].clear()
            self._issue_ready()

    def before_gather(self, group: dist.ProcessGroup | None) -> None:
        """Prepare for a gather in a group. No-op here, because each sum is a single call."""

    def finish(self) -> None:
        """Issue the remaining units and wait until every unit is reduced."""
        # Other ranks may have issued these units already, so this rank must issue them too.
        while self._issued_count < len(self._units):
            self._issue_next()
        # Second sums are issued together, in the same order, so that they overlap each other.
        for unit in self._units:
            unit.chain_reduce()
        for unit in self._units:
            unit.finish_reduce()
        self._issued_count = 0
        self._issued.clear()
        self.running = False

    def _issue_ready(self) -> None:
        # Stop at the first unit that is not ready, even if later units are.
        while self._issued_count < len(self._units):
            if self._missing[self._units[self._issued_count]]:
                return
            self._issue_next()

    def _issue_next(self) -> None:
        unit = self._units[self._issued_count]
        if unit.frees_grads and self._issued_count:
            # Keep at most two unsharded units in memory: this unit, and the unit in flight.
            self._units[self._issued_count - 1].finish_reduce()
        unit.fill()
        # After fill(), so that missing gradients are zeros, and before the sum reads the buffer.
        self._before_sum(unit)
        if self._is_async:
            unit.start_reduce()
        else:
            unit.reduce()
        self._issued.add(unit)
        self._issued_count += 1


GradSchedule = AtEnd
"""A textbook gradient schedule, or a subclass of one."""


def schedule_grads(
    wrapped: Wrapped, *, under_backward: type[UnderBackward] = UnderBackward
) -> GradSchedule:
    """Return the gradient schedule for a config.

    Args:
        wrapped: The module with its config.
        under_backward: Schedule class for reductions during backward, or in backward order.
    """
    config = wrapped.config
    # Sharded gradients need it even without overlap, because AtEnd would keep all unsharded.
    if config.overlap_grads or config.sharding.grads:
        return under_backward(wrapped)
    return AtEnd(wrapped)
