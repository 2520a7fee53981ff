"""Overlap of communication with computation: closed forms against the log and the hook trace.

A reduction that is issued late and a gather that is waited for early have the right numbers, the
right calls and the wrong cost. When each has to be on its way follows from when gradients arrive
and modules begin, which the harness sees (`zero_sim.cost.hook_trace`), and from which params lie
together in a bucket, which follows from their sizes (`zero_sim.cost.forms`).

[Note: what is owed]
Ranks meet by the order in which each issues, and gradients do not arrive alike on all. So buckets
are reduced in one order, that in which backward is expected to complete them: the one whose first
param is registered last comes first. A bucket is due once all its gradients are there and all
buckets before it are due; one with a param that takes no part in this backward is never due before
the end, nor are those behind it. What is due has to be issued by the next gradient, and not waited
for before the last one. Sums over copies of the shards, which come behind, are all issued before
the first of them is waited for. Gathers are all issued when the optimizer's step comes back, and
waited for when a module begins that reads of the bucket, not before.

Where gradients are sharded (stages 2 and 3) whole ones leave as backward goes: a reduction may be
waited for once the next one is due, and of stage 3, whose reductions wait for modules rather than
for gradients, that is all that is held to; its gathers are, by what they are in number. There a sum
at the first rank ends before the next gather, as the call that sends it back is made in one group
with that.
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

_GATHERS = ("all_gather", "all_to_all", "broadcast")
_COUNTS = "int64"
"""In what ranks tell each other what they count before anything is divided, and wait for that."""
_NAMES_SHOWN = 3


@dataclass(slots=True)
class _Timed:
    """A call of a rank, and when it was made: both indices into `EventLog.moments`."""

    call: Call
    issued: int
    waited: float = math.inf
    """When the rank began to wait for it, or learnt that it was done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sum:
    """What is reduced together: a bucket, or what a reduce buffer takes."""

    names: Sequence[str]
    """Of its params that have elements."""
    calls: Sequence[Call]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """What is known of one rank."""

    world_rank: int
    hook_trace: HookTrace
    calls: Sequence[_Timed]
    """In its program's order."""
    forms: Sequence[BucketForm]
    """Buckets, by the first registered param of each."""
    sums: Sequence[_Sum]
    """What backward reduces, in the order in which it is expected to be complete."""
    scenario: Scenario
    issues: Sequence[int]
    """When any rank issued each call of the log."""

    def issued_in(self, start: int, stop: int) -> Sequence[_Timed]:
        """The calls of a half-open stretch of time."""
        issued = attrgetter("issued")
        first = bisect_left(self.calls, start, key=issued)
        return self.calls[first : bisect_left(self.calls, stop, key=issued)]

    def finding(
        self, message: str, *, step: int, phase: Phase, param: str | None, span: tuple[int, int]
    ) -> Finding:
        """A finding in a half-open stretch of time."""
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
    """Check every reduction and gather of one dp-cp group; see [Note: what is owed].

    Args:
        log: Of the world.
        hook_traces: What each rank of the group did between its calls, by rank.
        world_ranks: Its ranks, as findings name them.
        sizes: What each of them trains, by rank.
        scenario: The case as that group sees it.

    Returns:
        The first finding, if there is any: one of the earliest step.
    """
    if not hook_traces:
        return  # The log of a case that overlaps nothing need not be walked through.
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
        found.extend(islice(chain(_check_sums(rank), _check_gathers(rank)), 1))
    yield from sorted(found, key=lambda finding: finding.step or 0)[:1]


def _sums_of(forms: Sequence[BucketForm], grads: Sequence[GradForm]) -> list[_Sum]:
    if grads:
        return [_Sum(names=form.names, calls=form.sum_calls) for form in grads]
    return [_Sum(names=form.names_with_elems, calls=[form.sum_call]) for form in reversed(forms)]


def _calls_of_ranks(log: EventLog, *, within: frozenset[int]) -> dict[int, list[_Timed]]:
    """All calls in groups of these ranks; what parts of a model tell each other is left out.

    So are counts, of which one can have as many elements as a sum of gradients.
    """
    timed: dict[int, dict[int, _Timed]] = {}
    for time, moment in enumerate(log.moments):
        calls = timed.setdefault(moment.rank, {})
        if moment.what == "issue":
            record = log.collectives[moment.record]
            if record.dtype == _COUNTS:
                continue
            made = (record.kind, len(record.group_ranks), record.elems)
            calls[moment.record] = _Timed(call=made, issued=time)
        elif moment.what in ("wait", "land") and moment.record in calls:
            calls[moment.record].waited = min(calls[moment.record].waited, time)
    return {
        rank: [
            call
            for index, call in calls.items()
            if within.issuperset(log.collectives[index].group_ranks)
        ]
        for rank, calls in timed.items()
    }


