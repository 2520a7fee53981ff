"""Faults in reduce buffers, their gradient units, and chunked gathers."""

from __future__ import annotations

from zero_sim.layout import grad_plan
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.buffered_module import build_buffers
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.variants.gathers import ChunkedUnit
from zero_sim.zero.variants.grad_unit import GradUnit
from zero_sim.zero.variants.reduce_buffers import ReduceBuffers


@mutant("J01", "ASYNC", "AS B2", seen_in="class ASYNC", core=True)
def both_turns_use_one_buffer(patch: Patches) -> None:
    """The reduce buffers do not alternate, so a buffer is refilled while its sum is in flight."""
    # All turns use the first buffer.
    patch[ReduceBuffers._storage_of, "plan.turn % turns"] = "0"


@mutant("J02", "BUCKET", "B2", seen_in="class BUCKET", core=True)
def last_buffer_is_not_sent(patch: Patches) -> None:
    """The last, partly filled reduce buffer is not reduced."""
    # Mark the unit at set-up. A marked unit's sum is empty.
    patch[ReduceBuffers.__init__, "self.unit_of = {"] = """
        if self.units and self.units[-1].plan.numel < self._elems:
            __mutant__.kept[self.units[-1]] = True
        ..."""
    patch[GradUnit._sum, "if self.sums_unsharded:"] = """
        if self in __mutant__.kept:
            return []
        ..."""


@mutant("J03", "BUCKET", "B2", seen_in="class BUCKET")
def long_gradients_are_dropped(patch: Patches) -> None:
    """A gradient longer than a reduce buffer belongs to no unit."""
    patch[ReduceBuffers.__init__, "for plan in plans"] = "... if not plan.is_large"


@mutant("J04", "LAYOUT", "NP", seen_in="class LAYOUT")
def runs_are_cut_an_element_early(patch: Patches) -> None:
    """The border between two owners in a reduce buffer is an element early."""
    # Move the border in both runs, so that no element is lost or summed twice.
    patch[GradUnit._sum, "if self.sums_unsharded:"] = """
        spans = {run: run.span for run in self.plan.runs}
        if len(spans) > 1 and self.plan.runs[0].span.numel > 1:
            first, second = self.plan.runs[:2]
            border = first.span.stop - 1
            spans[first], spans[second] = Span(0, border), Span(border, second.span.stop)
        ..."""
    patch[GradUnit._sum, "_view(self.grads, run.span)"] = "_view(self.grads, spans[run])"


@mutant("J05", "GROUP", "NP", seen_in="class GROUP")
def run_goes_to_the_next_rank(patch: Patches) -> None:
    """A run's sum arrives at the rank after its owner."""
    patch[GradUnit._sum, "owner=run.shard"] = "owner=(run.shard + 1) % self.group.size()"


@mutant("J06", "SCALE", "", seen_in="class SCALE")
def reduced_twice(patch: Patches) -> None:
    """A reduce buffer is reduced to its owners twice."""
    patch[GradUnit.reduce, "self._sum("] = "self._sum(async_op=False)\n..."
    patch[GradUnit.start_reduce, "self._works ="] = "self._sum(async_op=False)\n..."


@mutant("J07", "ASYNC", "AS", seen_in="class ASYNC")
def buffer_is_left_before_its_sum_is_there(patch: Patches) -> None:
    """The owner reads its part of a reduce buffer before waiting for the sum."""
    # Move `_end_reduce` ahead of the waits.
    patch[GradUnit.finish_reduce, "self._works = []\nself._end_reduce()"] = "self._works = []"
    patch[GradUnit.finish_reduce, "for work in"] = "self._end_reduce()\n..."


