"""Faults of sharded gradients: whole ones that come and go, and the sums that are kept of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.division import divide_
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.storage import TransientStorage
from zero_sim.zero.unit import GradState, Unit


@mutant("R01", "ACCUM", "GA Z2", seen_in="class ACCUM", core=True)
def sums_overwritten(patch: Patches) -> None:
    """Whether a sum is the step's first is never noted, so that each replaces those before it."""

    @patch(Unit, "_end_reduce")
    def wrong(right, self):
        self._has_sum = False
        right(self)


@mutant("R02", "ACCUM", "S2 Z2", seen_in="class ACCUM")
def added_to_the_last_step(patch: Patches) -> None:
    """The first sum of a step is added to those of the step before, which nobody zeroed."""

    @patch(Unit, "reset_grads")
    def wrong(right, self):
        had_sum = self._has_sum
        right(self)
        self._has_sum = had_sum and self.frees_grads

    @patch(Buffer, "zero_grads")
    def kept(right, self):
        total = self.total_data if self.sharding.grads else None
        before = None if total is None else total.clone()
        right(self)
        if total is not None and before is not None:
            total.copy_(before)


@mutant("R03", "ALIAS", "GA Z2", seen_in="class ALIAS")
def zeros_not_made(patch: Patches) -> None:
    """Memory for whole gradients is used again as it was left, without being zeroed."""
    left: dict[TransientStorage, torch.Tensor] = {}

    @patch(TransientStorage, "release")
    def remembered(right, self):
        if self._whole is not None and self._make is torch.zeros:
            left[self] = self._whole
        right(self)

    @patch(TransientStorage, "acquire")
    def wrong(right, self):
        if self._whole is None:
            self._whole = left.pop(self, None)
        return right(self)


@mutant("R04", "LAYOUT", "PD Z2", seen_in="class LAYOUT")
def padding_of_whole_gradients(patch: Patches) -> None:
    """The padding of fresh whole gradients is not zero."""

    @patch(Unit, "fill")
    def wrong(right, self):
        was = self.grad_state
        right(self)
        if self.frees_grads and was is not GradState.FILLING:
            self.grads[self.plan.padding.start - self.plan.span.start :] = 1


@mutant("R05", "ASYNC", "AS Z2", seen_in="class ASYNC", kill="race", core=True)
def sum_kept_before_it_is_there(patch: Patches) -> None:
    """The shard of a reduction in flight is kept, and its memory let go, without a wait."""

    @patch(Unit, "finish_reduce")
    def wrong(right, self):
        if self.frees_grads and self.grad_state is GradState.REDUCING:
            self.chain_reduce()
            self._reducing = None
        right(self)


@mutant("R06", "VOLUME", "Z2", seen_in="class VOLUME", kill="memory", core=True)
def whole_gradients_kept(patch: Patches) -> None:
    """Whole gradients are zeroed once they are reduced, but their memory is not let go."""

    @patch(Unit, "_free_grads")
    def wrong(right, self):
        whole = self.grad_storage.whole
        right(self)
        if whole is not None:
            self.grad_storage._whole = whole.zero_()


@mutant("R07", "VOLUME", "Z2", seen_in="class VOLUME", kill="memory")
def view_of_whole_gradients_kept(patch: Patches) -> None:
    """What is let go is the unit's own reference: views of single gradients keep the memory."""

    @patch(Unit, "_free_grads")
    def wrong(right, self):
        views = [memory.main_grad for memory in self.members]
        right(self)
        for memory, view in zip(self.members, views, strict=True):
            memory.main_grad = view


@mutant("R08", "VOLUME", "Z2", seen_in="class VOLUME", kill="volume")
def units_reduced_twice(patch: Patches) -> None:
    """At the end of backward all units are reduced, also those that were under it."""

    @patch(UnderBackward, "finish")
    def wrong(right, self):
        under_backward = [unit for unit in self._issued if unit.frees_grads]
        right(self)
        for unit in under_backward:
            unit.fill()
            unit.reduce()


@mutant("R09", "ACCUM", "Z2", seen_in="class ACCUM", core=True)
def sum_added_twice(patch: Patches) -> None:
    """The sum of the unit that is reduced last is added up twice."""

    @patch(UnderBackward, "finish")
    def wrong(right, self):
        last = self._units[-1]
        right(self)
        if isinstance(last, Unit) and last.grad_total is not None:
            last.grad_total.mul_(2)


@mutant("R10", "BUCKET", "Z2 SP", seen_in="class BUCKET", core=True)
def first_shard_kept(patch: Patches) -> None:
    """Of a reduced unit every rank keeps what lies at its start, not at its own shard."""

    @patch(Unit, "accumulate_sum")
    def wrong(right, self, *, is_first):
        if self.frees_grads:
            own = self.grad_shard
            own.copy_(self.grads[: own.numel()].clone())
        right(self, is_first=is_first)


