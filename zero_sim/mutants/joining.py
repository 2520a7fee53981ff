"""Faults of ranks that join a micro-batch for which they have no data."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.schedule import OnUse
from zero_sim.zero.step_count import StepCount


@mutant("K11", "ACCUM", "GA", seen_in="class ACCUM", core=True)
def joins_with_gradients_of_the_last_step(patch: Patches) -> None:
    """A rank that joins contributes the gradients that it had in the step before."""
    patch[DistributedDataParallel.zero_grad_buffer, "for buffer in self.buffers:"] = """
        memories = [each for buffer in self.buffers for each in buffer.memory.values()]
        stale = {each: each.main_grad for each in memories if each.main_grad is not None}
        self._stale = {each: grad.clone() for each, grad in stale.items()}
        ..."""
    patch[DistributedDataParallel.join_micro_batch, "self._count.join()"] = """
        ...
        for memory, grad in self._stale.items() if last else ():
            if memory.main_grad is not None:
                memory.main_grad.copy_(grad)"""


@mutant("K12", "SCALE", "GA", seen_in="class SCALE", core=True)
def joined_ranks_count_as_full(patch: Patches) -> None:
    """Micro-batches without data are counted among those that gradients are divided by."""
    patch[StepCount.join, "self._joined += 1"] = "pass"


@mutant("K13", "ACCUM", "GA", seen_in="class ACCUM")
def joined_ranks_lose_what_they_accumulated(patch: Patches) -> None:
    """What a rank accumulated before it ran out of data is zeroed when it joins."""
    patch[DistributedDataParallel.join_micro_batch, "self._count.join()"] = """
        ...
        for memory in (each for buffer in self.buffers for each in buffer.memory.values()):
            if memory.main_grad is not None:
                memory.main_grad.zero_()"""


@mutant("K14", "ORDER", "GA Z3", seen_in="class ORDER", kill="contract")
def joined_ranks_gather_for_backward_alone(patch: Patches) -> None:
    """A rank that joins takes no part in the gathers of the others' forwards."""
    patch[OnUse.repeat_forward, "in self._last_calls"] = "in ()"


@mutant("K15", "ORDER", "GA", seen_in="class ORDER", kill="contract")
def joined_ranks_stay_away(patch: Patches) -> None:
    """A rank that has no data takes no part in the sums of a micro-batch."""
    patch[DistributedDataParallel.join_micro_batch, "self.finish_param_gather()"] = """
        if not last and self.config.sync == "every":
            self._count.end_micro_batch(last=last)
            return
        ..."""


@mutant("K16", "ASYNC", "GA AS", seen_in="class ASYNC")
def joined_ranks_wait_for_no_params(patch: Patches) -> None:
    """A rank without data in a step does not wait for params that no forward of it waits for."""
    patch[DistributedDataParallel.join_micro_batch, "self.finish_param_gather()"] = "pass"


@mutant("K17", "SCALE", "GA", seen_in="class SCALE")
def rows_of_the_last_micro_batch_count_again(patch: Patches) -> None:
    """A rank that joins counts the rows that it had once more."""
    patch[StepCount.join, "self._joined += 1"] = "...\nself._rows *= 2"


@mutant("K18", "ORDER", "GA Z3", seen_in="class ORDER", kill="contract")
def joined_ranks_keep_whole_params(patch: Patches) -> None:
    """What a rank gathers for others' forwards it keeps for their backwards, which gather again."""
    patch[DistributedDataParallel.join_micro_batch, "self._on_use.repeat_forward()"] = """
        kept, self._on_use._kept = self._on_use._kept, frozenset(self._on_use._units)
        ...
        self._on_use._kept = kept"""
