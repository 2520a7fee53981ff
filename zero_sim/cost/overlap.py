"""Overlap of communication and computation: closed forms against event log and hook trace.

If a reduction is issued late, or a gather is waited for early, calls and numbers are right, but the
cost is wrong. Due times follow from gradient arrivals and module starts, which the harness
observes (`zero_sim.cost.hook_trace`), and from the params in each bucket (`zero_sim.cost.forms`).

[Note: due times]
Ranks match collectives by issue order, but gradients may arrive in different orders on different
ranks. So buckets are reduced in a fixed order, in which backward should complete them: the bucket
whose first param is registered last comes first.

Reductions:
    due      when all its gradients have arrived and all buckets before it are due. If a param takes
             no part in this backward, its bucket and all later buckets are due at the end.
    issued   at the latest when the next gradient arrives.
    waited   at the earliest when the last gradient has arrived.

Sums over replicas follow the last gradient. All are issued before the first is waited for.

All gathers are issued when the optimizer's step returns. A gather is waited for when a module that
reads the bucket starts, not earlier.

Stages 2 and 3 drop unsharded gradients during backward, so a reduction may be waited for when the
next reduction is due. At stage 3, reductions wait for modules instead of gradients, so only this
rule is checked, and only the number of gathers. With `first-rank` sums at stage 3, a
reduction ends before the next gather, because the broadcast of the sum uses the same group.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from operator import attrgetter

from zero_sim.cost.calls import WHOLES
from zero_sim.cost.forms import BucketForm, Call, ParamSize, by_registration, in_words
from zero_sim.cost.grad_forms import GradForm, grad_forms
from zero_sim.cost.hook_trace import HookEvent, HookTrace
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.derived import overlaps_grads, overlaps_params
from zero_sim.scenario.names import frozen_at
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import EventLog

# An all-to-all gathers uneven shards; a broadcast gathers a bucket with a single owner.
_GATHERS = ("all_gather", "all_to_all", "broadcast")
_COUNTS = "int64"
"""Dtype of exchanged counts. Ranks wait for this exchange at once, because they need the divisor.
"""
_NAMES_SHOWN = 3


@dataclass(slots=True)
class _Timed:
    """A rank's call, with times as indices into `EventLog.moments`."""

    call: Call
    issued: int
    waited: float = math.inf
    """Start of the rank's wait, or of an earlier test for completion that succeeded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sum:
    """Gradients that are reduced together: a bucket or a grad unit."""

    names: Sequence[str]
    """Non-empty params."""
    calls: Sequence[Call]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """A rank's observations, and closed forms to compare them with."""

    world_rank: int
    hook_trace: HookTrace
    calls: Sequence[_Timed]
    """In program order."""
    forms: Sequence[BucketForm]
    """Buckets, in order of their first registered param."""
    sums: Sequence[_Sum]
    """Reductions during a backward, in expected order of completion."""
    scenario: Scenario
    issues: Sequence[int]
    """Issue times of all calls in the log, on any rank."""

    def issued_in(self, start: int, stop: int) -> Sequence[_Timed]:
        """Return the calls issued in a half-open time interval."""
        issued = attrgetter("issued")
        first = bisect_left(self.calls, start, key=issued)
        return self.calls[first : bisect_left(self.calls, stop, key=issued)]

    def finding(
        self, message: str, *, step: int, phase: Phase, param: str | None, span: tuple[int, int]
    ) -> Finding:
        """Build a finding for a half-open time interval."""
        start, stop = (bisect_left(self.issues, time) for time in span)
        return Finding(
            check=Check.INVARIANT_OVERLAP,
            message=message,
            step=step,
            phase=phase,
            rank=self.world_rank,
            param=param,
            call_start=start,
            call_stop=stop,
        )


def check_overlap(
    log: EventLog,
    hook_traces: Mapping[int, HookTrace],
    *,
    world_ranks: Sequence[int],
    sizes: Mapping[int, Sequence[ParamSize]],
    scenario: Scenario,
) -> Iterator[Finding]:
    """Check a dp-cp group's reductions and gathers; see [Note: due times].

    Args:
        log: The world's event log.
        hook_traces: Hook traces by group rank; empty if the case overlaps nothing.
        world_ranks: World ranks by group rank.
        sizes: Trained params by group rank.
        scenario: The dp-cp group's case.

    Returns:
        At most one finding, from the earliest step.
    """
    if not hook_traces:
        return  # Nothing overlaps, so do not walk the log.
    found: list[Finding] = []
    issues = [time for time, moment in enumerate(log.moments) if moment.what == "issue"]
    calls = _calls_of_ranks(log, within=frozenset(world_ranks))
    for index, hook_trace in hook_traces.items():
        forms = by_registration(sizes[index], scenario=scenario, rank=index)
        rank = _Rank(
            world_rank=world_ranks[index],
            hook_trace=hook_trace,
            calls=calls.get(world_ranks[index], ()),
            forms=forms,
            sums=_sums_of(forms, grad_forms(sizes[index], scenario=scenario, rank=index)),
            scenario=scenario,
            issues=issues,
        )
        # Take each rank's first finding, then the earliest step over ranks.
        found.extend(islice(chain(_check_sums(rank), _check_gathers(rank)), 1))
    yield from sorted(found, key=lambda finding: finding.step or 0)[:1]


