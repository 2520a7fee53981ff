"""Faults that cost time or memory, but change no number."""

from __future__ import annotations

from zero_sim.layout import planner
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.gathers import UnderForward
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.unit import Unit


@mutant("M111", "VOLUME", "", seen_in="DeepSpeed#4946", kill="volume", core=True)
def all_reduced_and_sliced(patch: Patches) -> None:
    """Gradients are all-reduced and sliced instead of reduce-scattered."""
    patch[Unit._scatter, "partial(reduce_scatter_sum, part,"] = "partial(all_reduce_sum,"


@mutant("M113", "VOLUME", "", seen_in="DeepSpeed#2665", kill="memory")
def gradients_kept(patch: Patches) -> None:
    """The fp32 gradient copies outlive the step."""
    # `leaf.grad` is the fp32 copy that the optimizer step reads.
    patch[DistributedOptimizer._write_back, "master.leaf.grad = None"] = "pass"


@mutant("V15", "VOLUME", "MX", seen_in="class VOLUME", kill="volume", core=True)
def gathered_in_fp32(patch: Patches) -> None:
    """Params are gathered in fp32 and cast back: as many elements, twice the bytes."""
    # fp32 params are gathered in fp32 anyway.
    patch[Unit.collect, "call = partial(all_gather, whole, part"] = """
        if self.plan.is_even and whole.dtype in (torch.bfloat16, torch.float16):
            wide = torch.empty(whole.shape, dtype=torch.float32, device=whole.device)
            all_gather(wide, part.float(), group=group)
            whole.copy_(wide)
            return None
        ..."""


@mutant("M115", "VOLUME", "B2", seen_in="DeepSpeed#7371", kill="overlap")
def reductions_serialised(patch: Patches) -> None:
    """Each reduction is waited for right after it is issued."""
    patch[UnderBackward._issue_next, "unit.start_reduce()"] = "...\nunit.finish_reduce()"


@mutant("V01", "VOLUME", "B2", seen_in="DeepSpeed#1219", kill="overlap")
def gathers_serialised(patch: Patches) -> None:
    """All gathers are waited for before the next forward begins."""
    patch[UnderForward.start, "unit in self._unguarded"] = "True"


@mutant("V10", "VOLUME", "B2", seen_in="class VOLUME", kill="overlap")
def reductions_issued_at_the_end(patch: Patches) -> None:
    """All reductions are issued together after backward."""
    patch[UnderBackward._issue_ready, "while self._issued_count"] = "return\n..."


@mutant("V11", "VOLUME", "B2", seen_in="class VOLUME", kill="overlap")
def reductions_issued_one_gradient_late(patch: Patches) -> None:
    """A bucket is checked before its last gradient is counted, not after."""
    patch[UnderBackward.mark_ready, "self._issue_ready()"] = "pass"
    patch[UnderBackward.mark_ready, "self._missing[unit].discard("] = "self._issue_ready()\n..."


@mutant("V12", "VOLUME", "B2 FZ", seen_in="class VOLUME", kill="overlap")
def frozen_params_are_waited_for(patch: Patches) -> None:
    """A bucket waits for a temporarily frozen param's gradient, which never arrives."""
    # `True` also waits for frozen params.
    patch[UnderBackward.begin, "param.requires_grad or not self._by_arrival"] = "True"


@mutant("V13", "VOLUME", "B2", seen_in="class VOLUME", kill="overlap")
def first_forward_waits_for_all(patch: Patches) -> None:
    """The first module to run waits for all gathers, not only for its own."""
    patch[UnderForward._before_forward, "in needed:"] = "in self._units:"


@mutant("V14", "VOLUME", "B2 K", seen_in="class VOLUME", kill="overlap")
def copies_summed_one_by_one(patch: Patches) -> None:
    """A bucket's replica sum is waited for before the next bucket is issued."""
    patch[Unit.chain_reduce, "self._sum_replicas(async_op=True)"] = "...\nself._wait_reduce()"


@mutant("V02", "VOLUME", "", seen_in="DeepSpeed#3306", kill="memory", core=True)
def full_masters_on_every_rank(patch: Patches) -> None:
    """Every rank keeps an unsharded fp32 copy of the params besides its master shard."""
    # Attributes of the optimizer keep the copies alive.
    patch[DistributedOptimizer.__init__, "self._scale_of_step = 1.0"] = """
        ...
        whole = [buffer.param_data for buffer in ddp.buffers if buffer.param_data is not None]
        self._copies = [params.float() for params in whole]"""


@mutant("V03", "VOLUME", "", seen_in="class VOLUME", kill="volume")
def gathered_twice(patch: Patches) -> None:
    """Params are gathered twice."""
    # Run the fragment twice.
    patch[Buffer.allgather_params, "unit.gather()"] = "...\n..."


@mutant("V04", "VOLUME", "IN", seen_in="class VOLUME", kill="volume")
def gathered_after_a_skipped_step(patch: Patches) -> None:
    """Params are gathered after a skipped step, too."""
    # A skipped step changes no params, so only the volume shows the fault.
    patch[DistributedOptimizer.step, "return StepResult("] = """
        if skipped:
            self.ddp.start_param_gather()
        ..."""


@mutant("V05", "VOLUME", "B2", seen_in="class VOLUME", kill="volume")
def a_bucket_for_each_param(patch: Patches) -> None:
    """The bucket size is ignored: every param has its own bucket."""
    patch[
        planner._cut_into_buckets, "bucket_elems is not None and held_elems >= bucket_elems"
    ] = """
        held_elems > 0"""


@mutant("V06", "VOLUME", "K", seen_in="class VOLUME", kill="volume")
def replicas_sum_whole_buckets(patch: Patches) -> None:
    """Replicas sum unsharded buckets, although each rank's shard would suffice."""
    patch[Unit._sum_replicas, "assert self.replica_group is not None"] = """
        return all_reduce_sum(self.grads, group=self.replica_group, async_op=async_op)"""


@mutant("V07", "VOLUME", "", seen_in="class VOLUME", kill="volume")
def norm_in_two_calls(patch: Patches) -> None:
    """The norm is reduced a second time, for an unused log."""
    patch[DistributedOptimizer._agree_on, "all_reduce_sum(measured, group=self.ddp.group)"] = """
        all_reduce_sum(measured.clone(), group=self.ddp.group)
        ..."""


@mutant("V08", "VOLUME", "S2", seen_in="class VOLUME", kill="memory")
def history_of_gradients(patch: Patches) -> None:
    """The previous step's gradients are kept."""
    # Copies, because the next line resets the gradients.
    patch[DistributedDataParallel.zero_grad_buffer, "self.grad_schedule.reset()"] = """
        held = [(each.grad_data, each.total_data) for each in self.buffers]
        self._before = [(sums if grads is None else grads).clone() for grads, sums in held]
        ..."""


@mutant("V09", "VOLUME", "", seen_in="class VOLUME", kill="memory")
def masters_of_padding(patch: Patches) -> None:
    """Sums over micro-batches are allocated even if gradients are summed once per step."""
    # Nothing reads these zeros, so only resident bytes show the fault.
    patch[DistributedDataParallel.__init__, "self._handles = list(self._add_hooks())"] = """
        ...
        for buffer in self.buffers:
            if buffer.total_data is None:
                buffer.total_data = torch.zeros_like(buffer.grad_data)"""
