"""A grad unit: gradients that are copied into one reduce buffer and reduced to their owners.

Where gradients do not travel in the units of their params (`zero_sim.layout.grad_plan`), they are
copied into a buffer of fixed length as backward gives them, and each run of elements with one
owner is reduced to it, or all are summed to all ranks. The owner takes what is its own, and the
buffer goes on to the unit after next, where two buffers take turns. The states are those of a
unit's gradients (`zero_sim.zero.unit`).
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
    """One param's gradient in a grad unit."""

    memory: ParamMemory
    span: Span
    """All of it, from the start of the unit."""
    own: Span
    """What this rank owns of it; empty where nothing."""


@dataclass(kw_only=True, slots=True, eq=False)
class GradUnit:
    """Gradients of a few params on their way to their owners.

    `start_reduce` and `finish_reduce` are `reduce` in two steps, between which the rank may do
    something else; the memory is somebody else's again after the second.
    """

    plan: GradUnitPlan
    slices: Sequence[GradSlice]
    storage: Storage
    group: dist.ProcessGroup
    """The ranks that own a shard each, by shard."""
    sums_whole: bool
    """Whether every rank gets the sum of all, of which it keeps its own."""
    grads_stay: bool
    """Whether gradients are accumulated in `main_grad` and stay there; else they are the param's
    own `grad`, which is dropped once it is copied."""
    on_arrival: bool
    """Whether a gradient is copied when it comes; else all are at once, when none is missing."""
    accumulates: bool
    """Whether sums of several micro-batches are added up."""
    frees_grads: Final = True
    """Whether its memory has to be free before another unit can use it."""
    grad_state: GradState = GradState.EMPTY
    _works: list[dist.Work] = field(default_factory=list)
    _taken: set[nn.Parameter] = field(default_factory=set)
    _has_sum: bool = False
    _slice_of: dict[nn.Parameter, GradSlice] = field(init=False)

    def __post_init__(self) -> None:
        self._slice_of = {each.memory.param: each for each in self.slices}

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """Its params, as their gradients are expected."""
        return tuple(self._slice_of)

    @property
    def grads(self) -> Tensor:
        """This rank's gradients, 1D, or their sums."""
        whole = self.storage.whole
        assert whole is not None
        return whole

    def arrive(self, param: nn.Parameter) -> None:
        """Copy a gradient that is complete, if gradients are copied one by one."""
        if self.on_arrival:
            self._open()
            self._take(self._slice_of[param])

    def fill(self) -> None:
        """Copy all that was not copied yet; what did not come is zero."""
        self._open()
        for each in self.slices:
            if each.memory.param not in self._taken or each.memory.param.grad is not None:
                self._take(each)

    def scale_grads(self, divide: Divide, *, divisor: Tensor) -> None:
        """Do to this rank's own gradients what `divide` does before the sum."""
        scale_before_sum_(self.grads, divide, divisor=divisor)

    def reduce(self) -> None:
        """Sum over all ranks that train, each run to its owner."""
        self._step("reduce")
        self._sum(async_op=False)
        self._end_reduce()

    def start_reduce(self) -> None:
        """Issue the sums."""
        self._step("reduce")
        self._works = self._sum(async_op=True)

    def chain_reduce(self) -> None:
        """There is no second sum: nobody holds copies of a shard."""

    def finish_reduce(self) -> None:
        """Wait for the sums, keep what is this rank's own and leave the memory."""
        if self.grad_state is GradState.REDUCED:
            return
        for work in self._works:
            work.wait()
        self._works = []
        self._end_reduce()

    def reset_grads(self) -> None:
        """Forget the step's gradients."""
        if self.grad_state is not GradState.EMPTY:
            self._step("reset")
        self._has_sum = False
        self._leave()
        for param in () if self.grads_stay else self._slice_of:
            param.grad = None

    def _open(self) -> None:
        if self.grad_state is not GradState.FILLING:
            self._step("fill")
            self.storage.acquire()

    def _take(self, each: GradSlice) -> None:
        memory = each.memory
        grad = memory.main_grad if self.grads_stay else memory.param.grad
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
        if self.sums_whole:
            works = [all_reduce_sum(self.grads, group=self.group, async_op=async_op)]
        else:
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
        for each in self.slices:
            if not each.own.empty:
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
