"""Faults in sums of transient unsharded gradients, and in sums by the root rank."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.schedule import AtEnd, UnderBackward
from zero_sim.zero.storage import TransientStorage
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants.root_reduce import _SumAtFirst


@mutant("R01", "ACCUM", "GA Z2", seen_in="class ACCUM", core=True)
def sums_overwritten(patch: Patches) -> None:
    """Each sum in a step is treated as the first, so it replaces the earlier sums."""
    patch[Unit._end_reduce, "self._has_sum = True"] = "pass"


@mutant("R02", "ACCUM", "S2 Z2", seen_in="class ACCUM")
def added_to_the_last_step(patch: Patches) -> None:
    """A step's first sum is added to the previous step's sums, which were not zeroed."""
    # Reset neither flag nor memory.
    patch[Unit.reset_grads, "self._has_sum = False"] = "pass"
    patch[Unit.reset_grads, "self.grad_total.zero_()"] = "pass"


@mutant("R03", "ALIAS", "GA Z2", seen_in="class ALIAS")
def zeros_not_made(patch: Patches) -> None:
    """Memory of unsharded gradients is reused without being zeroed."""
    # `_left` acts as an allocator that returns memory with its old content.
    patch[TransientStorage.release, "self._whole = None"] = (
        "self._left, self._whole = self._whole, None"
    )
    patch[TransientStorage.acquire, "if self._whole is None:"] = """
        if self._whole is None and self._make is torch.zeros:
            self._whole = getattr(self, "_left", None)
        ..."""


@mutant("R04", "LAYOUT", "PD Z2", seen_in="class LAYOUT")
def padding_of_whole_gradients(patch: Patches) -> None:
    """The padding of fresh unsharded gradients is not zero."""
    patch[Unit.fill, "whole = self.grad_storage.acquire()"] = """
        ...
        whole[self.plan.payload.numel :] = 1"""


@mutant("R05", "ASYNC", "AS Z2", seen_in="class ASYNC", kill="race", core=True)
def sum_kept_before_it_is_there(patch: Patches) -> None:
    """While a reduction is in flight, its shard is used and its memory released, without a wait."""
    # Nothing then waits before `accumulate_sum` reads the shard.
    patch[Unit.finish_reduce, "self._wait_reduce()"] = """
        if not self.frees_grads:
            ...
        self._reducing = None"""


@mutant("R06", "VOLUME", "Z2", seen_in="class VOLUME", kill="memory", core=True)
def whole_gradients_kept(patch: Patches) -> None:
    """Unsharded gradients are zeroed after their reduction, but their memory is not released."""
    # Zero them, so that only the memory shows the fault.
    patch[Unit._free_grads, "self.grad_storage.release()"] = """
        whole = self.grad_storage.whole
        ...
        if whole is not None:
            self.grad_storage._whole = whole.zero_()"""


@mutant("R07", "VOLUME", "Z2", seen_in="class VOLUME", kill="memory")
def view_of_whole_gradients_kept(patch: Patches) -> None:
    """Views of single gradients keep a unit's released memory alive."""
    patch[Unit._free_grads, "memory.main_grad = None"] = "pass"


@mutant("R08", "VOLUME", "Z2", seen_in="class VOLUME", kill="volume")
def units_reduced_twice(patch: Patches) -> None:
    """After backward all units are reduced again, including those reduced during it."""
    # The second reduction adds zeros, so only the volume shows the fault.
    patch[UnderBackward.finish, "while self._issued_count"] = """
        again = [unit for unit in self._units if unit in self._issued and unit.frees_grads]
        ..."""
    patch[UnderBackward.finish, "self.running = False"] = """
        ...
        for unit in again:
            unit.fill()
            unit.reduce()"""


@mutant("R09", "ACCUM", "Z2", seen_in="class ACCUM", core=True)
def sum_added_twice(patch: Patches) -> None:
    """The last unit's sum is added twice."""
    # Doubling the total equals a second addition if the step has a single sum.
    patch[UnderBackward.finish, "self.running = False"] = """
        ...
        last = self._units[-1]
        if isinstance(last, Unit) and last.grad_total is not None:
            last.grad_total.mul_(2)"""


@mutant("R10", "BUCKET", "Z2 SP", seen_in="class BUCKET", core=True)
def first_shard_kept(patch: Patches) -> None:
    """Every rank keeps a reduced unit's start instead of its own shard."""
    # Clone, because source and target may overlap.
    patch[Unit.accumulate_sum, "assert self.grad_total is not None"] = """
        if self.frees_grads:
            self.grad_shard.copy_(self.grads[: self.grad_shard.numel()].clone())"""


