"""Faults of buckets, divisors and accumulation."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zero_sim.layout import planner
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import collectives, division
from zero_sim.zero import unit as units
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.step_count import StepCount
from zero_sim.zero.unit import GradState, Unit


@mutant("M13", "BUCKET", "DR B2", seen_in="DeepSpeed#4321", core=True)
def exact_fit_dropped(patch: Patches) -> None:
    """A param that exactly fills what room its bucket has is not reduced."""

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        wanted = self.config.bucket_elems
        for buffer in self.buffers:
            unit = buffer.unit_of(param) if param in buffer.memory else None
            if unit is not None and unit.plan.payload.numel == wanted:
                last = max(unit.plan.params, key=lambda placed: placed.span.stop)
                if last.name == memory.name:
                    param.grad.zero_()
        right(self, memory, param)


@mutant("M15", "BUCKET", "DR B2", seen_in="fairscale#435", core=True)
def last_bucket_not_flushed(patch: Patches) -> None:
    """The last, partly filled bucket is not reduced at the end of backward."""

    def is_partly_filled(self: Buffer, unit: Unit) -> bool:
        wanted = self.plan.policy.bucket_elems
        is_last = unit is self.units[-1] and len(self.units) > 1
        return is_last and wanted is not None and unit.plan.payload.numel < wanted

    @patch(Buffer, "reduce_grads")
    def wrong(right, self):
        for unit in self.units:
            if not is_partly_filled(self, unit):
                unit.reduce()


@mutant("M17", "BUCKET", "B2", seen_in="DeepSpeed#5268", kill="volume")
def stale_tail_reduced(patch: Patches) -> None:
    """A bucket that is not full is reduced as long as it was allocated, tail included."""

    @patch(Buffer, "reduce_grads")
    def wrong(right, self):
        if self.sharding.state:
            right(self)
            return
        wanted = self.plan.policy.bucket_elems or 0
        for unit in self.units:
            unit._step_grads("reduce")
            tail = max(0, wanted - unit.grads.numel())
            whole = torch.cat([unit.grads, unit.grads.new_zeros(tail)])
            units.all_reduce_sum(whole, group=unit.replica_group)
            unit.grads.copy_(whole[: unit.grads.numel()])
            unit._end_reduce()


@mutant("B01", "BUCKET", "B2", seen_in="Megatron-LM#5077", core=True)
def last_bucket_not_gathered(patch: Patches) -> None:
    """Of several buckets the last one is not gathered."""

    @patch(Buffer, "allgather_params")
    def wrong(right, self):
        for unit in self.units[: max(1, len(self.units) - 1)]:
            unit.gather()


@mutant("B02", "BUCKET", "B2 S2", seen_in="PyTorch#43307", kill="contract")
def readiness_not_reset(patch: Patches) -> None:
    """What a bucket waits for is noted once, so that from the second step on nothing is."""

    @patch(UnderBackward, "begin")
    def wrong(right, self):
        missing = self._missing
        if not missing:
            right(self)
            return
        self.running = True
        self._issue_ready()


@mutant("B03", "BUCKET", "DR B2", seen_in="DeepSpeed#4321")
def oversize_param_cut(patch: Patches) -> None:
    """Of a param larger than a bucket only as much as fits into one is reduced."""

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        fits = self.config.bucket_elems
        if fits is not None:
            # Not in place: the gradient may be expanded.
            grad = param.grad.clone()
            grad.view(-1)[fits:] = 0
            param.grad = grad
        right(self, memory, param)


@mutant("B04", "BUCKET", "B2", seen_in="DeepSpeed#4321", kill="volume")
def closed_one_element_late(patch: Patches) -> None:
    """A bucket closes once it holds more than was asked for, not as much."""

    @patch(planner, "_cut_into_buckets")
    def wrong(right, specs, *, bucket_elems):
        return right(specs, bucket_elems=None if bucket_elems is None else bucket_elems + 1)


@mutant("B05", "BUCKET", "B2", seen_in="Megatron-LM#3693")
def neighbours_bucket(patch: Patches) -> None:
    """A bucket counts as ready when the params of its neighbour are there."""

    @patch(UnderBackward, "mark_ready")
    def wrong(right, self, param):
        unit = self._unit_of.get(param)
        if self.running and self._by_arrival and unit is not None:
            place = self._units.index(unit)
            self._missing[unit].discard(param)
            if not self._missing[unit]:
                self._missing[self._units[(place + 1) % len(self._units)]].clear()
            self._issue_ready()

    @patch(UnderBackward, "check_open")
    def blind(right, self, param, *, name):
        return None

    @patch(Unit, "fill")
    def unasked(right, self):
        if self.grad_state is not GradState.REDUCING:
            right(self)


@mutant("M29", "SCALE", "K", seen_in="PyTorch#155903", core=True)
def divided_by_the_shard_group(patch: Patches) -> None:
    """The mean is over the ranks that shard, not over all that train."""

    @patch(StepCount, "_take")
    def wrong(right, self, *, last):
        count = right(self, last=last)
        tokens = self._config.divide_by == "tokens"
        return count if tokens else count // self._config.redundancy


@mutant("M31", "SCALE", "K", seen_in="PyTorch#167178", core=True)
def factor_skipped_for_one_rank(patch: Patches) -> None:
    """With shards of degree one nothing is divided."""

    @patch(StepCount, "_take")
    def wrong(right, self, *, last):
        count, world_size = right(self, last=last), self._world_size
        return 1 if 1 < world_size == self._config.redundancy else count


@mutant("M33", "SCALE", "GA", seen_in="DeepSpeed#8154", core=True)
def divided_twice_by_micro_batches(patch: Patches) -> None:
    """The number of micro-batches divides in two places."""

    @patch(StepCount, "_take")
    def wrong(right, self, *, last):
        count = right(self, last=last)
        by_micro_batches = self._config.divide_by == "micro-batches"
        return count * (self._config.micro_batches or 1) if by_micro_batches else count


@mutant("M35", "SCALE", "DR", seen_in="torchtune#2172")
def mean_of_means(patch: Patches) -> None:
    """Tokens are averaged on each rank by its own count, where ranks have unequal ones."""

    @patch(StepCount, "_take")
    def wrong(right, self, *, last):
        count = right(self, last=last)
        own = self._rows * self._world_size
        return max(1, own) if self._config.divide_by == "tokens" else count


@mutant("S01", "SCALE", "", seen_in="DeepSpeed#8154")
def divided_before_and_after(patch: Patches) -> None:
    """What was divided before the sum is divided after it, too."""

    @patch(DistributedOptimizer, "_upcast_grad")
    def wrong(right, self, master):
        grad = right(self, master)
        return grad.div_(self.ddp.divisor) if self.ddp.config.divide == "pre" else grad


@mutant("S02", "SCALE", "MX NP", seen_in="NCCL#PreMulSum")
def reciprocal_not_rounded(patch: Patches) -> None:
    """The factor of a pre-multiplied sum is not rounded to the dtype of the gradients."""

    @patch(division, "multiply_by_reciprocal_")
    def wrong(right, values, *, divisor):
        values.copy_(values.to(torch.float32) * divisor.reciprocal())


@mutant("S03", "SCALE", "NP", seen_in="Megatron-LM#5956", core=True)
def reciprocal_for_a_quotient(patch: Patches) -> None:
    """The mean is taken by multiplying with the rounded reciprocal of the count."""
    from zero_sim.zero import optimizer

    @patch(optimizer, "divide_")
    def wrong(right, values, *, divisor):
        values.mul_(divisor.reciprocal())


@mutant("S04", "SCALE", "GA", seen_in="class SCALE")
def rows_of_the_last_micro_batch(patch: Patches) -> None:
    """Only the last micro-batch's rows are counted."""

    @patch(StepCount, "add_rows")
    def wrong(right, self, rows):
        self._rows = 0
        right(self, rows)


