"""Costs in parts: what a target declares of its calls, their bytes and what is in flight."""

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
class Called:
    """What one dp-cp group called in the steps of a world."""

    log: EventLog
    windows: Sequence[StepWindow]
    """Where its steps lie."""
    sizes: Mapping[int, Sequence[ParamSize]]
    """What each of its ranks trains, by rank."""
    scenario: Scenario
    """The case as that group sees it."""

    def case(self, rank: int, *, skipped: bool = False) -> CostCase:
        """What a closed form of a target's own is given."""
        elems = {size.name: size.elems for size in self.sizes[rank]}
        return CostCase(scenario=self.scenario, rank=rank, elems=elems, skipped=skipped)


def check_bytes(called: Called, form: ByName | None) -> Iterator[Finding]:
    """Check the bytes that ranks contribute in a step, by dtype.

    Args:
        called: What was called.
        form: The target's own; None for the textbook's.
    """
    forms: dict[tuple[int, bool], Mapping[str, int]] = {}
    for window in called.windows:
        if form is None and leaves_gathers(called.scenario, step=window.step):
            continue
        sizes = called.sizes[window.rank]
        key = (window.rank, window.skipped)
        if key not in forms:
            forms[key] = _owed_bytes(called, form, rank=window.rank, skipped=window.skipped)
        owed = forms[key]
        made, control = Counter[str](), Counter[str]()
        most = control_elems(sizes)
        for record in window.records(called.log.collectives):
            sent_bytes = record.bytes
            made[record.dtype] += sent_bytes
            if max(record.elems, record.output_elems) <= most:
                control[record.dtype] += sent_bytes
        wrong = [
            f"{made[dtype]} of {dtype} in place of {owed.get(dtype, 0)}"
            for dtype in sorted(made.keys() | owed.keys())
            if not 0 <= made[dtype] - owed.get(dtype, 0) <= control[dtype]
        ]
        if wrong:
            yield finding_of(
                window,
                "the bytes of this rank's calls of the step are not those of the closed form: "
                + ", ".join(wrong),
            )
            return


def _owed_bytes(
    called: Called, form: ByName | None, *, rank: int, skipped: bool
) -> Mapping[str, int]:
    if form is not None:
        return form_of(form, called.case(rank, skipped=skipped), name="volume", kind=Mapping)
    owed = Counter[str]()
    planned = planned_calls(
        called.sizes[rank], scenario=called.scenario, rank=rank, skipped=skipped
    )
    for call, count in planned.items():
        if not call.is_control:
            owed[call.dtype] += call.bytes * count
    return owed


def check_told_calls(
    called: Called,
    places: Mapping[int, Sequence[Place]],
    *,
    has_bucket_elems: bool,
    costs: Costs,
) -> Iterator[Finding]:
    """Check that what is reduced are the buckets that parts tell, each once for each sum.

    Args:
        called: What was called.
        places: What each rank of the group tells, by rank.
        has_bucket_elems: Whether the target follows `system.bucket_elems`.
        costs: Declared by the target.
    """
    rounds = rounds_of_sums(called.scenario)
    members = frozenset(window.world_rank for window in called.windows)
    told = {
        rank: told_calls(places, held=[size.name for size in sizes])
        for rank, sizes in called.sizes.items()
    }
    for window in called.windows:
        control = control_elems(called.sizes[window.rank])
        messages = messages_of(window, called.log.collectives, control=control)
        # Parts of one model add what split layers give.
        reduced = [each for each in messages.reduced if members.issuperset(each.group_ranks)]
        wanted = Counter(
            {call: count * rounds for call, count in told[window.rank].items() if call[1] > control}
        )
        made = Counter(_kind_of(record) for record in reduced)
        made -= _over_copies(reduced, wanted, copies=called.scenario.system.redundancy)
        if made != wanted:
            yield finding_of(
                window,
                "what this rank reduces in the step are not the buckets that the parts tell: "
                + difference(made, wanted, in_words=_in_words),
            )
            return
    has_elems = has_bucket_elems and called.scenario.system.bucket_elems is not None
    if has_elems and called.windows:
        rank = called.windows[0].rank
        buckets = _told_buckets(places, held=[size.name for size in called.sizes[rank]])
        yield from _check_sizes(called, buckets, are_most=costs.calls == "told-buckets-at-most")
    yield from _check_gathers(called, places, most=costs.gathers)


