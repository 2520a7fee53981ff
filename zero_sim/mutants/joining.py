"""Faults of ranks that join a micro-batch for which they have no data."""

from __future__ import annotations

from torch import Tensor

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.targets import own
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.variants.uneven_micro_batches import RepeatableOnUse, UnevenStepCount


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

    @patch(own, "join_micro_batch")
    def wrong_join(right, ddp, last, **named):
        grads = stale.get(id(ddp), {})
        for memory in [each for buffer in ddp.buffers for each in buffer.memory.values()]:
            if last and memory.name in grads and memory.main_grad is not None:
                memory.main_grad.copy_(grads[memory.name])
        right(ddp, last, **named)


@mutant("K12", "SCALE", "GA", seen_in="class SCALE", core=True)
def joined_ranks_count_as_full(patch: Patches) -> None:
    """Micro-batches without data are counted among those that gradients are divided by."""

    @patch(UnevenStepCount, "join")
    def wrong(right, self):
        right(self)
        self._joined = 0


@mutant("K13", "ACCUM", "GA", seen_in="class ACCUM")
def joined_ranks_lose_what_they_accumulated(patch: Patches) -> None:
    """What a rank accumulated before it ran out of data is zeroed when it joins."""

    @patch(own, "join_micro_batch")
    def wrong(right, ddp, last, **named):
        for buffer in ddp.buffers:
            for memory in buffer.memory.values():
                if memory.main_grad is not None:
                    memory.main_grad.zero_()
        right(ddp, last, **named)


@mutant("K14", "ORDER", "GA Z3", seen_in="class ORDER", kill="contract")
def joined_ranks_gather_for_backward_alone(patch: Patches) -> None:
    """A rank that joins takes no part in the gathers of the others' forwards."""

    @patch(RepeatableOnUse, "repeat_forward")
    def wrong(right, self):
        return None


@mutant("K15", "ORDER", "GA", seen_in="class ORDER", kill="contract")
def joined_ranks_stay_away(patch: Patches) -> None:
    """A rank that has no data takes no part in the sums of a micro-batch."""

    @patch(own, "join_micro_batch")
    def wrong(right, ddp, last, **named):
        if last or ddp.config.sync == "last":
            right(ddp, last, **named)
        else:
            ddp.step_count.join()
            ddp.step_count.end_micro_batch(last=last)


@mutant("K16", "ASYNC", "GA AS", seen_in="class ASYNC")
def joined_ranks_wait_for_no_params(patch: Patches) -> None:
    """A rank without data in a step does not wait for params that no forward of it waits for."""

    @patch(own, "join_micro_batch")
    def wrong(right, ddp, last, **named):
        ddp.finish_param_gather = lambda: None
        try:
            right(ddp, last, **named)
        finally:
            del ddp.finish_param_gather


@mutant("K17", "SCALE", "GA", seen_in="class SCALE")
def rows_of_the_last_micro_batch_count_again(patch: Patches) -> None:
    """A rank that joins counts the rows that it had once more."""

    @patch(UnevenStepCount, "join")
    def wrong(right, self):
        right(self)
        self._rows *= 2


@mutant("K18", "ORDER", "GA Z3", seen_in="class ORDER", kill="contract")
def joined_ranks_keep_whole_params(patch: Patches) -> None:
    """What a rank gathers for others' forwards it keeps for their backwards, which gather again."""

    @patch(RepeatableOnUse, "repeat_forward")
    def wrong(right, self):
        kept, self._kept = self._kept, frozenset(self._units)
        right(self)
        self._kept = kept
