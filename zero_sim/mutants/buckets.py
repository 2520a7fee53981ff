"""Faults in buckets, divisors and accumulation."""

from __future__ import annotations

from zero_sim.layout import planner
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import collectives, division
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.step_count import StepCount
from zero_sim.zero.unit import Unit


@mutant("M13", "BUCKET", "DR B2", seen_in="DeepSpeed#4321", core=True)
def exact_fit_dropped(patch: Patches) -> None:
    """A param that exactly fills its bucket's remaining room is not reduced."""
    # An exact fit: the param ends at the configured bucket size.
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = """
        if memory.in_unit.stop == self.config.layout.bucket_elems:
            param.grad = torch.zeros_like(grad)
        ..."""


@mutant("M15", "BUCKET", "DR B2", seen_in="fairscale#435", core=True)
def last_bucket_not_flushed(patch: Patches) -> None:
    """The last, partly filled bucket is not reduced at the end of backward."""
    # A full last bucket is still issued: the bug is in the flush of partial buckets.
    patch[Buffer.reduce_grads, "unit.fill()"] = """
        has_room = unit.plan.payload.numel < (self.plan.policy.bucket_elems or 0)
        if has_room and unit is self.units[-1] and len(self.units) > 1:
            continue
        ..."""


@mutant("M17", "BUCKET", "B2", seen_in="DeepSpeed#5268", kill="volume")
def stale_tail_reduced(patch: Patches) -> None:
    """A partly filled bucket is reduced at its allocated length, including the tail."""
    # Only stage 0 can send a tail, because shards have the planned length.
    patch[Buffer.reduce_grads, "unit.reduce()"] = """
        tail = (self.plan.policy.bucket_elems or 0) - unit.grads.numel()
        if self.sharding.state or tail <= 0:
            ...
            continue
        whole = torch.cat([unit.grads, unit.grads.new_zeros(tail)])
        unit._step_grads("reduce")
        dist.all_reduce(whole, group=unit.replica_group)
        unit.grads.copy_(whole[:-tail])
        unit._end_reduce()"""


@mutant("B01", "BUCKET", "B2", seen_in="Megatron-LM#5077", core=True)
def last_bucket_not_gathered(patch: Patches) -> None:
    """If there are several buckets, the last is not gathered."""
    # `or self.units`, because a single bucket must still be gathered.
    patch[Buffer.allgather_params, "in self.units"] = "in self.units[:-1] or self.units"


@mutant("B02", "BUCKET", "B2 S2", seen_in="PyTorch#43307", kill="contract")
def readiness_not_reset(patch: Patches) -> None:
    """Missing gradients are set up once, so from the second step on no bucket waits for them."""
    # Without new sets, every bucket is complete at once.
    patch[UnderBackward.begin, "self._missing = {unit: set()"] = """
        if self._missing:
            self.running = True
            self._issue_ready()
            return
        ..."""


@mutant("B03", "BUCKET", "DR B2", seen_in="DeepSpeed#4321")
def oversize_param_cut(patch: Patches) -> None:
    """If a param is larger than a bucket, only its first bucket's worth is reduced."""
    # Zero the rest of the gradient, as if it were never sent.
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = """
        if self.config.layout.bucket_elems is not None:
            param.grad = grad.clone()
            param.grad.view(-1)[self.config.layout.bucket_elems :] = 0
        ..."""


@mutant("B04", "BUCKET", "B2", seen_in="DeepSpeed#4321", kill="volume")
def closed_one_element_late(patch: Patches) -> None:
    """A bucket closes when it exceeds the configured size, not when it reaches it."""
    patch[planner._cut_into_buckets, "held_elems >= bucket_elems"] = "held_elems > bucket_elems"


def accept_late_gradients(patch: Patches) -> None:
    """Disable the checks that refuse a gradient for a unit in reduction."""
    # They would raise before a wrong value appears, but values must show this fault.
    patch[UnderBackward.check_open, "self.running and"] = "False and"
    patch[Unit.fill, "is GradState.FILLING"] = "in (GradState.FILLING, GradState.REDUCING)"


@mutant("B05", "BUCKET", "B2", seen_in="Megatron-LM#3693")
def neighbours_bucket(patch: Patches) -> None:
    """A bucket counts as ready when its neighbour's gradients have arrived."""
    # The following bucket counts as ready; after the last comes the first.
    patch[UnderBackward.mark_ready, "self._missing[unit].discard(param)"] = """
        ...
        if not self._missing[unit]:
            following = self._units.index(unit) + 1
            self._missing[self._units[following % len(self._units)]].clear()"""
    accept_late_gradients(patch)


