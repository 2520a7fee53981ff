"""Faults of reduce buffers, of the units that go through them, and of gathers in chunks."""

from __future__ import annotations

from dataclasses import replace

from zero_sim.layout import Span, grad_plan
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.buffered_module import BufferedModule
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.variants import grad_unit, reduce_buffers
from zero_sim.zero.variants.gathers import ChunkedUnit
from zero_sim.zero.variants.grad_unit import GradUnit
from zero_sim.zero.variants.reduce_buffers import ReduceBuffers


@mutant("J01", "ASYNC", "AS B2", seen_in="class ASYNC", core=True)
def both_turns_use_one_buffer(patch: Patches) -> None:
    """The buffers do not take turns: one is filled again while its sum is on its way."""

    @patch(ReduceBuffers, "_storage_of")
    def wrong(right, self, plan, *, home):
        return right(self, replace(plan, turn=0), home=home)


@mutant("J02", "BUCKET", "B2", seen_in="class BUCKET", core=True)
def last_buffer_is_not_sent(patch: Patches) -> None:
    """What is in the last buffer when backward ends, which is not full, is not reduced."""
    last: set[GradUnit] = set()

    @patch(ReduceBuffers, "__init__")
    def wrong(right, self, buffers, **named):
        right(self, buffers, **named)
        if self.units and self.units[-1].plan.numel < self._elems:
            last.add(self.units[-1])

    @patch(GradUnit, "_sum")
    def wrong_sum(right, self, *, async_op):
        return [] if self in last else right(self, async_op=async_op)


@mutant("J03", "BUCKET", "B2", seen_in="class BUCKET")
def long_gradients_are_dropped(patch: Patches) -> None:
    """A gradient longer than a buffer is in no unit at all."""

    @patch(reduce_buffers, "plan_grad_units")
    def wrong(right, plans, *, lanes, arrivals, buffer_elems):
        made = right(plans, lanes=lanes, arrivals=arrivals, buffer_elems=buffer_elems)
        return tuple(unit for unit in made if not unit.is_large)


@mutant("J04", "LAYOUT", "NP", seen_in="class LAYOUT")
def runs_are_cut_an_element_early(patch: Patches) -> None:
    """The border between two owners in a buffer is one element before the right one."""

    @patch(GradUnit, "_sum")
    def wrong(right, self, *, async_op):
        plan, runs = self.plan, list(self.plan.runs)
        if len(runs) > 1 and runs[0].span.numel > 1:
            border = runs[0].span.stop - 1
            runs[0] = replace(runs[0], span=Span(0, border))
            runs[1] = replace(runs[1], span=Span(border, runs[1].span.stop))
        self.plan = replace(plan, runs=tuple(runs))
        works = right(self, async_op=async_op)
        self.plan = plan
        return works


@mutant("J05", "GROUP", "NP", seen_in="class GROUP")
def run_goes_to_the_next_rank(patch: Patches) -> None:
    """The sum of a run of elements arrives at the rank behind its owner."""

    @patch(grad_unit, "reduce_to_owner_sum")
    def wrong(right, flat, *, owner, group, async_op=False):
        return right(flat, owner=(owner + 1) % group.size(), group=group, async_op=async_op)


@mutant("J06", "SCALE", "", seen_in="class SCALE")
def reduced_twice(patch: Patches) -> None:
    """A buffer is reduced to its owners, and once more."""

    @patch(GradUnit, "_sum")
    def wrong(right, self, *, async_op):
        right(self, async_op=False)
        return right(self, async_op=async_op)


@mutant("J07", "ASYNC", "AS", seen_in="class ASYNC")
def buffer_is_left_before_its_sum_is_there(patch: Patches) -> None:
    """The owner takes its part of a buffer, and the next gradients come, before the wait."""

    @patch(GradUnit, "finish_reduce")
    def wrong(right, self):
        works, self._works = self._works, []
        right(self)
        for work in works:
            work.wait()


@mutant("J08", "ASYNC", "Z2", seen_in="class ASYNC", kill="memory")
def what_was_copied_stays(patch: Patches) -> None:
    """At stage 2 gradients stay in memory until their buffer is reduced."""

    @patch(GradUnit, "_take")
    def wrong(right, self, each):
        kept = each.memory.param.grad
        right(self, each)
        if not self.grads_stay:
            each.memory.main_grad = kept

    @patch(GradUnit, "_leave")
    def wrong_leave(right, self):
        right(self)
        for each in () if self.grads_stay else self.slices:
            each.memory.main_grad = None