@mutant("S05", "SCALE", "", seen_in="DeepSpeed#7967")
def unscaled_twice(patch: Patches) -> None:
    """Gradients are divided by the loss scale twice."""

    @patch(DistributedOptimizer, "_upcast_grad")
    def wrong(right, self, master):
        grad = right(self, master)
        return grad if self.loss_scaler is None else grad.div_(self.loss_scaler.scale)


@mutant("S06", "SCALE", "ME", seen_in="Megatron-LM#5916")
def experts_divided_by_their_holders(patch: Patches) -> None:
    """Gradients of experts are averaged over the ranks that hold them, not over all that train."""

    @patch(Unit, "scale_grads")
    def wrong(right, self, divide, *, divisor):
        right(self, divide, divisor=divisor)
        if self.plan.params[0].spec.kind == "expert":
            self.grads.mul_(2)


@mutant("M37", "ACCUM", "GA", seen_in="DeepSpeed#7967", core=True)
def only_the_first_micro_batch(patch: Patches) -> None:
    """Only the first micro-batch counts; later ones are dropped."""

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        if self.micro_batches:
            param.grad = torch.zeros_like(param.grad)
        right(self, memory, param)


@mutant("M39", "ACCUM", "GA DR", seen_in="FunASR#3472", core=True)
def synchronised_at_the_first(patch: Patches) -> None:
    """Ranks are summed after the first micro-batch instead of the last."""

    @patch(DistributedDataParallel, "end_micro_batch")
    def wrong(right, self, last, *, count=None):
        is_plain = not self.grad_schedule.sums_in_backward and self.config.sync == "last"
        several = (self.config.micro_batches or 1) > 1
        if not is_plain or not several or self.config.divides_before_sum:
            return right(self, last, count=count)
        if not self.micro_batches:
            self._sum_over_ranks()
        self._sum_over_ranks = lambda: None
        try:
            return right(self, last, count=count)
        finally:
            del self._sum_over_ranks