@dataclass(slots=True)
class _Told:
    """A call that reduces a bucket that parts report."""

    kind: str
    elems: int
    """Of the call, padding included."""
    parts: dict[tuple[str, int], int] = field(default_factory=dict)
    """Elements of each part, by param and start."""


def told_calls(
    places: Mapping[int, Sequence[Place]], *, held: Collection[str]
) -> Counter[tuple[str, int]]:
    """Kind and elements of the calls that reduce each told bucket once; empty where none is told.

    A rank takes part also where all of a bucket is others'.

    Args:
        places: What each rank tells, by rank.
        held: Names of the params that the calling rank trains; others' buckets are not its.
    """
    return Counter((each.kind, each.elems) for each in _told_buckets(places, held=held))


def _told_buckets(
    places: Mapping[int, Sequence[Place]], *, held: Collection[str]
) -> Collection[_Told]:
    """Return one for each call that reduces a bucket; arguments as for `told_calls`."""
    calls: dict[object, _Told] = {}
    for place in (place for told in places.values() for place in told):
        elems = place.call_elems if place.joined_elems is None else place.joined_elems
        if place.param not in held or not place.reduced_by or not elems:
            continue
        offset = place.call_offset if place.joined_offset is None else place.joined_offset
        where: object
        if place.flat_start is not None and offset is not None:
            where = place.flat_start - offset
        elif place.bucket is not None:
            # A call by `reduce` has one owner, so a bucket of several owners takes several.
            where = ("bucket", place.bucket, place.shard if place.reduced_by == "reduce" else None)
        else:
            continue
        key = (place.buffer, place.reduced_by, elems, where)
        told = calls.setdefault(key, _Told(kind=place.reduced_by, elems=elems))
        told.parts[place.param, place.start] = place.stop - place.start
    return calls.values()


def _kind_of(record: CollectiveRecord) -> tuple[str, int]:
    return record.kind, record.elems


def _over_copies(
    reduced: Sequence[CollectiveRecord], wanted: Counter[tuple[str, int]], *, copies: int
) -> Counter[tuple[str, int]]:
    """Sums over the copies of the shards, which nobody tells: at most one a bucket, of no more.

    Args:
        reduced: What a rank reduced in a step.
        wanted: The calls that reduce told buckets.
        copies: How many there are of each shard.
    """
    largest = max((elems for _, elems in wanted), default=0)
    left = Counter(_kind_of(record) for record in reduced) - wanted
    left &= Counter(_kind_of(record) for record in reduced if len(record.group_ranks) == copies)
    is_one_each = left.total() <= wanted.total()
    within = all(elems <= largest for _, elems in left)
    return left if copies > 1 and is_one_each and within else Counter()


def _check_sizes(called: Called, told: Collection[_Told], *, are_most: bool) -> Iterator[Finding]:
    """Check that told buckets are near their declared size.

    None reaches further beyond it than one param, and two neighbours are never less between them.
    If it is the most, none with several params is larger at all, padding left out.
    """
    window, asked = called.windows[0], called.scenario.system.bucket_elems
    assert asked is not None
    sizes = called.sizes[window.rank]
    longest = max((size.elems for size in sizes), default=0)
    payload = sum(size.elems for size in sizes)
    # One more for each dtype, and kind of params, that share no bucket.
    most = 2 * payload // asked + len({(size.dtype, size.kind) for size in sizes})
    if len(told) > most:
        yield finding_of(
            window,
            f"parts tell {len(told)} buckets of {payload} elements, expected at most {most} "
            f"with bucket_elems = {asked}",
        )
    for each in told if are_most else ():
        whole = sum(each.parts.values())
        if whole > asked and len({name for name, _ in each.parts}) > 1:
            yield finding_of(
                window,
                f"parts tell a bucket of {whole} elements, padding left out, expected at most "
                f"bucket_elems = {asked} in a bucket of several params",
            )
            return
    largest = max((each.elems for each in told), default=0)
    align = called.scenario.system.align_elems * called.scenario.world.size
    if payload > largest > asked + longest + max(align, 128 * called.scenario.world.size):
        yield finding_of(
            window,
            f"parts tell a bucket of {largest} elements, expected at most {asked} by bucket_elems "
            f"and a param of {longest}",
        )


def _in_words(call: tuple[str, int]) -> str:
    kind, elems = call
    return f"{kind} of {elems} elements"