def _check_sums(rank: _Rank) -> Iterator[Finding]:
    """Every backward that reduces."""
    if not overlaps_grads(rank.scenario.system):
        return
    run, sync = rank.scenario.run, rank.scenario.system.sync
    stage = rank.scenario.system.stage
    for (step, micro), arrivals in rank.hook_trace.arrivals.items():
        if not (sync == "every" or micro == run.micro_batches - 1):
            continue
        if stage < 3:
            yield from _check_issued(rank, step=step, micro=micro, arrivals=arrivals)
        if rank.scenario.system.reduce_buffer_elems is not None:
            yield from _check_one_ahead(rank, step=step, micro=micro, stop=arrivals[-1].time)
        elif stage < 2:
            yield from _check_waits(rank, step=step, micro=micro, stop=arrivals[-1].time)
            yield from _check_copies(rank, step=step, micro=micro, start=arrivals[-1].time)
        elif rank.scenario.system.redundancy == 1 and not _is_ended_by_gathers(rank.scenario):
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
            break
        following = arrivals[when + 1]
        for call in due.calls:
            times = issued.get(call, [])
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
    """Nothing that backward reduces is waited for before its last gradient."""
    start = rank.hook_trace.starts[step, micro]
    made = rank.issued_in(start, stop)
    early = Counter(call.call for call in made if call.waited < stop)
    early &= Counter(form.sum_call for form in rank.forms)
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
    """No reduction is waited for before the next one is to be issued, or the last gradient came."""
    start = rank.hook_trace.starts[step, micro]
    sums = {call for each in rank.sums for call in each.calls}
    made = [call for call in rank.issued_in(start, stop) if call.call in sums]
    arrived = rank.hook_trace.arrivals[step, micro]
    for call, following in pairwise(made):
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


def _check_copies(rank: _Rank, *, step: int, micro: int, start: int) -> Iterator[Finding]:
    """The sums over copies of the shards, which follow the last gradient."""
    left = Counter(form.copies_call for form in rank.forms if form.copies_call is not None)
    stop = rank.hook_trace.starts.get((step, micro + 1), rank.hook_trace.ends[step])
    # Sums inside the blocks may look the same; those that are left come before all over copies.
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
    waited = sum(call.waited < copies[-1].issued for call in copies)
    if waited:
        yield rank.finding(
            f"{waited} of {len(copies)} sums over copies of the shards were waited for before the "
            f"last of them was issued, in micro-batch {micro}",
            step=step,
            phase=Phase.REDUCE,
            param=None,
            span=(rank.hook_trace.starts[step, micro], stop),
        )


def _due(rank: _Rank, *, step: int, arrivals: Sequence[HookEvent]) -> Iterator[tuple[int, _Sum]]:
    """What is due to be reduced within a backward, and with which arrival it became so."""
    frozen = frozen_at(rank.scenario.model, step=step)
    when = {name: index for index, event in enumerate(arrivals) for name in event.names}
    due = -1
    for each in rank.sums:
        for name in each.names:
            if name in frozen:
                continue
            if name not in when:
                return
            due = max(due, when[name])
        yield due, each


def _check_gathers(rank: _Rank) -> Iterator[Finding]:
    """Every step's gathers, up to the first forward of the next."""
    if not overlaps_params(rank.scenario.system):
        return
    hook_trace, after = rank.hook_trace, rank.scenario.reload
    for step, end in hook_trace.ends.items():
        if after is not None and after.async_steps and step + 1 == after.step:
            continue  # Gathers are waited for before a checkpoint is begun.
        begun = rank.issued_in(hook_trace.starts[step, 0], end)
        gathers = [call for call in begun if call.call[0] in _GATHERS]
        # Sums that were sent back are broadcasts as well, and long over.
        sums = rank.scenario.run.micro_batches if rank.scenario.system.sync == "every" else 1
        # So are the gathers of what an optimizer needs of whole params.
        cut = [form for form in rank.forms if form.is_cut]
        wholes = WHOLES.get(rank.scenario.optimizer.name, 0)
        others = wholes * len(cut)
        others += sums * sum(form.sent_back_call is not None for form in rank.forms)
        read = set(hook_trace.unguarded)
        for event in (HookEvent(names=frozenset(), time=end), *hook_trace.begins.get(step + 1, ())):
            waited = sum(call.waited < event.time for call in gathers) - others
            needed = sum(not read.isdisjoint(form.names_with_elems) for form in rank.forms)
            if waited > needed:
                where = f"the forward that reads {_some(sorted(event.names))} began"
                yield rank.finding(
                    f"{waited} of {len(gathers) - others} gathers were waited for before "
                    f"{where if event.names else 'the step of the optimizer came back'}, where "
                    f"modules that began before it needed {needed}",
                    step=step,
                    phase=Phase.GATHER,
                    param=None,
                    span=(hook_trace.starts[step, 0], event.time),
                )
                return
            read |= event.names


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
