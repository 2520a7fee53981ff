"""Checks of costs that a target declares: calls, their bytes, and traffic in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zero_sim.cost.calls import planned_calls
from zero_sim.cost.forms import ParamSize
from zero_sim.cost.volume import (
    StepWindow,
    control_elems,
    difference,
    finding_of,
    leaves_gathers,
    messages_of,
    rounds_of_sums,
)
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.costs import CostCase, form_of
from zero_sim.targets.protocol import Place

if TYPE_CHECKING:
    from zero_sim.sim import CollectiveRecord, EventLog
    from zero_sim.targets.costs import AtMost, ByName, Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCalls:
    """Collectives of a dp-cp group in a world's steps."""

    log: EventLog
    windows: Sequence[StepWindow]
    """The group's steps, as intervals of the log."""
    sizes: Mapping[int, Sequence[ParamSize]]
    """Trained params by group rank."""
    scenario: Scenario
    """The dp-cp group's case."""

    def case(self, rank: int, *, skipped: bool = False) -> CostCase:
        """Return the argument for a target's own closed form."""
        elems = {size.name: size.elems for size in self.sizes[rank]}
        return CostCase(scenario=self.scenario, rank=rank, elems=elems, skipped=skipped)


def check_bytes(step_calls: StepCalls, form: ByName | None) -> Iterator[Finding]:
    """Check the bytes that ranks contribute in each step, by dtype.

    `form` is the target's closed form; None for textbook ZeRO.
    """
    forms: dict[tuple[int, bool], Mapping[str, int]] = {}
    for window in step_calls.windows:
        if form is None and leaves_gathers(step_calls.scenario, step=window.step):
            # The textbook form gathers all params, but skipped modules need no gathers.
            continue
        sizes = step_calls.sizes[window.rank]
        key = (window.rank, window.skipped)
        # The form depends only on rank and skipping, so compute it once.
        if key not in forms:
            forms[key] = _expected_bytes(step_calls, form, rank=window.rank, skipped=window.skipped)
        expected = forms[key]
        made, control = Counter[str](), Counter[str]()
        most = control_elems(sizes)
        for record in window.records(step_calls.log.collectives):
            sent_bytes = record.bytes
            made[record.dtype] += sent_bytes
            if max(record.elems, record.output_elems) <= most:
                control[record.dtype] += sent_bytes
        # A closed form has no control messages, and short data looks like them. So any excess up to
        # the bytes of short messages is allowed.
        wrong = [
            f"{made[dtype]} of {dtype} in place of {expected.get(dtype, 0)}"
            for dtype in sorted(made.keys() | expected.keys())
            if not 0 <= made[dtype] - expected.get(dtype, 0) <= control[dtype]
        ]
        if wrong:
            yield finding_of(
                window,
                "the bytes of this rank's calls in the step differ from the closed form: "
                + ", ".join(wrong),
            )
            return


def _expected_bytes(
    step_calls: StepCalls, form: ByName | None, *, rank: int, skipped: bool
) -> Mapping[str, int]:
    if form is not None:
        return form_of(form, step_calls.case(rank, skipped=skipped), name="volume", kind=Mapping)
    expected = Counter[str]()
    planned = planned_calls(
        step_calls.sizes[rank], scenario=step_calls.scenario, rank=rank, skipped=skipped
    )
    for call, count in planned.items():
        if not call.is_control:
            # The caller allows control messages, so a form without them is enough.
            expected[call.dtype] += call.bytes * count
    return expected


def check_reported_calls(
    step_calls: StepCalls,
    places: Mapping[int, Sequence[Place]],
    *,
    has_bucket_elems: bool,
    costs: Costs,
) -> Iterator[Finding]:
    """Check that ranks reduce and gather exactly the buckets that they report.

    Args:
        step_calls: The group's collectives.
        places: Reported places by group rank.
        has_bucket_elems: True if the target supports `system.bucket_elems`.
        costs: Costs that the target declares.
    """
    rounds = rounds_of_sums(step_calls.scenario)
    members = frozenset(window.world_rank for window in step_calls.windows)
    reported = {
        rank: reported_calls(places, held=[size.name for size in sizes])
        for rank, sizes in step_calls.sizes.items()
    }
    for window in step_calls.windows:
        control = control_elems(step_calls.sizes[window.rank])
        messages = messages_of(window, step_calls.log.collectives, control=control)
        # Omit calls between dp-cp groups, because split layers sum activations by the same calls.
        reduced = [each for each in messages.reduced if members.issuperset(each.group_ranks)]
        wanted = Counter(
            # Omit short calls on both sides, because they look like control messages.
            {
                call: count * rounds
                for call, count in reported[window.rank].items()
                if call[1] > control
            }
        )
        made = Counter(_kind_of(record) for record in reduced)
        # Engines do not report sums over replicas; accept at most one per bucket.
        made -= _over_replicas(reduced, wanted, replicas=step_calls.scenario.system.redundancy)
        if made != wanted:
            yield finding_of(
                window,
                "this rank's reductions in the step are not the buckets that its parts report: "
                + difference(made, wanted, in_words=_in_words),
            )
            return
    has_elems = has_bucket_elems and step_calls.scenario.system.bucket_elems is not None
    if has_elems and step_calls.windows:
        rank = step_calls.windows[0].rank
        buckets = _reported_buckets(places, held=[size.name for size in step_calls.sizes[rank]])
        yield from _check_sizes(
            step_calls, buckets, are_most=costs.calls == "reported-buckets-at-most"
        )
    yield from _check_gathers(step_calls, places, most=costs.gathers)