def _check_gathers(
    called: Called, places: Mapping[int, Sequence[Place]], *, most: int | None
) -> Iterator[Finding]:
    """Check that what is gathered are the buckets that parts report, if they report any."""
    system, run = called.scenario.system, called.scenario.run
    if most is None:
        most = 1 if system.stage < 3 else 2 * run.micro_batches + 1
    members = frozenset(window.world_rank for window in called.windows)
    for window in called.windows:
        sizes = called.sizes[window.rank]
        held, control = {size.name for size in sizes}, control_elems(sizes)
        buckets = {
            # A call by `broadcast` has one owner.
            (kind, place.buffer, place.bucket, place.bucket_start, place.bucket_stop)
            + ((place.shard,) if kind == "broadcast" else ())
            for told in places.values()
            for place in told
            if place.param in held and (kind := place.gathered_by)
        }
        ends = ((kind, start, stop) for kind, _, _, start, stop, *_ in buckets)
        told = Counter((str(kind), (stop or 0) - (start or 0)) for kind, start, stop in ends)
        told = Counter({call: count for call, count in told.items() if call[1] > control})
        if not told:
            return
        gathered = messages_of(window, called.log.collectives, control=control).gathered
        made = Counter(
            (record.kind, record.output_elems)
            for record in gathered
            if members.issuperset(record.group_ranks)
        )
        least = Counter[tuple[str, int]]() if window.skipped else told
        if not least <= made or not made <= Counter({k: n * most for k, n in told.items()}):
            times = "once" if most == 1 else f"1 to {most} times"
            yield finding_of(
                window,
                "what this rank gathers in the step are not the buckets that the parts tell, each "
                f"{times}: {difference(made, told, in_words=_in_words)}",
            )
            return


def check_control(called: Called, most: int) -> Iterator[Finding]:
    """Check how many control messages a rank sends in a step.

    Args:
        called: What was called.
        most: The most that may be.
    """
    for window in called.windows:
        control = control_elems(called.sizes[window.rank])
        records = window.records(called.log.collectives)
        made = [each for each in records if max(each.elems, each.output_elems) <= control]
        if len(made) > most:
            yield finding_of(
                window,
                f"this rank calls {len(made)} control messages in the step, expected at most "
                f"{most}; the last one is {made[-1].text}",
            )
            return


def check_overlapping(called: Called, least: AtMost) -> Iterator[Finding]:
    """Check that enough calls are issued and not waited for at some moment of each step.

    Args:
        called: What was called.
        least: The target's own form of how many at least.
    """
    records = called.log.collectives
    for window in called.windows:
        case = called.case(window.rank, skipped=window.skipped)
        owed = form_of(least, case, name="calls_in_flight", kind=int)
        peak, in_flight = 0, set[int]()
        for moment in called.log.moments:
            if moment.rank != window.world_rank or not window.start <= moment.record < window.stop:
                continue
            # A call that waits for its own end overlaps nothing.
            if moment.what == "issue" and records[moment.record].asynchronous:
                in_flight.add(moment.record)
            elif moment.what in ("wait", "land"):
                in_flight.discard(moment.record)
            peak = max(peak, len(in_flight))
        if peak < owed:
            yield finding_of(
                window,
                f"this rank has at most {peak} calls in flight at a time in the step, expected "
                f"{owed} or more by its closed form",
                check=Check.INVARIANT_OVERLAP,
            )
            return


def check_in_flight(called: Called, most: AtMost) -> Iterator[Finding]:
    """Check how many bytes a rank has issued and not waited for, at any moment of a step.

    Args:
        called: What was called.
        most: The target's own form of the most that may be.
    """
    records = called.log.collectives
    for window in called.windows:
        case = called.case(window.rank, skipped=window.skipped)
        allowed = form_of(most, case, name="in_flight", kind=int)
        in_flight: dict[int, int] = {}
        for moment in called.log.moments:
            if moment.rank != window.world_rank or not window.start <= moment.record < window.stop:
                continue
            if moment.what == "issue":
                in_flight[moment.record] = records[moment.record].bytes
            elif moment.what == "land":
                in_flight.pop(moment.record, None)
            if sum(in_flight.values()) > allowed:
                yield finding_of(
                    window,
                    f"this rank has {sum(in_flight.values())} bytes in flight when it issues "
                    f"{records[moment.record].text}, expected at most {allowed} by its closed form",
                    check=Check.INVARIANT_OVERLAP,
                )
                return