@mutant("M29", "SCALE", "K", seen_in="PyTorch#155903", core=True)
def divided_by_the_shard_group(patch: Patches) -> None:
    """The mean divides by the shard group's size, not by the number of data-parallel ranks."""
    # A mean over tokens does not divide by ranks, so it stays right.
    patch[StepCount.fix, "self._take(last=last)"] = """
        ... // (1 if self._config.divide_by == "tokens" else self._config.redundancy)"""


@mutant("M31", "SCALE", "K", seen_in="PyTorch#167178", core=True)
def factor_skipped_for_one_rank(patch: Patches) -> None:
    """Nothing is divided if each shard group has a single rank."""
    # Then the redundancy equals the world size.
    patch[StepCount.fix, "self._take(last=last)"] = """
        (1 if 1 < self._world_size == self._config.redundancy else ...)"""


@mutant("M33", "SCALE", "GA", seen_in="DeepSpeed#8154", core=True)
def divided_twice_by_micro_batches(patch: Patches) -> None:
    """Gradients are divided by the number of micro-batches in two places."""
    # The divisor already has this factor.
    patch[StepCount._take, "self._world_size * expected"] = "... * expected"


@mutant("M35", "SCALE", "DR", seen_in="torchtune#2172")
def mean_of_means(patch: Patches) -> None:
    """Each rank averages over its own token count, although counts differ between ranks."""
    # Own rows times ranks replace the sum of all rows. `max`, because a rank may have no rows.
    patch[StepCount._take, "self._sum_over_ranks(self._rows)"] = """
        max(1, self._rows * self._world_size)"""


@mutant("S01", "SCALE", "", seen_in="DeepSpeed#8154")
def divided_before_and_after(patch: Patches) -> None:
    """Gradients divided before the sum are divided again after it."""
    patch[DistributedOptimizer._upcast_grad, '== "post"'] = 'in ("pre", "post")'


@mutant("S02", "SCALE", "MX NP", seen_in="NCCL#PreMulSum")
def reciprocal_not_rounded(patch: Patches) -> None:
    """The factor of a pre-multiplied sum is not rounded to the gradient dtype."""
    # NCCL's PreMulSum takes its factor in the buffer's dtype.
    patch[
        division.multiply_by_reciprocal_, "values.mul_(divisor.reciprocal().to(values.dtype))"
    ] = """
        values.copy_(values.to(torch.float32) * divisor.reciprocal())"""


@mutant("S03", "SCALE", "NP", seen_in="Megatron-LM#5956", core=True)
def reciprocal_for_a_quotient(patch: Patches) -> None:
    """The mean multiplies by the count's rounded reciprocal instead of dividing."""
    patch[DistributedOptimizer._upcast_grad, "divide_(grad, divisor="] = """
        (lambda divisor: grad.mul_(divisor.reciprocal()))(divisor="""


@mutant("S04", "SCALE", "GA", seen_in="class SCALE")
def rows_of_the_last_micro_batch(patch: Patches) -> None:
    """Only rows of the last micro-batch are counted."""
    patch[StepCount.add_rows, "self._rows += rows"] = "self._rows = rows"


@mutant("S12", "SCALE", "GA", seen_in="class SCALE")
def rows_of_the_first_step(patch: Patches) -> None:
    """All steps are divided by the first step's number of rows."""
    patch[StepCount._take, "return self._sum_over_ranks(self._rows)"] = """
        if not hasattr(self, "_first"):
            self._first = self._sum_over_ranks(self._rows)
        return self._first"""


@mutant("S05", "SCALE", "", seen_in="DeepSpeed#7967")
def unscaled_twice(patch: Patches) -> None:
    """Gradients are divided by the loss scale twice."""
    # Four dots: the fragment `...`, then `.div_(scale)` again.
    patch[DistributedOptimizer._upcast_grad, "grad.div_(scale)"] = "....div_(scale)"


@mutant("S06", "SCALE", "ME", seen_in="Megatron-LM#5916")
def experts_divided_by_their_holders(patch: Patches) -> None:
    """Expert gradients are averaged over the ranks with these experts, not over all ranks."""
    # Exactly this for two expert-parallel ranks. For more, the divisor is still wrong.
    patch[Unit.scale_grads, "scale_before_sum_("] = """
        if self.plan.params[0].spec.kind == "expert":
            self.grads.mul_(2)
        ..."""


@mutant("M37", "ACCUM", "GA", seen_in="DeepSpeed#7967", core=True)
def only_the_first_micro_batch(patch: Patches) -> None:
    """Only the first micro-batch counts; later micro-batches are dropped."""
    # The gradient is zeroed and not skipped, so its arrival still counts.
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = """
        if self.micro_batches:
            param.grad = torch.zeros_like(grad)
        ..."""