def _sums_of(forms: Sequence[BucketForm], grads: Sequence[GradForm]) -> list[_Sum]:
    # Grad units have their own order; backward completes buckets in reverse registration order.
    if grads:
        return [_Sum(names=form.names, calls=form.sum_calls) for form in grads]
    return [_Sum(names=form.names_with_elems, calls=[form.sum_call]) for form in reversed(forms)]


def _calls_of_ranks(log: EventLog, *, within: frozenset[int]) -> dict[int, list[_Timed]]:
    """Return each rank's calls within the group, in program order."""
    timed: dict[int, dict[int, _Timed]] = {}
    for time, moment in enumerate(log.moments):
        calls = timed.setdefault(moment.rank, {})
        if moment.what == "issue":
            record = log.collectives[moment.record]
            # Omit exchanged counts, which may be as long as a gradient sum.
            if record.dtype == _COUNTS:
                continue
            made = (record.kind, len(record.group_ranks), record.elems)
            calls[moment.record] = _Timed(call=made, issued=time)
        elif moment.what in ("wait", "land") and moment.record in calls:
            # Take the earlier moment, because a test for completion may land without a wait.
            calls[moment.record].waited = min(calls[moment.record].waited, time)
    # Calls between dp-cp groups do not belong to this group's closed form.
    return {
        rank: [
            call
            for index, call in calls.items()
            if within.issuperset(log.collectives[index].group_ranks)
        ]
        for rank, calls in timed.items()
    }


def _check_sums(rank: _Rank) -> Iterator[Finding]:
    if not overlaps_grads(rank.scenario.system):
        return
    run, sync = rank.scenario.run, rank.scenario.system.sync
    stage = rank.scenario.system.stage
    for (step, micro), arrivals in rank.hook_trace.arrivals.items():
        if not (sync == "every" or micro == run.micro_batches - 1):
            # Other micro-batches only accumulate.
            continue
        if stage < 3:
            # At stage 3, reductions wait for modules, so the arrival rule does not apply.
            yield from _check_issued(rank, step=step, micro=micro, arrivals=arrivals)
        if rank.scenario.system.reduce_buffer_elems is not None:
            # Buffers are reused, so a reduction may be waited for when the next is due.
            yield from _check_one_ahead(rank, step=step, micro=micro, stop=arrivals[-1].time)
        elif stage < 2:
            # Unsharded gradients stay, so no reduction needs to end before the last gradient.
            yield from _check_waits(rank, step=step, micro=micro, stop=arrivals[-1].time)
            yield from _check_replicas(rank, step=step, micro=micro, start=arrivals[-1].time)
        elif rank.scenario.system.redundancy == 1 and not _is_ended_by_gathers(rank.scenario):
            # Unsharded gradients are dropped, so again a reduction may be waited for when the next
            # is due. Not with replicas, whose sum must wait for the sum in the shard group.
            yield from _check_one_ahead(rank, step=step, micro=micro, stop=arrivals[-1].time)


def _is_ended_by_gathers(scenario: Scenario) -> bool:
    return scenario.system.stage == 3 and scenario.system.sum_by == "first-rank"


def _check_issued(
    rank: _Rank, *, step: int, micro: int, arrivals: Sequence[HookEvent]
) -> Iterator[Finding]:
    start, stop = rank.hook_trace.starts[step, micro], arrivals[-1].time
    made = rank.issued_in(start, stop)
    issued: dict[Call, list[int]] = {}
    for call in made:
        issued.setdefault(call.call, []).append(call.issued)
    for when, due in _due(rank, step=step, arrivals=arrivals):
        if when + 1 == len(arrivals):
            # After the last gradient, no reduction can be too late.
            break
        following = arrivals[when + 1]
        for call in due.calls:
            times = issued.get(call, [])
            # Match equal calls in order of issue.
            if times and times.pop(0) < following.time:
                continue
            yield rank.finding(
                f"{in_words(call)}, which reduces the bucket of {_some(due.names)}, was due in "
                f"micro-batch {micro}, but not issued before the next gradient arrived, that of "
                f"{_some(sorted(following.names))}",
                step=step,
                phase=Phase.BACKWARD,
                param=due.names[0],
                span=(start, following.time),
            )
            return


def _check_waits(rank: _Rank, *, step: int, micro: int, stop: int) -> Iterator[Finding]:
    """Check that no reduction is waited for before the last gradient."""
    start = rank.hook_trace.starts[step, micro]
    made = rank.issued_in(start, stop)
    early = Counter(call.call for call in made if call.waited < stop)
    early &= Counter(form.sum_call for form in rank.forms)
    # Only reductions, because other calls, such as the previous step's gathers, may be waited for.
    for call in early:
        yield rank.finding(
            f"{early.total()} reductions were waited for before the last gradient of micro-batch "
            f"{micro} arrived, the first of {in_words(call)}",
            step=step,
            phase=Phase.BACKWARD,
            param=None,
            span=(start, stop),
        )
        return