@mutant("R11", "ACCUM", "GA Z2", seen_in="class ACCUM", core=True)
def micro_batches_let_go(patch: Patches) -> None:
    """With one sum per step, unsharded gradients are still released after every micro-batch."""
    # `reset_grads` drops the gradients that the next micro-batch should add to.
    patch[
        DistributedDataParallel.end_micro_batch, "self.step_count.end_micro_batch(last=last)"
    ] = """
        ...
        for buffer in self.buffers if not is_summed else ():
            for unit in buffer.units if self.config.sharding.grads else ():
                unit.reset_grads()"""


@mutant("R12", "ALIAS", "GA Z2", seen_in="class ALIAS")
def added_to_memory_let_go(patch: Patches) -> None:
    """From the second use on, gradients are added to the memory of the first use."""
    # `kept` holds the first gradient by param memory.
    patch[Unit.fill, "memory.main_grad = grad"] = """
        memory.main_grad = __mutant__.kept.setdefault(memory, grad)"""


@mutant("R13", "DTYPE", "MX GA Z2", seen_in="class DTYPE")
def sums_in_low_precision(patch: Patches) -> None:
    """Sums of fp32 gradients are kept in the 16-bit param dtype."""
    patch[Unit.accumulate_sum, "if not self.frees_grads:"] = """
        if self.frees_grads and self.members[0].param.dtype is torch.bfloat16:
            self.grad_total.copy_(self.grad_total.to(torch.bfloat16))
        ..."""


@mutant("R14", "SCALE", "Z2 B2", seen_in="class SCALE")
def last_unit_not_divided(patch: Patches) -> None:
    """The last unit issued is not divided before its sum, although other units are."""
    # `0 <`, because a single unit keeps its division.
    patch[UnderBackward._issue_next, "self._before_sum(unit)"] = """
        if not unit.frees_grads or not 0 < self._issued_count == len(self._units) - 1:
            ..."""


@mutant("R15", "SCALE", "GA Z2", seen_in="class SCALE")
def sums_divided_again(patch: Patches) -> None:
    """Before each sum, earlier sums are divided again."""
    patch[Unit.scale_grads, "scale_before_sum_(self.grads, divide, divisor=divisor)"] = """
        ...
        if self.frees_grads and self._has_sum:
            scale_before_sum_(self.grad_total, divide, divisor=divisor)"""


@mutant("R16", "EMPTY", "FZ DR Z2", seen_in="PyTorch#158719", kill="contract")
def unit_without_gradients_skipped(patch: Patches) -> None:
    """A rank skips a unit's reduction if it has no gradient for the unit."""
    # Advance the states, so that only the missing call can show the fault.
    patch[UnderBackward._issue_next, "unit.fill()"] = """
        if isinstance(unit, Unit) and unit.frees_grads and unit.grad_state != "filling":
            unit.fill()
            unit._step_grads("reduce")
            unit._end_reduce()
            self._issued.add(unit)
            self._issued_count += 1
            return
        ..."""


@mutant("R17", "VOLUME", "AS B2 Z2", seen_in="class VOLUME", kill="overlap")
def reduced_in_the_order_of_the_forward(patch: Patches) -> None:
    """Units are reduced in forward order, so all of them wait for the last gradient."""
    patch[UnderBackward.__init__, "wrapped.units[::-1]"] = """
        ...[:: -1 if any(unit.frees_grads for unit in wrapped.units) else 1]"""


@mutant("R18", "VOLUME", "AS B2 Z2", seen_in="class VOLUME", kill="overlap")
def each_reduction_waited_for(patch: Patches) -> None:
    """Each reduction of sharded gradients is waited for right after it is issued."""
    patch[UnderBackward._issue_next, "unit.start_reduce()"] = """
        ...
        if unit.frees_grads:
            unit.finish_reduce()"""


@mutant("R19", "ASYNC", "AS Z2", seen_in="class ASYNC")
def kept_when_it_is_issued(patch: Patches) -> None:
    """The shard is added to the sums when its reduction is issued, not when it completes."""
    # `kept` marks units whose sum was added early, so that it is not added twice.
    sums_up = "self.accumulate_sum(is_first=not self._has_sum)"
    patch[Unit.start_reduce, "self._chained = False"] = f"""
        ...
        if self.frees_grads:
            {sums_up}
            __mutant__.kept[self] = True"""
    patch[Unit._end_reduce, sums_up] = "__mutant__.kept.pop(self, False) or ..."


@mutant("R20", "LAYOUT", "B2 Z2", seen_in="class LAYOUT")
def sums_at_the_shards_start(patch: Patches) -> None:
    """Each param's fragment is read from the start of the unit's sums."""
    patch[Buffer._adopt, "_view(unit.grad_total, in_shard)"] = """
        _view(unit.grad_total, Span(0, in_shard.numel) if self.sharding.grads else in_shard)"""


