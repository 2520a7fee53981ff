"""Faults in a wrapped module: ranks that join without data, and unwrapping."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.variants.uneven_micro_batches import (
    RepeatableOnUse,
    UnevenStepCount,
    join_micro_batch,
)


@mutant("K01", "ALIAS", "", seen_in="class ALIAS", core=True)
def hook_stays(patch: Patches) -> None:
    """The last hook stays on the unwrapped module."""
    patch[DistributedDataParallel.unwrap, "in self._handles"] = "in self._handles[:-1]"


@mutant("K02", "ALIAS", "", seen_in="class ALIAS")
def param_stays_a_view(patch: Patches) -> None:
    """An unwrapped param remains a view of the flat buffer."""
    # A view's storage is larger than the tensor itself.
    patch[DistributedDataParallel.unwrap, "param.data = whole[name]"] = """
        if param.data.untyped_storage().nbytes() <= param.data.nbytes:
            ..."""


@mutant("K03", "ALIAS", "Z3", seen_in="class ALIAS")
def sharded_params_stay_away(patch: Patches) -> None:
    """Unwrapping returns a sharded param's placeholder instead of the param."""
    patch[DistributedDataParallel.unwrap, "param.data = whole[name]"] = """
        if not self.config.sharding.params:
            ..."""


@mutant("K04", "ALIAS", "", seen_in="class ALIAS")
def main_grad_stays(patch: Patches) -> None:
    """Unwrapped params keep their last step's gradients."""
    patch[DistributedDataParallel.unwrap, 'vars(param).pop("main_grad", None)'] = "pass"


@mutant("K05", "ALIAS", "", seen_in="class ALIAS")
def values_of_another_param(patch: Patches) -> None:
    """Unwrapped params with the same shape exchange values."""
    # Params with a unique shape keep their values.
    patch[DistributedDataParallel.unwrap, "param.data = whole[name]"] = """
        kind = param.shape, param.dtype
        alike = [other for other, each in whole.items() if (each.shape, each.dtype) == kind]
        param.data = whole[alike[alike.index(name) - 1]]"""


def _note_offloading(patch: Patches) -> None:
    patch[DistributedOptimizer.__init__, "self._scale_of_step = 1.0"] = """
        ...
        self._is_offloaded = self.seams.state_device is not None"""


@mutant("K06", "OPTST", "", seen_in="class OPTST")
def offloaded_step_is_not_copied_back(patch: Patches) -> None:
    """A param with an offloaded master keeps its value from before the step."""
    # Only for the first trained param, so that the rest of the step is right.
    _note_offloading(patch)
    patch[DistributedOptimizer._write_back, "master.buffer.write_param_shard("] = """
        if not self._is_offloaded or master is not trained[0]:
            ..."""


@mutant("K07", "OPTST", "", seen_in="class OPTST")
def offloaded_masters_are_rounded(patch: Patches) -> None:
    """Offloaded masters are rounded to the working params' dtype after a step."""
    # Only wider dtypes: fp8 params have a scale.
    _note_offloading(patch)
    patch[DistributedOptimizer._write_back, "master.leaf.grad = None"] = """
        if self._is_offloaded and master.param.dtype.itemsize > 1:
            master.leaf.copy_(master.leaf.to(master.param.dtype))
        ..."""


@mutant("K11", "ACCUM", "GA", seen_in="class ACCUM", core=True)
def joins_with_gradients_of_the_last_step(patch: Patches) -> None:
    """A rank that joins contributes its previous step's gradients."""
    # Copies, because the next line resets the gradients.
    patch[DistributedDataParallel.zero_grad_buffer, "self.grad_schedule.reset()"] = """
        memories = [each for buffer in self.buffers for each in buffer.memory.values()]
        stale = {each: each.main_grad for each in memories if each.main_grad is not None}
        self._stale = {each: grad.clone() for each, grad in stale.items()}
        ..."""
    patch[join_micro_batch, "ddp.step_count.join()"] = """
        ...
        for memory, grad in ddp._stale.items() if last else ():
            if memory.main_grad is not None:
                memory.main_grad.copy_(grad)"""


@mutant("K12", "SCALE", "GA", seen_in="class SCALE", core=True)
def joined_ranks_count_as_full(patch: Patches) -> None:
    """Micro-batches without data count in the gradient divisor."""
    patch[UnevenStepCount.join, "self._joined += 1"] = "pass"


@mutant("K13", "ACCUM", "GA", seen_in="class ACCUM")
def joined_ranks_lose_what_they_accumulated(patch: Patches) -> None:
    """Gradients that a rank accumulated before it joins are zeroed."""
    # Zero them after the rank has joined, so that its count stays right.
    patch[join_micro_batch, "ddp.step_count.join()"] = """
        ...
        for memory in (each for buffer in ddp.buffers for each in buffer.memory.values()):
            if memory.main_grad is not None:
                memory.main_grad.zero_()"""


@mutant("K14", "ORDER", "GA Z3", seen_in="class ORDER", kill="contract")
def joined_ranks_gather_for_backward_alone(patch: Patches) -> None:
    """A rank that joins skips the gathers of other ranks' forwards."""
    # Repeat no forward of other ranks.
    patch[RepeatableOnUse.repeat_forward, "in self._last_calls"] = "in ()"


@mutant("K15", "ORDER", "GA", seen_in="class ORDER", kill="contract")
def joined_ranks_stay_away(patch: Patches) -> None:
    """A rank without data skips a micro-batch's sums."""
    # Keep the last micro-batch right, because all ranks must meet in its sum.
    patch[join_micro_batch, "ddp.finish_param_gather()"] = """
        if not last and ddp.config.sync == "every":
            ddp.step_count.end_micro_batch(last=last)
            return
        ..."""


@mutant("K16", "ASYNC", "GA AS", seen_in="class ASYNC")
def joined_ranks_wait_for_no_params(patch: Patches) -> None:
    """A rank without data in a step does not wait for its param gathers."""
    patch[join_micro_batch, "ddp.finish_param_gather()"] = "pass"


@mutant("K17", "SCALE", "GA", seen_in="class SCALE")
def rows_of_the_last_micro_batch_count_again(patch: Patches) -> None:
    """A rank that joins counts its own rows again."""
    patch[UnevenStepCount.join, "self._joined += 1"] = "...\nself._rows *= 2"


@mutant("K18", "ORDER", "GA Z3", seen_in="class ORDER", kill="contract")
def joined_ranks_keep_whole_params(patch: Patches) -> None:
    """A rank keeps params gathered for other ranks' forwards, although backward gathers again."""
    # `_kept` lists the units that stay after forward. Restore it after the call.
    patch[join_micro_batch, "ddp.param_schedule.repeat_forward()"] = """
        on_use = ddp.param_schedule
        kept, on_use._kept = on_use._kept, frozenset(on_use._units)
        ...
        on_use._kept = kept"""