@mutant("J09", "ACCUM", "GA", seen_in="class ACCUM")
def sums_of_micro_batches_replace_each_other(patch: Patches) -> None:
    """What a buffer brings in one micro-batch takes the place of what came before."""

    @patch(GradUnit, "_end_reduce")
    def wrong(right, self):
        self._has_sum = False
        right(self)


@mutant("J11", "VOLUME", "NP", seen_in="class VOLUME", kill="volume")
def runs_end_with_their_param(patch: Patches) -> None:
    """Neighbours with one owner are reduced by as many calls as they have params."""

    @patch(grad_plan, "_runs")
    def wrong(right, owned):
        start = 0
        for shard, elems in owned:
            (run,) = right([(shard, elems)])
            yield replace(run, span=run.span.shift(start))
            start += elems


@mutant("J12", "ASYNC", "B2", seen_in="class ASYNC", kill="memory")
def buffers_stay_after_backward(patch: Patches) -> None:
    """The buffers are not let go of when the last sum is there."""

    @patch(ReduceBuffers, "release")
    def wrong(right, self):
        return None


@mutant("J13", "ORDER", "B2", seen_in="class ORDER", kill="memory")
def sent_when_backward_is_over(patch: Patches) -> None:
    """A full buffer waits for the end of backward."""

    @patch(UnderBackward, "_issue_ready")
    def wrong(right, self):
        if not isinstance(self._units[0], GradUnit):
            right(self)


@mutant("J14", "BUCKET", "B2", seen_in="class BUCKET", kill="volume")
def buffers_longer_than_said(patch: Patches) -> None:
    """A buffer takes one element more than it is to."""

    @patch(ReduceBuffers, "__init__")
    def wrong(right, self, buffers, *, settings, **named):
        longer = replace(settings, elems=settings.elems + 1)
        right(self, buffers, settings=longer, **named)


@mutant("J15", "ALIAS", "", seen_in="class ALIAS")
def chunk_lacks_its_last_element(patch: Patches) -> None:
    """Of every chunk that is gathered the last element of each rank's part is not copied."""

    @patch(ChunkedUnit, "_gather_chunks")
    def wrong(right, self, whole):
        before = whole.clone()
        right(self, whole)
        start = 0
        sizes = self.plan.shard_sizes
        stretch = max(1, self.chunk_elems // len(sizes))
        for place, size in enumerate(sizes):
            stops = range(stretch, size + 1, stretch)
            for stop in stops if place != self.group.rank() else ():
                whole[start + stop - 1] = before[start + stop - 1]
            start += size


@mutant("J16", "ALIAS", "", seen_in="class ALIAS")
def last_chunk_is_not_gathered(patch: Patches) -> None:
    """Chunks that do not come out even end with one that nobody gathers."""

    @patch(ChunkedUnit, "_gather_chunks")
    def wrong(right, self, whole):
        sizes = self.plan.shard_sizes
        stretch = max(1, self.chunk_elems // len(sizes))
        if max(sizes) <= stretch or max(sizes) % stretch == 0:
            right(self, whole)
            return
        before, start = whole.clone(), 0
        right(self, whole)
        for size in sizes:
            first = start + max(sizes) // stretch * stretch
            whole[first : start + size] = before[first : start + size]
            start += size


@mutant("J17", "ALIAS", "", seen_in="class ALIAS")
def keeps_what_lies_before_its_own(patch: Patches) -> None:
    """Of a sum to all ranks each keeps the elements one before its own."""

    @patch(GradUnit, "_end_reduce")
    def wrong(right, self):
        if self.sums_whole:
            self.grads.copy_(self.grads.clone().roll(1))
        right(self)


@mutant("J19", "DTYPE", "GA", seen_in="class DTYPE")
def copied_in_the_dtype_of_params(patch: Patches) -> None:
    """Gradients that were accumulated in fp32 are rounded to their param's dtype on their way."""

    @patch(GradUnit, "_take")
    def wrong(right, self, each):
        right(self, each)
        place = self.grads[each.span.start : each.span.stop]
        if each.memory.param.dtype.itemsize > 1:
            place.copy_(place.to(each.memory.param.dtype))


@mutant("J20", "VOLUME", "PG", seen_in="class VOLUME", kill="volume")
def groups_share_a_buffer(patch: Patches) -> None:
    """That each param group is to have buffers of its own is not heard of."""

    @patch(BufferedModule, "_plan")
    def wrong(right, self):
        self._buffer_of = None
        return right(self)