def _check_one_ahead(rank: _Rank, *, step: int, micro: int, stop: int) -> Iterator[Finding]:
    """Check that each reduction stays in flight until the next is issued or backward ends."""
    start = rank.hook_trace.starts[step, micro]
    sums = {call for each in rank.sums for call in each.calls}
    made = [call for call in rank.issued_in(start, stop) if call.call in sums]
    arrived = rank.hook_trace.arrivals[step, micro]
    for call, following in pairwise(made):
        # A wait directly before the next issue is allowed, because it frees the buffer. If a
        # gradient arrived between the two, the wait was too early.
        if any(call.waited < event.time < following.issued for event in arrived):
            yield rank.finding(
                f"{in_words(call.call)} was waited for before a gradient of micro-batch {micro} "
                f"arrived that came before the next reduction",
                step=step,
                phase=Phase.BACKWARD,
                param=None,
                span=(start, following.issued),
            )
            return


def _check_replicas(rank: _Rank, *, step: int, micro: int, start: int) -> Iterator[Finding]:
    """Check that sums over replicas, after the last gradient, overlap each other."""
    left = Counter(form.replica_call for form in rank.forms if form.replica_call is not None)
    stop = rank.hook_trace.starts.get((step, micro + 1), rank.hook_trace.ends[step])
    # Remaining reductions in shard groups, which may look the same, precede sums over replicas.
    inside = Counter(form.sum_call for form in rank.forms)
    begun = rank.hook_trace.starts[step, micro]
    inside -= Counter(call.call for call in rank.issued_in(begun, start))
    copies: list[_Timed] = []
    for call in rank.issued_in(start, stop):
        if inside[call.call]:
            inside[call.call] -= 1
        elif left[call.call]:
            left[call.call] -= 1
            copies.append(call)
    # Without copies, the sum has no term and does not read `copies[-1]`.
    waited = sum(call.waited < copies[-1].issued for call in copies)
    if waited:
        yield rank.finding(
            f"{waited} of {len(copies)} sums over replicas of the shards were waited for before "
            f"the last of them was issued, in micro-batch {micro}",
            step=step,
            phase=Phase.REDUCE,
            param=None,
            span=(rank.hook_trace.starts[step, micro], stop),
        )


def _due(rank: _Rank, *, step: int, arrivals: Sequence[HookEvent]) -> Iterator[tuple[int, _Sum]]:
    """Yield the reductions that become due in a backward, with the index of the arrival."""
    frozen = frozen_at(rank.scenario.model, step=step)
    when = {name: index for index, event in enumerate(arrivals) for name in event.names}
    due = -1
    for each in rank.sums:
        for name in each.names:
            if name in frozen:
                # A frozen param gets no gradient, so the bucket does not wait for it.
                continue
            if name not in when:
                # Without this gradient, the bucket and all later buckets are due at the end.
                return
            due = max(due, when[name])
        # `due` never falls, because a bucket is never due before its predecessors.
        yield due, each


def _check_gathers(rank: _Rank) -> Iterator[Finding]:
    """Check each step's gathers, up to the first forward in the next step."""
    if not overlaps_params(rank.scenario.system):
        return
    hook_trace, after = rank.hook_trace, rank.scenario.reload
    for step, end in hook_trace.ends.items():
        if after is not None and after.async_steps and step + 1 == after.step:
            # An asynchronous save waits for all gathers before it starts.
            continue
        begun = rank.issued_in(hook_trace.starts[step, 0], end)
        gathers = [call for call in begun if call.call[0] in _GATHERS]
        # Other calls of these kinds are complete: broadcasts of sums by the first rank, and gathers
        # of whole tensors for optimizers such as Muon. Subtract them.
        sums = rank.scenario.run.micro_batches if rank.scenario.system.sync == "every" else 1
        cut = [form for form in rank.forms if form.is_cut]
        wholes = WHOLES.get(rank.scenario.optimizer.name, 0)
        others = wholes * len(cut)
        others += sums * sum(form.sent_back_call is not None for form in rank.forms)
        read = set(hook_trace.unguarded)
        # Params that no module guards count as read when the optimizer's step returns.
        for event in (HookEvent(names=frozenset(), time=end), *hook_trace.begins.get(step + 1, ())):
            waited = sum(call.waited < event.time for call in gathers) - others
            needed = sum(not read.isdisjoint(form.names_with_elems) for form in rank.forms)
            if waited > needed:
                where = f"the forward that reads {_some(sorted(event.names))} began"
                yield rank.finding(
                    f"{waited} of {len(gathers) - others} gathers were waited for before "
                    f"{where if event.names else 'the step of the optimizer returned'}, but the "
                    f"modules that began earlier needed only {needed}",
                    step=step,
                    phase=Phase.GATHER,
                    param=None,
                    span=(hook_trace.starts[step, 0], event.time),
                )
                return
            read |= event.names


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