@mutant("R11", "ACCUM", "GA Z2", seen_in="class ACCUM", core=True)
def micro_batches_let_go(patch: Patches) -> None:
    """With one sum a step, whole gradients are let go after every micro-batch all the same."""

    @patch(DistributedDataParallel, "end_micro_batch")
    def wrong(right, self, last, *, count=None):
        right(self, last, count=count)
        for buffer in self.buffers if not last and self.config.sync == "last" else ():
            for unit in buffer.units if buffer.sharding.grads else ():
                unit.reset_grads()


@mutant("R12", "ALIAS", "GA Z2", seen_in="class ALIAS")
def added_to_memory_let_go(patch: Patches) -> None:
    """From the second time on, gradients are added to the memory that the first ones had."""
    first: dict[Unit, list[torch.Tensor | None]] = {}

    @patch(Unit, "fill")
    def wrong(right, self):
        was = self.grad_state
        right(self)
        if not self.frees_grads or was is GradState.FILLING:
            return
        views = first.setdefault(self, [memory.main_grad for memory in self.members])
        for memory, view in zip(self.members, views, strict=True):
            memory.main_grad = view


@mutant("R13", "DTYPE", "MX GA Z2", seen_in="class DTYPE")
def sums_in_low_precision(patch: Patches) -> None:
    """Sums of fp32 gradients are kept in the dtype of 16-bit params."""

    @patch(Unit, "accumulate_sum")
    def wrong(right, self, *, is_first):
        right(self, is_first=is_first)
        dtype = self.members[0].param.dtype
        if self.frees_grads and dtype is torch.bfloat16:
            self.grad_total.copy_(self.grad_total.to(dtype))


@mutant("R14", "SCALE", "Z2 B2", seen_in="class SCALE")
def last_unit_not_divided(patch: Patches) -> None:
    """The unit that is issued last is summed as it is, where others are divided before."""

    @patch(UnderBackward, "_issue_next")
    def wrong(right, self):
        unit, before_sum = self._units[self._issued_count], self._before_sum
        is_last = self._issued_count == len(self._units) - 1 and len(self._units) > 1
        if unit.frees_grads and is_last:
            self._before_sum = lambda unit: None
        try:
            right(self)
        finally:
            self._before_sum = before_sum


@mutant("R15", "SCALE", "GA Z2", seen_in="class SCALE")
def sums_divided_again(patch: Patches) -> None:
    """Before each sum what was summed already is divided, too."""

    @patch(Unit, "scale_grads")
    def wrong(right, self, divide, *, divisor):
        right(self, divide, divisor=divisor)
        if self.frees_grads and self._has_sum and divide in ("pre", "premul"):
            divide_(self.grad_total, divisor=divisor)


@mutant("R16", "EMPTY", "FZ DR Z2", seen_in="PyTorch#158719", kill="contract")
def unit_without_gradients_skipped(patch: Patches) -> None:
    """A rank on which no gradient of a unit came takes no part in its reduction."""

    @patch(UnderBackward, "_issue_next")
    def wrong(right, self):
        unit = self._units[self._issued_count]
        is_whole = not isinstance(unit, Unit) or not unit.frees_grads
        if is_whole or unit.grad_state is GradState.FILLING:
            right(self)
            return
        unit.fill()
        unit._step_grads("reduce")
        unit._end_reduce()
        self._issued.add(unit)
        self._issued_count += 1


@mutant("R17", "VOLUME", "AS B2 Z2", seen_in="class VOLUME", kill="overlap")
def reduced_in_the_order_of_the_forward(patch: Patches) -> None:
    """Units are reduced in the order in which forward needs them, so that all wait for the last."""

    @patch(UnderBackward, "__init__")
    def wrong(right, self, wrapped):
        right(self, wrapped)
        if any(unit.frees_grads for unit in self._units):
            self._units = self._units[::-1]


@mutant("R18", "VOLUME", "AS B2 Z2", seen_in="class VOLUME", kill="overlap")
def each_reduction_waited_for(patch: Patches) -> None:
    """Where gradients are let go, a reduction is waited for right after it is issued."""

    @patch(UnderBackward, "_issue_next")
    def wrong(right, self):
        unit = self._units[self._issued_count]
        right(self)
        if unit.frees_grads:
            unit.finish_reduce()