@mutant("R21", "INF", "IN S2 Z2", seen_in="class INF")
def sums_of_a_skipped_step_kept(patch: Patches) -> None:
    """After a skipped step nothing is zeroed."""
    # Reset the state that the next step needs, but no memory.
    patch[DistributedOptimizer.step, "return StepResult("] = """
        self._has_skipped = skipped
        ..."""
    patch[DistributedOptimizer.zero_grad, "self.ddp.zero_grad_buffer()"] = """
        if self.ddp.config.sharding.grads and getattr(self, "_has_skipped", False):
            self.ddp.step_count.reset()
            self.ddp._grads_reduced = False
            return
        ..."""


@mutant("R23", "ORDER", "DR Z2", seen_in="class ORDER", kill="volume")
def zero_gradients_stay_at_home(patch: Patches) -> None:
    """A rank does not start a reduction if its gradients are all zero."""
    # By then the state is REDUCING, so only the call is missing.
    patch[Unit.start_reduce, 'self._step_grads("reduce")'] = """
        ...
        if self.frees_grads and not self.grads.any():
            return"""


@mutant("R24", "ORDER", "AS Z2 B2", seen_in="class ORDER")
def odd_ranks_reduce_in_reverse(patch: Patches) -> None:
    """Odd ranks reduce the units that remain after backward in reverse order."""
    # Put the units back after the loop, because the next step uses them.
    patch[UnderBackward.finish, "while self._issued_count"] = """
        units, count = self._units, self._issued_count
        if dist.get_rank() % 2 and units[0].frees_grads:
            self._units = (*units[:count], *units[count:][::-1])
        ..."""
    patch[UnderBackward.finish, "self.running = False"] = """
        ...
        self._units = units"""


@mutant("R25", "OPTST", "Z2", seen_in="an omitted transition", kill="contract")
def filling_not_noted(patch: Patches) -> None:
    """A unit's transition to FILLING is omitted."""
    patch[Unit.fill, 'self._step_grads("fill")'] = "pass"


@mutant("R26", "OPTST", "Z2", seen_in="an omitted transition", kill="contract")
def reducing_not_noted(patch: Patches) -> None:
    """A unit's transition to REDUCING is omitted."""
    patch[Unit.reduce, 'self._step_grads("reduce")'] = "pass"
    patch[Unit.start_reduce, 'self._step_grads("reduce")'] = "pass"


@mutant("R27", "OPTST", "Z2", seen_in="an omitted transition", kill="contract")
def reduced_not_noted(patch: Patches) -> None:
    """A unit's transition to REDUCED is omitted."""
    patch[Unit._end_reduce, 'self._step_grads("finish")'] = "pass"


@mutant("R28", "BUCKET", "Z2", seen_in="class BUCKET")
def first_gradient_lost(patch: Patches) -> None:
    """A unit's first gradient, for which its memory is allocated, is lost."""
    patch[AtEnd.take, "unit.fill()"] = """
        if unit.frees_grads and unit.grad_state == "empty":
            param.grad = param.grad.new_zeros(param.grad.shape)
        ..."""


@mutant("R29", "VOLUME", "B2 Z2", seen_in="class VOLUME", kill="memory", core=True)
def reductions_pile_up(patch: Patches) -> None:
    """Units are issued without waiting for the previous unit, so more than two stay unsharded."""
    # This wait limits unsharded gradients to two units.
    patch[UnderBackward._issue_next, "unit.frees_grads and self._issued_count"] = "False"


@mutant("X01", "SCALE", "DR", seen_in="class SCALE", core=True)
def first_counts_itself_twice(patch: Patches) -> None:
    """The root rank adds its own gradient twice."""
    patch[_SumAtFirst._add, "in parts[1:]"] = "in [*parts[1:], parts[0]]"


@mutant("X02", "ORDER", "DR", seen_in="class ORDER")
def added_from_the_last(patch: Patches) -> None:
    """The root rank adds in reverse rank order."""
    # Another summation order rounds differently.
    patch[_SumAtFirst._add, "self.flat.copy_("] = "parts = parts[::-1]\n..."


@mutant("X03", "VOLUME", "DR", seen_in="class VOLUME", kill="volume")
def kept_by_the_first(patch: Patches) -> None:
    """The root rank keeps the sum; other ranks continue with their own gradients."""
    patch[_SumAtFirst.wait, "self._send_back()"] = "pass"


@mutant("X04", "ASYNC", "AS DR", seen_in="class ASYNC", kill="race")
def added_before_it_came(patch: Patches) -> None:
    """The root rank adds received gradients before waiting for them."""
    patch[_SumAtFirst.wait, "self.sent.wait()"] = "pass"
    patch[_SumAtFirst.wait, "self._send_back()"] = "self.sent.wait()\n..."


@mutant("X05", "DTYPE", "DR", seen_in="class DTYPE")
def added_in_fp32(patch: Patches) -> None:
    """The root rank adds 16-bit gradients in fp32, unlike every other reduction here."""
    patch[_SumAtFirst._add, "self.flat.copy_(parts[0])"] = "total = parts[0].float()"
    patch[_SumAtFirst._add, "self.flat.add_(part)"] = """
        total = total + part
        self.flat.copy_(total)"""