@dataclass(slots=True)
class _ReportedBucket:
    """A call that reduces a reported bucket."""

    kind: str
    elems: int
    """Elements in the call, padding included."""
    parts: dict[tuple[str, int], int] = field(default_factory=dict)
    """Elements in each place, by (param, start)."""


def reported_calls(
    places: Mapping[int, Sequence[Place]], *, held: Collection[str]
) -> Counter[tuple[str, int]]:
    """Count the calls that reduce each reported bucket once, by kind and elements.

    Args:
        places: Reported places by group rank. A rank takes part in buckets that others own.
        held: Names of the params that the calling rank trains. It takes no part in other buckets.

    Returns:
        The counts; empty if no bucket is reported.
    """
    return Counter((each.kind, each.elems) for each in _reported_buckets(places, held=held))


def _reported_buckets(
    places: Mapping[int, Sequence[Place]], *, held: Collection[str]
) -> Collection[_ReportedBucket]:
    """Return a record for each call that reduces a bucket; arguments as for `reported_calls`."""
    calls: dict[object, _ReportedBucket] = {}
    for place in (place for reported in places.values() for place in reported):
        # If a call joins several buckets, the joined length and offset identify it.
        elems = place.call_elems if place.joined_elems is None else place.joined_elems
        if place.param not in held or not place.reduced_by or not elems:
            continue
        offset = place.call_offset if place.joined_offset is None else place.joined_offset
        where: object
        if place.flat_start is not None and offset is not None:
            # The call's start in the flat buffer, which is equal for all places in the call.
            where = place.flat_start - offset
        elif place.bucket is not None:
            # `reduce` has a single root, so a bucket with several owners takes several calls.
            where = ("bucket", place.bucket, place.shard if place.reduced_by == "reduce" else None)
        else:
            continue
        key = (place.buffer, place.reduced_by, elems, where)
        reported = calls.setdefault(key, _ReportedBucket(kind=place.reduced_by, elems=elems))
        # By position, so that replicas count once.
        reported.parts[place.param, place.start] = place.stop - place.start
    return calls.values()


def _kind_of(record: CollectiveRecord) -> tuple[str, int]:
    return record.kind, record.elems


def _over_replicas(
    reduced: Sequence[CollectiveRecord], wanted: Counter[tuple[str, int]], *, replicas: int
) -> Counter[tuple[str, int]]:
    """Return the unreported calls that may be sums over replicas of the shards.

    Empty if they are more than the reported buckets, or if any is longer than all buckets.
    """
    largest = max((elems for _, elems in wanted), default=0)
    left = Counter(_kind_of(record) for record in reduced) - wanted
    # A sum over replicas joins one rank of each replica.
    left &= Counter(_kind_of(record) for record in reduced if len(record.group_ranks) == replicas)
    is_one_each = left.total() <= wanted.total()
    within = all(elems <= largest for _, elems in left)
    return left if replicas > 1 and is_one_each and within else Counter()


def _check_sizes(
    step_calls: StepCalls, reported: Collection[_ReportedBucket], *, are_most: bool
) -> Iterator[Finding]:
    """Check that reported buckets are near their requested size.

    A bucket exceeds `bucket_elems` by at most one param, and two neighbours together reach it. If
    `are_most`, no bucket with several params exceeds it, without padding.
    """
    window, limit_elems = step_calls.windows[0], step_calls.scenario.system.bucket_elems
    assert limit_elems is not None
    sizes = step_calls.sizes[window.rank]
    longest = max((size.elems for size in sizes), default=0)
    payload = sum(size.elems for size in sizes)
    # Two neighbours together reach `bucket_elems`. Dtypes and kinds share no bucket, so each may
    # have an additional small bucket.
    most = 2 * payload // limit_elems + len({(size.dtype, size.kind) for size in sizes})
    if len(reported) > most:
        yield finding_of(
            window,
            f"expected at most {most} buckets with bucket_elems = {limit_elems}, got "
            f"{len(reported)} for {payload} elements",
        )
    for each in reported if are_most else ():
        whole = sum(each.parts.values())
        if whole > limit_elems and len({name for name, _ in each.parts}) > 1:
            yield finding_of(
                window,
                f"expected at most bucket_elems = {limit_elems} in a bucket of several params, got "
                f"{whole} elements without padding",
            )
            return
    largest = max((each.elems for each in reported), default=0)
    align = step_calls.scenario.system.align_elems * step_calls.scenario.world.size
    # Known libraries pad by 128 elements per rank; see `zero_sim.targets.costs`.
    if payload > largest > limit_elems + longest + max(align, 128 * step_calls.scenario.world.size):
        yield finding_of(
            window,
            f"expected buckets of at most {limit_elems} elements by bucket_elems and one param of "
            f"{longest}, got {largest}",
        )