@mutant("M41", "ACCUM", "GA S2", seen_in="DeepSpeed#6550")
def counter_starts_one_early(patch: Patches) -> None:
    """From the second step on, the first micro-batch of each step is taken for none."""

    @patch(DistributedDataParallel, "zero_grad_buffer")
    def counted(right, self):
        right(self)
        self.__dict__["_steps_begun"] = self.__dict__.get("_steps_begun", 0) + 1

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        several = (self.config.micro_batches or 1) > 1
        if several and not self.micro_batches and self.__dict__.get("_steps_begun", 0) > 1:
            param.grad = torch.zeros_like(param.grad)
        right(self, memory, param)


@mutant("M43", "ACCUM", "GA K DR", seen_in="PyTorch#125484", core=True)
def only_the_last_partial_sum(patch: Patches) -> None:
    """Only the last micro-batch's sum goes into the second sum, over the replicas."""

    @patch(DistributedDataParallel, "end_micro_batch")
    def wrong(right, self, last, *, count=None):
        sharded = [
            each for buffer in self.buffers for each in buffer.units if each.group is not None
        ]
        groups = [unit.replica_group for unit in sharded]
        if not last and self.config.sync == "every":
            for unit in sharded:
                unit.replica_group = None
        right(self, last, count=count)
        for unit, group in zip(sharded, groups, strict=True):
            unit.replica_group = group


@mutant("A01", "ACCUM", "GA", seen_in="DeepSpeed#7981", core=True)
def sums_copied(patch: Patches) -> None:
    """The sum of a micro-batch replaces those before it instead of being added."""

    @patch(Unit, "accumulate_sum")
    def wrong(right, self, *, is_first):
        right(self, is_first=True)


@mutant("A02", "ACCUM", "GA", seen_in="Megatron-LM!4038")
def gradients_copied(patch: Patches) -> None:
    """A micro-batch's gradient replaces those before it instead of being added."""

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        if memory.main_grad is not None:
            memory.main_grad.zero_()
        right(self, memory, param)


@mutant("A03", "ACCUM", "GA S2", seen_in="InfiniTrain#183")
def sums_not_zeroed(patch: Patches) -> None:
    """The sums over micro-batches are not zeroed between steps."""

    @patch(Buffer, "zero_grads")
    def wrong(right, self):
        for unit in self.units:
            unit.reset_grads()
        if self.grad_data is not None:
            self.grad_data.zero_()


@mutant("A04", "ACCUM", "GA", seen_in="class ACCUM")
def micro_batches_leak_into_the_next(patch: Patches) -> None:
    """With a sum after every micro-batch, what was summed is not zeroed before the next."""

    @patch(Unit, "accumulate_sum")
    def wrong(right, self, *, is_first):
        grads = self.grads.clone()
        right(self, is_first=is_first)
        if not self.frees_grads:
            self.grads.copy_(grads)


@mutant("A05", "ACCUM", "GA", seen_in="class ACCUM")
def running_mean(patch: Patches) -> None:
    """Sums of micro-batches are averaged pairwise while they are added."""

    @patch(Unit, "accumulate_sum")
    def wrong(right, self, *, is_first):
        right(self, is_first=is_first)
        if not is_first:
            self.grad_total.mul_(0.5)


@mutant("A06", "ACCUM", "GA", seen_in="DeepSpeed#7967")
def later_micro_batches_of_split_params(patch: Patches) -> None:
    """Of a split param later micro-batches reach only the rank's own piece."""

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        fragment = memory.fragment
        if self.micro_batches and fragment and fragment.in_param.numel < param.numel():
            grad = torch.zeros_like(param.grad).reshape(-1)
            own = slice(fragment.in_param.start, fragment.in_param.stop)
            grad[own] = param.grad.reshape(-1)[own]
            param.grad = grad.view(param.shape)
        right(self, memory, param)


@mutant("A07", "ACCUM", "S2", seen_in="class ACCUM", core=True)
def gradients_of_the_last_step(patch: Patches) -> None:
    """Gradients that stay in memory are not zeroed between steps."""

    @patch(Buffer, "zero_grads")
    def wrong(right, self):
        if self.sharding.grads:
            right(self)


@mutant("S07", "SCALE", "", seen_in="class SCALE", core=True)
def mean_over_the_shards(patch: Patches) -> None:
    """Where gradients are summed over the ranks that shard, their mean is taken."""

    @patch(units, "reduce_scatter_sum")
    def wrong(right, output, flat, *, group, async_op=False):
        mean = dist.ReduceOp.AVG
        return collectives._reduce_scatter(output, flat, op=mean, group=group, async_op=async_op)


@mutant("S08", "SCALE", "", seen_in="class SCALE")
def nothing_divided(patch: Patches) -> None:
    """Sums over ranks are not divided."""

    @patch(StepCount, "_take")
    def wrong(right, self, *, last):
        right(self, last=last)
        return 1
