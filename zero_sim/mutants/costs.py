"""Faults that cost time or memory and change no number."""

from __future__ import annotations

import torch

from zero_sim.layout import planner
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import unit as units
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.gathers import UnderForward
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.unit import Unit


@mutant("M111", "VOLUME", "", seen_in="DeepSpeed#4946", kill="volume", core=True)
def all_reduced_and_sliced(patch: Patches) -> None:
    """Gradients are all-reduced and sliced instead of reduce-scattered."""

    @patch(units, "reduce_scatter_sum")
    def wrong(right, output, flat, *, group, async_op=False):
        return units.all_reduce_sum(flat, group=group, async_op=async_op)


@mutant("M113", "VOLUME", "", seen_in="DeepSpeed#2665", kill="memory")
def gradients_kept(patch: Patches) -> None:
    """The fp32 copies of the gradients outlive the step."""

    @patch(DistributedOptimizer, "_step_masters")
    def wrong(right, self, trained, grads):
        kept = list(grads)
        right(self, trained, grads)
        self.__dict__["_kept"] = kept


@mutant("V15", "VOLUME", "MX", seen_in="class VOLUME", kill="volume", core=True)
def gathered_in_fp32(patch: Patches) -> None:
    """Params are gathered in fp32 and cast back: as many elements, more bytes."""

    @patch(units, "all_gather")
    def wrong(right, output, shard, *, group, async_op=False):
        if not output.dtype.is_floating_point or output.dtype is torch.float32:
            return right(output, shard, group=group, async_op=async_op)
        wide = torch.empty(output.shape, dtype=torch.float32, device=output.device)
        right(wide, shard.float(), group=group)
        output.copy_(wide)
        return None


@mutant("M115", "VOLUME", "B2", seen_in="DeepSpeed#7371", kill="overlap")
def reductions_serialised(patch: Patches) -> None:
    """Each reduction is waited for right after it is issued."""

    @patch(UnderBackward, "_issue_next")
    def wrong(right, self):
        unit = self._units[self._issued_count]
        right(self)
        unit.finish_reduce()


@mutant("V01", "VOLUME", "B2", seen_in="DeepSpeed#1219", kill="overlap")
def gathers_serialised(patch: Patches) -> None:
    """All gathers are waited for before the next forward begins."""

    @patch(UnderForward, "start")
    def wrong(right, self):
        right(self)
        self.finish()


@mutant("V10", "VOLUME", "B2", seen_in="class VOLUME", kill="overlap")
def reductions_issued_at_the_end(patch: Patches) -> None:
    """Reductions are issued once backward is done, all together."""

    @patch(UnderBackward, "_issue_ready")
    def wrong(right, self):
        return


@mutant("V11", "VOLUME", "B2", seen_in="class VOLUME", kill="overlap")
def reductions_issued_one_gradient_late(patch: Patches) -> None:
    """A bucket is looked at before its last gradient is counted, not after."""

    @patch(UnderBackward, "mark_ready")
    def wrong(right, self, param):
        unit = self._unit_of.get(param)
        if self.running and self._by_arrival and unit is not None:
            self._issue_ready()
            self._missing[unit].discard(param)


@mutant("V12", "VOLUME", "B2 FZ", seen_in="class VOLUME", kill="overlap")
def frozen_params_are_waited_for(patch: Patches) -> None:
    """A bucket with a param that is frozen for now waits for its gradient, which never comes."""

    @patch(UnderBackward, "begin")
    def wrong(right, self):
        self._missing = {unit: set() for unit in self._units}
        for param, unit in self._unit_of.items():
            self._missing[unit].add(param)
        self.running = True
        self._issue_ready()


@mutant("V13", "VOLUME", "B2", seen_in="class VOLUME", kill="overlap")
def first_forward_waits_for_all(patch: Patches) -> None:
    """The first module that runs waits for all gathers, not for its own."""

    @patch(UnderForward, "_before_forward")
    def wrong(right, self, needed, module, args):
        return right(self, self._units, module, args)


@mutant("V14", "VOLUME", "B2 K", seen_in="class VOLUME", kill="overlap")
def copies_summed_one_by_one(patch: Patches) -> None:
    """The copies of one bucket's shards are summed before those of the next are issued."""

    @patch(Unit, "chain_reduce")
    def wrong(right, self):
        right(self)
        self._wait_reduce()


@mutant("V02", "VOLUME", "", seen_in="DeepSpeed#3306", kill="memory", core=True)
def full_masters_on_every_rank(patch: Patches) -> None:
    """Every rank keeps a whole fp32 copy of the params beside its shard of masters."""

    @patch(DistributedOptimizer, "__init__")
    def wrong(right, self, ddp, **named):
        right(self, ddp, **named)
        copies = [b.param_data.to(torch.float32) for b in ddp.buffers if b.param_data is not None]
        self.__dict__["_copies"] = copies


@mutant("V03", "VOLUME", "", seen_in="class VOLUME", kill="volume")
def gathered_twice(patch: Patches) -> None:
    """Params are gathered twice."""

    @patch(Buffer, "allgather_params")
    def wrong(right, self):
        right(self)
        right(self)


@mutant("V04", "VOLUME", "IN", seen_in="class VOLUME", kill="volume")
def gathered_after_a_skipped_step(patch: Patches) -> None:
    """Params are gathered after a skipped step, too."""

    @patch(DistributedOptimizer, "step")
    def wrong(right, self):
        result = right(self)
        if result.skipped:
            self.ddp.start_param_gather()
        return result


@mutant("V05", "VOLUME", "B2", seen_in="class VOLUME", kill="volume")
def a_bucket_for_each_param(patch: Patches) -> None:
    """The bucket size is ignored, and every param has a bucket of its own."""

    @patch(planner, "_cut_into_buckets")
    def wrong(right, specs, *, bucket_elems):
        return right(specs, bucket_elems=1)


@mutant("V06", "VOLUME", "K", seen_in="class VOLUME", kill="volume")
def replicas_sum_whole_buckets(patch: Patches) -> None:
    """Replicas sum whole buckets, where the rank's own shard is enough."""

    @patch(Unit, "_sum_replicas")
    def wrong(right, self, *, async_op):
        if not self._has_replica_sum:
            return None
        return units.all_reduce_sum(self.grads, group=self.replica_group, async_op=async_op)


@mutant("V07", "VOLUME", "", seen_in="class VOLUME", kill="volume")
def norm_in_two_calls(patch: Patches) -> None:
    """The norm is reduced once more, for a log that nobody reads."""

    @patch(DistributedOptimizer, "_measure")
    def wrong(right, self, trained, grads):
        right(self, trained, grads)
        return right(self, trained, grads)


@mutant("V08", "VOLUME", "S2", seen_in="class VOLUME", kill="memory")
def history_of_gradients(patch: Patches) -> None:
    """The gradients of the step before are kept."""

    @patch(DistributedDataParallel, "zero_grad_buffer")
    def wrong(right, self):
        held = [b.total_data if b.grad_data is None else b.grad_data for b in self.buffers]
        self.__dict__["_before"] = [memory.clone() for memory in held]
        right(self)


@mutant("V09", "VOLUME", "", seen_in="class VOLUME", kill="memory")
def masters_of_padding(patch: Patches) -> None:
    """Sums over micro-batches have memory, though nothing is summed after every one."""

    @patch(DistributedDataParallel, "__init__")
    def wrong(right, self, module, **named):
        right(self, module, **named)
        for buffer in self.buffers:
            if buffer.total_data is None:
                buffer.total_data = torch.zeros_like(buffer.grad_data)