def _in_words(call: tuple[str, int]) -> str:
    kind, elems = call
    return f"{kind} of {elems} elements"


def _check_gathers(
    step_calls: StepCalls, places: Mapping[int, Sequence[Place]], *, most: int | None
) -> Iterator[Finding]:
    """Check that ranks gather exactly the buckets that they report, if any are reported."""
    system, run = step_calls.scenario.system, step_calls.scenario.run
    if most is None:
        # Stage 3: before forward and backward of each micro-batch, and after the update.
        most = 1 if system.stage < 3 else 2 * run.micro_batches + 1
    members = frozenset(window.world_rank for window in step_calls.windows)
    for window in step_calls.windows:
        sizes = step_calls.sizes[window.rank]
        held, control = {size.name for size in sizes}, control_elems(sizes)
        buckets = {
            # `broadcast` has a single root, so each owner's shard is a separate call.
            (kind, place.buffer, place.bucket, place.bucket_start, place.bucket_stop)
            + ((place.shard,) if kind == "broadcast" else ())
            for reported in places.values()
            for place in reported
            if place.param in held and (kind := place.gathered_by)
        }
        ends = ((kind, start, stop) for kind, _, _, start, stop, *_ in buckets)
        reported = Counter((str(kind), (stop or 0) - (start or 0)) for kind, start, stop in ends)
        reported = Counter({call: count for call, count in reported.items() if call[1] > control})
        if not reported:
            return
        gathered = messages_of(window, step_calls.log.collectives, control=control).gathered
        made = Counter(
            (record.kind, record.output_elems)
            for record in gathered
            if members.issuperset(record.group_ranks)
        )
        # A skipped step changes no params, so it may omit its gathers.
        least = Counter[tuple[str, int]]() if window.skipped else reported
        if not least <= made or not made <= Counter({k: n * most for k, n in reported.items()}):
            times = "once" if most == 1 else f"1 to {most} times"
            yield finding_of(
                window,
                "this rank's gathers in the step are not the buckets that its parts report, each "
                f"{times}: {difference(made, reported, in_words=_in_words)}",
            )
            return


def check_control(step_calls: StepCalls, most: int) -> Iterator[Finding]:
    """Check that a rank sends at most `most` control messages in each step."""
    for window in step_calls.windows:
        control = control_elems(step_calls.sizes[window.rank])
        records = window.records(step_calls.log.collectives)
        made = [each for each in records if max(each.elems, each.output_elems) <= control]
        if len(made) > most:
            yield finding_of(
                window,
                f"this rank sends {len(made)} control messages in the step, expected at most "
                f"{most}; the last one is {made[-1].text}",
            )
            return


def check_overlapping(step_calls: StepCalls, least: AtMost) -> Iterator[Finding]:
    """Check that in each step, enough calls are in flight at the same time.

    `least` is the target's closed form for the least peak.
    """
    records = step_calls.log.collectives
    for window in step_calls.windows:
        case = step_calls.case(window.rank, skipped=window.skipped)
        expected = form_of(least, case, name="calls_in_flight", kind=int)
        peak, in_flight = 0, set[int]()
        for moment in step_calls.log.moments:
            if moment.rank != window.world_rank or not window.start <= moment.record < window.stop:
                continue
            # A synchronous call overlaps nothing.
            if moment.what == "issue" and records[moment.record].asynchronous:
                in_flight.add(moment.record)
            elif moment.what in ("wait", "land"):
                in_flight.discard(moment.record)
            peak = max(peak, len(in_flight))
        if peak < expected:
            yield finding_of(
                window,
                f"this rank has at most {peak} calls in flight at once in the step, expected at "
                f"least {expected} by its closed form",
                check=Check.INVARIANT_OVERLAP,
            )
            return


def check_in_flight(step_calls: StepCalls, most: AtMost) -> Iterator[Finding]:
    """Check the bytes in flight throughout each step.

    `most` is the target's closed form for the most bytes allowed.
    """
    records = step_calls.log.collectives
    for window in step_calls.windows:
        case = step_calls.case(window.rank, skipped=window.skipped)
        allowed = form_of(most, case, name="in_flight", kind=int)
        in_flight: dict[int, int] = {}
        for moment in step_calls.log.moments:
            if moment.rank != window.world_rank or not window.start <= moment.record < window.stop:
                continue
            if moment.what == "issue":
                in_flight[moment.record] = records[moment.record].bytes
            elif moment.what == "land":
                # Bytes are in flight until the wait returns, because buffers cannot be reused
                # earlier.
                in_flight.pop(moment.record, None)
            if sum(in_flight.values()) > allowed:
                yield finding_of(
                    window,
                    f"this rank has {sum(in_flight.values())} bytes in flight when it issues "
                    f"{records[moment.record].text}, expected at most {allowed} by its closed form",
                    check=Check.INVARIANT_OVERLAP,
                )
                return
