"""Faults of ranks that join a micro-batch for which they have no data."""

from __future__ import annotations

from torch import Tensor

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.schedule import OnUse
from zero_sim.zero.step_count import StepCount


@mutant("K11", "ACCUM", "GA", seen_in="class ACCUM", core=True)
def joins_with_gradients_of_the_last_step(patch: Patches) -> None:
    """A rank that joins contributes the gradients that it had in the step before."""
    stale: dict[int, dict[str, Tensor]] = {}

    @patch(DistributedDataParallel, "zero_grad_buffer")
    def wrong(right, self):
        stale[id(self)] = {
            memory.name: memory.main_grad.clone()
            for buffer in self.buffers
            for memory in buffer.memory.values()
            if memory.main_grad is not None
        }
        right(self)

    @patch(DistributedDataParallel, "join_micro_batch")
    def wrong_join(right, self, last, *, count=None):
        own = stale.get(id(self), {})
        for memory in [each for buffer in self.buffers for each in buffer.memory.values()]:
            if last and memory.name in own and memory.main_grad is not None:
                memory.main_grad.copy_(own[memory.name])
        right(self, last, count=count)


@mutant("K12", "SCALE", "GA", seen_in="class SCALE", core=True)
def joined_ranks_count_as_full(patch: Patches) -> None:
    """Micro-batches without data are counted among those that gradients are divided by."""

    @patch(StepCount, "join")
    def wrong(right, self):
        right(self)
        self._joined = 0


@mutant("K13", "ACCUM", "GA", seen_in="class ACCUM")
def joined_ranks_lose_what_they_accumulated(patch: Patches) -> None:
    """What a rank accumulated before it ran out of data is zeroed when it joins."""

    @patch(DistributedDataParallel, "join_micro_batch")
    def wrong(right, self, last, *, count=None):
        for buffer in self.buffers:
            for memory in buffer.memory.values():
                if memory.main_grad is not None:
                    memory.main_grad.zero_()
        right(self, last, count=count)


@mutant("K14", "ORDER", "GA Z3", seen_in="class ORDER", kill="contract")
def joined_ranks_gather_for_backward_alone(patch: Patches) -> None:
    """A rank that joins takes no part in the gathers of the others' forwards."""

    @patch(OnUse, "repeat_forward")
    def wrong(right, self):
        return None


@mutant("K15", "ORDER", "GA", seen_in="class ORDER", kill="contract")
def joined_ranks_stay_away(patch: Patches) -> None:
    """A rank that has no data takes no part in the sums of a micro-batch."""

    @patch(DistributedDataParallel, "join_micro_batch")
    def wrong(right, self, last, *, count=None):
        if last or self.config.sync == "last":
            right(self, last, count=count)
        else:
            self._count.join()
            self._count.end_micro_batch(last=last)


@mutant("K16", "ASYNC", "GA AS", seen_in="class ASYNC")
def joined_ranks_wait_for_no_params(patch: Patches) -> None:
    """A rank without data in a step does not wait for params that no forward of it waits for."""

    @patch(DistributedDataParallel, "join_micro_batch")
    def wrong(right, self, last, *, count=None):
        pipeline, self._param_pipeline = self._param_pipeline, None
        try:
            right(self, last, count=count)
        finally:
            self._param_pipeline = pipeline


@mutant("K17", "SCALE", "GA", seen_in="class SCALE")
def rows_of_the_last_micro_batch_count_again(patch: Patches) -> None:
    """A rank that joins counts the rows that it had once more."""

    @patch(StepCount, "join")
    def wrong(right, self):
        right(self)
        self._rows *= 2


@mutant("K18", "ORDER", "GA Z3", seen_in="class ORDER", kill="contract")
def joined_ranks_keep_whole_params(patch: Patches) -> None:
    """What a rank gathers for others' forwards it keeps for their backwards, which gather again."""

    @patch(OnUse, "repeat_forward")
    def wrong(right, self):
        kept, self._kept = self._kept, frozenset(self._units)
        right(self)
        self._kept = kept
