"""A grad unit: gradients copied into a reduce buffer and reduced to their owners.

Grad units are used if gradients do not travel with their params (`zero_sim.layout.grad_plan`). As
backward produces them, they are copied into a buffer of fixed length. Each run of elements with a
single owner is reduced to this owner, or everything is summed to all ranks. Then owners copy their
parts, and the next unit can use the buffer; with two buffers, the unit after next. States are as
for a unit's gradients (`zero_sim.zero.states`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.layout import GradUnitPlan, Span
from zero_sim.zero.collectives import all_reduce_sum, reduce_to_owner_sum
from zero_sim.zero.config import Divide
from zero_sim.zero.division import scale_before_sum_
from zero_sim.zero.states import GradState, GradStep, next_grad_state
from zero_sim.zero.storage import Storage
from zero_sim.zero.unit import ParamMemory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradSlice:
    """A param's gradient in a grad unit."""

    memory: ParamMemory
    span: Span
    """The whole gradient, as offsets into the unit."""
    own: Span
    """The part that this rank owns; may be empty."""


@dataclass(kw_only=True, slots=True, eq=False)
class GradUnit:
    """Gradients on the way to their owners.

    `reduce` returns after completion. To do other work in between, call `start_reduce` and
    `finish_reduce`. Afterwards another unit may use the memory.
    """

    plan: GradUnitPlan
    slices: Sequence[GradSlice]
    storage: Storage
    group: dist.ProcessGroup
    """The shard group, in shard order."""
    sums_unsharded: bool
    """True to sum everything to all ranks; each rank keeps its part."""
    grads_stay: bool
    """True if gradients are accumulated in `main_grad` and stay there. Otherwise the unit copies
    `param.grad` and drops it."""
    on_arrival: bool
    """True to copy each gradient when it arrives; False to copy all once they are complete."""
    accumulates: bool
    """True to add up the sums from several micro-batches."""
    # The schedule must finish a unit before another unit uses the same buffer.
    frees_grads: Final = True
    grad_state: GradState = GradState.EMPTY
    _works: list[dist.Work] = field(default_factory=list)
    # Params whose gradients are already in the buffer.
    _taken: set[nn.Parameter] = field(default_factory=set)
    _has_sum: bool = False
    _slice_of: dict[nn.Parameter, GradSlice] = field(init=False)

    def __post_init__(self) -> None:
        self._slice_of = {each.memory.param: each for each in self.slices}

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """The unit's params, in the expected order of their gradients."""
        return tuple(self._slice_of)

    @property
    def grads(self) -> Tensor:
        """This rank's gradients or their sums, 1D."""
        whole = self.storage.whole
        assert whole is not None
        return whole

    def arrive(self, param: nn.Parameter) -> None:
        """Copy a complete gradient, if gradients are copied on arrival."""
        if self.on_arrival:
            self._open()
            self._take(self._slice_of[param])

    def fill(self) -> None:
        """Copy all remaining gradients. Missing gradients are zero."""
        self._open()
        for each in self.slices:
            # A param's second gradient is added to the first.
            if each.memory.param not in self._taken or each.memory.param.grad is not None:
                self._take(each)

    def scale_grads(self, divide: Divide, *, divisor: Tensor) -> None:
        """Divide this rank's gradients, if `divide` does so before the sum."""
        scale_before_sum_(self.grads, divide, divisor=divisor)

    def reduce(self) -> None:
        """Sum over all training ranks, each run to its owner."""
        self._step("reduce")
        self._sum(async_op=False)
        self._end_reduce()

    def start_reduce(self) -> None:
        """Issue the sums."""
        self._step("reduce")
        self._works = self._sum(async_op=True)

    def chain_reduce(self) -> None:
        """Do nothing: without replicas there is no second sum."""

    def finish_reduce(self) -> None:
        """Wait for the sums, copy this rank's part and release the memory."""
        if self.grad_state is GradState.REDUCED:
            return
        for work in self._works:
            work.wait()
        self._works = []
        self._end_reduce()

    def reset_grads(self) -> None:
        """Drop the step's gradients."""
        if self.grad_state is not GradState.EMPTY:
            self._step("reset")
        self._has_sum = False
        self._leave()
        for param in () if self.grads_stay else self._slice_of:
            param.grad = None

    def _open(self) -> None:
        # The first gradient opens the unit and acquires the buffer.
        if self.grad_state is not GradState.FILLING:
            self._step("fill")
            self.storage.acquire()

    def _take(self, each: GradSlice) -> None:
        memory = each.memory
        grad = memory.main_grad if self.grads_stay else memory.param.grad
        # A view into the buffer, in the param's shape. The buffer is not zeroed, so a param's first
        # gradient overwrites it.
        place = _view(self.grads, each.span).view(memory.param.shape)
        if grad is None:
            place.zero_()
        elif memory.param in self._taken and not self.grads_stay:
            place.add_(grad.detach())
        else:
            place.copy_(grad.detach())
        self._taken.add(memory.param)
        if not self.grads_stay:
            memory.param.grad = None

    def _sum(self, *, async_op: bool) -> list[dist.Work]:
        if self.sums_unsharded:
            # 1D, all gradients in one call.
            works = [all_reduce_sum(self.grads, group=self.group, async_op=async_op)]
        else:
            # A call per run, in the same order on all ranks, so that calls pair up.
            works = [
                reduce_to_owner_sum(
                    _view(self.grads, run.span),
                    owner=run.shard,
                    group=self.group,
                    async_op=async_op,
                )
                for run in self.plan.runs
            ]
        return [work for work in works if work is not None]

    def _end_reduce(self) -> None:
        self._step("finish")
        # Other units need the buffer, so copy this rank's part out of it.
        for each in self.slices:
            if not each.own.empty:
                # 1D, this rank's part of the summed gradient.
                summed = _view(self.grads, each.own)
                if self.accumulates and self._has_sum:
                    each.memory.own_grad.add_(summed)
                else:
                    each.memory.own_grad.copy_(summed)
        self._has_sum = True
        self._leave()

    def _leave(self) -> None:
        self.storage.release()
        self._taken.clear()

    def _step(self, step: GradStep) -> None:
        self.grad_state = next_grad_state(self.grad_state, step, of=self._described)

    def _described(self) -> str:
        names = ", ".join(repr(each.memory.name) for each in self.slices)
        return f"grad unit {self.plan.turn} of {self.plan.lane} ({names})"


def _view(flat: Tensor, span: Span) -> Tensor:
    return flat.narrow(0, span.start, span.stop - span.start)