@mutant("M39", "ACCUM", "GA DR", seen_in="FunASR#3472", core=True)
def synchronised_at_the_first(patch: Patches) -> None:
    """Gradients are summed over ranks after the first micro-batch instead of the last."""
    # Only if backward itself sums nothing, and no division must come before the sum.
    patch[DistributedDataParallel.end_micro_batch, "self._sum_over_ranks()"] = """
        if not at_first:
            ..."""
    patch[DistributedDataParallel.end_micro_batch, "if is_summed:"] = """
        at_first = not self.grad_schedule.sums_in_backward and self.config.sync == "last"
        at_first = at_first and not self.config.divides_before_sum
        if at_first and not self.micro_batches:
            self._sum_over_ranks()
        ..."""


@mutant("M41", "ACCUM", "GA S2", seen_in="DeepSpeed#6550")
def counter_starts_one_early(patch: Patches) -> None:
    """From the second step on, the first micro-batch of each step is ignored."""
    # The gradient is zeroed and not skipped, so its arrival still counts.
    # The constructor has no such counter, hence the default.
    patch[DistributedDataParallel.zero_grad_buffer, "self.step_count.reset()"] = """
        ...
        self._steps_begun = self.__dict__.get("_steps_begun", 0) + 1"""
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = """
        is_first = (self.config.micro_batches or 1) > 1 and not self.micro_batches
        if is_first and self._steps_begun > 1:
            param.grad = torch.zeros_like(grad)
        ..."""


@mutant("M43", "ACCUM", "GA K DR", seen_in="PyTorch#125484", core=True)
def only_the_last_partial_sum(patch: Patches) -> None:
    """Only the last micro-batch's sum enters the sum over replicas."""
    # Earlier micro-batches get groups without a replica group, so they skip this sum.
    patch[DistributedDataParallel.end_micro_batch, "self._sum_over_ranks()"] = """
        units = [unit for buffer in self.buffers for unit in buffer.units if unit.group is not None]
        groups = [unit.groups for unit in units]
        for unit in units if not last else ():
            unit.groups = KindGroups(group=self.group, shard_group=unit.group)
        ...
        for unit, group in zip(units, groups):
            unit.groups = group"""


@mutant("A01", "ACCUM", "GA", seen_in="DeepSpeed#7981", core=True)
def sums_copied(patch: Patches) -> None:
    """A micro-batch's sum replaces the earlier sums instead of being added."""
    patch[Unit.accumulate_sum, "if is_first:"] = "if True:"


@mutant("A02", "ACCUM", "GA", seen_in="Megatron-LM!4038")
def gradients_copied(patch: Patches) -> None:
    """A micro-batch's gradient replaces the earlier gradients instead of being added."""
    patch[Unit.add_grad, "main_grad.add_(grad)"] = "main_grad.copy_(grad)"


@mutant("A03", "ACCUM", "GA S2", seen_in="InfiniTrain#183")
def sums_not_zeroed(patch: Patches) -> None:
    """The sums over micro-batches are not zeroed between steps."""
    patch[Buffer.zero_grads, "None if self.sharding.grads else self.total_data"] = "None"


@mutant("A04", "ACCUM", "GA", seen_in="class ACCUM")
def micro_batches_leak_into_the_next(patch: Patches) -> None:
    """With a sum after each micro-batch, its gradients are not zeroed before the next."""
    patch[Unit.accumulate_sum, "self.grads.zero_()"] = "pass"


@mutant("A06", "ACCUM", "GA", seen_in="DeepSpeed#7967")
def later_micro_batches_of_split_params(patch: Patches) -> None:
    """Later micro-batches only reach the rank's own fragment of a split param."""
    # `memory.fragment` is the rank's part of the param. Zero the rest of the gradient.
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = """
        if self.micro_batches and memory.fragment is not None:
            own = slice(memory.fragment.in_param.start, memory.fragment.in_param.stop)
            piece = torch.zeros_like(grad).reshape(-1)
            piece[own] = grad.reshape(-1)[own]
            param.grad = piece.view(param.shape)
        ..."""


@mutant("A07", "ACCUM", "S2", seen_in="class ACCUM", core=True)
def gradients_of_the_last_step(patch: Patches) -> None:
    """Gradients that stay in memory are not zeroed between steps."""
    # Sharded gradients are freed, not zeroed, so only other stages can keep old gradients.
    patch[Buffer.zero_grads, "for unit in self.units:"] = """
        if not self.sharding.grads:
            return
        ..."""


@mutant("S07", "SCALE", "", seen_in="class SCALE", core=True)
def mean_over_the_shards(patch: Patches) -> None:
    """A sum over the shard group is replaced by a mean."""
    # AVG divides by the shard group's size, in addition to the division by ranks.
    patch[collectives.reduce_scatter_sum, "ReduceOp.SUM"] = "ReduceOp.AVG"


@mutant("S08", "SCALE", "", seen_in="class SCALE")
def nothing_divided(patch: Patches) -> None:
    """Sums over ranks are not divided."""
    patch[StepCount.fix, "self._take(last=last)"] = "... and 1"