@mutant("R19", "ASYNC", "AS Z2", seen_in="class ASYNC")
def kept_when_it_is_issued(patch: Patches) -> None:
    """The shard is added to the sums as soon as its reduction is issued."""
    early: set[Unit] = set()

    @patch(Unit, "start_reduce")
    def wrong(right, self):
        right(self)
        if self.frees_grads and self.reducing:
            self.accumulate_sum(is_first=not self._has_sum)
            early.add(self)

    @patch(Unit, "_end_reduce")
    def once(right, self):
        if self not in early:
            right(self)
            return
        early.discard(self)
        self._step_grads("finish")
        self._has_sum = True
        self._free_grads()


@mutant("R20", "LAYOUT", "B2 Z2", seen_in="class LAYOUT")
def sums_at_the_shards_start(patch: Patches) -> None:
    """The rank's part of each param is read from the start of its unit's sums."""

    @patch(Buffer, "_adopt")
    def wrong(right, self, params, **named):
        memory = right(self, params, **named)
        for its in memory.values() if self.sharding.grads else ():
            found = [each for each in named["units"].values() if its in each.members]
            unit = found[0] if found else None
            if unit is not None and its.own_grad.numel():
                its.own_grad = unit.grad_total[: its.own_grad.numel()]
        return memory


@mutant("R21", "INF", "IN S2 Z2", seen_in="class INF")
def sums_of_a_skipped_step_kept(patch: Patches) -> None:
    """After a skipped step nothing is zeroed, as nothing was used."""

    @patch(DistributedOptimizer, "step")
    def noted(right, self):
        result = right(self)
        self.__dict__["_has_skipped"] = result.skipped
        return result

    @patch(DistributedOptimizer, "zero_grad")
    def wrong(right, self):
        if not (self.ddp.config.sharding.grads and self.__dict__.get("_has_skipped")):
            right(self)
            return
        self.ddp._count.reset()
        self.ddp._grads_reduced = False


@mutant("R23", "ORDER", "DR Z2", seen_in="class ORDER", kill="volume")
def zero_gradients_stay_at_home(patch: Patches) -> None:
    """A rank whose whole gradients are all zero does not start their reduction."""

    @patch(Unit, "start_reduce")
    def wrong(right, self):
        if not self.frees_grads or self.grads.any():
            right(self)
            return
        self._step_grads("reduce")


@mutant("R24", "ORDER", "AS Z2 B2", seen_in="class ORDER")
def odd_ranks_reduce_in_reverse(patch: Patches) -> None:
    """Odd ranks reduce the units that backward has not reduced in reverse."""

    @patch(UnderBackward, "finish")
    def wrong(right, self):
        kept, done = self._units, self._issued_count
        if dist.get_rank() % 2 and kept[0].frees_grads:
            self._units = (*kept[:done], *kept[done:][::-1])
        right(self)
        self._units = kept


@mutant("R25", "OPTST", "Z2", seen_in="a transition left out", kill="contract")
def filling_not_noted(patch: Patches) -> None:
    """That gradients fill a unit is not noted: its transition to FILLING is left out."""

    @patch(Unit, "_step_grads")
    def wrong(right, self, step):
        if step != "fill":
            right(self, step)


@mutant("R26", "OPTST", "Z2", seen_in="a transition left out", kill="contract")
def reducing_not_noted(patch: Patches) -> None:
    """That a unit is reduced is not noted: its transition to REDUCING is left out."""

    @patch(Unit, "_step_grads")
    def wrong(right, self, step):
        if step != "reduce":
            right(self, step)


@mutant("R27", "OPTST", "Z2", seen_in="a transition left out", kill="contract")
def reduced_not_noted(patch: Patches) -> None:
    """That a reduction has ended is not noted: the transition to REDUCED is left out."""

    @patch(Unit, "_step_grads")
    def wrong(right, self, step):
        if step != "finish":
            right(self, step)


@mutant("R28", "BUCKET", "Z2", seen_in="class BUCKET")
def first_gradient_lost(patch: Patches) -> None:
    """The gradient for which the memory of a unit is made is lost."""

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        unit = self.grad_schedule._home_of.get(param)
        if unit is not None and unit.frees_grads and unit.grad_state is GradState.EMPTY:
            param.grad = torch.zeros_like(param.grad)
        right(self, memory, param)


@mutant("R29", "VOLUME", "B2 Z2", seen_in="class VOLUME", kill="memory", core=True)
def reductions_pile_up(patch: Patches) -> None:
    """A unit is issued without waiting for the one before, so that more than two are whole."""

    @patch(UnderBackward, "_issue_next")
    def wrong(right, self):
        unit = self._units[self._issued_count]
        unit.fill()
        self._before_sum(unit)
        if self._is_async:
            unit.start_reduce()
        else:
            unit.reduce()
        self._issued.add(unit)
        self._issued_count += 1