@mutant("J08", "ASYNC", "Z2", seen_in="class ASYNC", kill="memory")
def what_was_copied_stays(patch: Patches) -> None:
    """At stage 2, gradients stay in memory until their reduce buffer is reduced."""
    # `main_grad` keeps a reference until the unit is done.
    patch[GradUnit._take, "memory.param.grad = None"] = """
        memory.main_grad = memory.param.grad
        ..."""
    patch[GradUnit._leave, "self._taken.clear()"] = """
        ...
        for each in () if self.grads_stay else self.slices:
            each.memory.main_grad = None"""


@mutant("J09", "ACCUM", "GA", seen_in="class ACCUM")
def sums_of_micro_batches_replace_each_other(patch: Patches) -> None:
    """Each micro-batch's sum replaces the earlier sums."""
    # Each sum then counts as the first of the step.
    patch[GradUnit._end_reduce, "self._has_sum = True"] = "pass"


@mutant("J11", "VOLUME", "NP", seen_in="class VOLUME", kill="volume")
def runs_end_with_their_param(patch: Patches) -> None:
    """Neighbouring params with the same owner are reduced in separate calls."""
    # Each run ends after one param.
    patch[grad_plan._runs, "while index < len(owned) and owned[index][0] == shard:"] = "if True:"


@mutant("J12", "ASYNC", "B2", seen_in="class ASYNC", kill="memory")
def buffers_stay_after_backward(patch: Patches) -> None:
    """The reduce buffers are not released after the last sum."""
    patch[ReduceBuffers.release, "lender.release()"] = "pass"


@mutant("J13", "ORDER", "B2", seen_in="class ORDER", kill="memory")
def sent_when_backward_is_over(patch: Patches) -> None:
    """A full reduce buffer is not reduced until backward ends."""
    # By name, because the schedule's module does not import this variant.
    patch[UnderBackward._issue_ready, "while self._issued_count"] = """
        if type(self._units[0]).__name__ == "GradUnit":
            return
        ..."""


@mutant("J14", "BUCKET", "B2", seen_in="class BUCKET", kill="volume")
def buffers_longer_than_said(patch: Patches) -> None:
    """A reduce buffer takes an element more than configured."""
    patch[ReduceBuffers.__init__, "self._elems = settings.elems"] = "... + 1"


@mutant("J15", "ALIAS", "", seen_in="class ALIAS")
def chunk_lacks_its_last_element(patch: Patches) -> None:
    """In a gathered chunk, the last element of each rank's part is not copied."""
    patch[ChunkedUnit._gather_chunks, "whole.narrow("] = """
        if part == stretch and start != starts[own]:
            part, got = part - 1, got[:-1]
        ..."""


@mutant("J16", "ALIAS", "", seen_in="class ALIAS")
def last_chunk_is_not_gathered(patch: Patches) -> None:
    """The last chunk is not gathered if the shard is no multiple of the chunk."""
    patch[ChunkedUnit._gather_chunks, "for start, part, got in"] = """
        if 0 < first and first + stretch > max(sizes):
            continue
        ..."""


@mutant("J17", "ALIAS", "", seen_in="class ALIAS")
def keeps_what_lies_before_its_own(patch: Patches) -> None:
    """Each rank keeps the wrong part of an all-reduced unit, shifted by one element."""
    patch[GradUnit._end_reduce, "for each in self.slices:"] = """
        if self.sums_unsharded:
            self.grads.copy_(self.grads.roll(1))
        ..."""


@mutant("J19", "DTYPE", "GA", seen_in="class DTYPE")
def copied_in_the_dtype_of_params(patch: Patches) -> None:
    """Gradients accumulated in fp32 are rounded to the param dtype for the reduce buffer."""
    patch[GradUnit._take, "self._taken.add(memory.param)"] = """
        if memory.param.dtype.itemsize > 1:
            place.copy_(place.to(memory.param.dtype))
        ..."""


@mutant("J20", "VOLUME", "PG", seen_in="class VOLUME", kill="volume")
def groups_share_a_buffer(patch: Patches) -> None:
    """Param groups share reduce buffers, although each should have its own."""
    patch[build_buffers, "buffer_of is None"] = "True"
