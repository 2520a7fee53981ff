"""Swim lanes of ranks as SVG: waiting ranks in a deadlock, and the missing wait in a race."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from markupsafe import Markup

from zero_sim.report import pages
from zero_sim.report.html_calls import class_of
from zero_sim.report.timeline import CallSpan, read_timeline
from zero_sim.scenario.checks import Check
from zero_sim.sim.log import LATEST_CALLS

if TYPE_CHECKING:
    from zero_sim.findings.records import Finding
    from zero_sim.sim import EventLog

RANKS_MAX = 8
"""Lanes to draw. If there are more ranks, prefer absent ranks."""
_ABSENT_MAX = 4
_LANE, _BOX = 34, 24
"""Height of a lane, and of a box in it, in pixels."""
_PAST, _LATEST, _ARROWS = 24.0, 40.0, 12.0
"""Width of each earlier call, the latest call, and the arrows, in percent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Box:
    """A call or memory access in a lane; `x` and `width` in percent of the picture."""

    x: float
    width: float
    y: float
    label: str
    title: str
    class_: str
    height: int = _BOX


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrow:
    """An arrow from waiting ranks to the rank that they wait for."""

    x: float
    """Position of the vertical part, in percent."""
    tails: Sequence[float]
    """Height of each waiting rank's tail."""
    head: float


def draw_lanes(log: EventLog, finding: Finding) -> Markup | None:
    """Draw a deadlock or a data race.

    Args:
        log: Event log of the finding's world.
        finding: The finding.

    Returns:
        None for other findings, and if the log lacks the calls, as for a deadlock outside of
        collectives.
    """
    if finding.check in (Check.WORLD_DEADLOCK, Check.WORLD_STALLED_BY_PLAN):
        return _draw_deadlock(log)
    if finding.check == Check.WORLD_RACE:
        return _draw_race(log, finding)
    return None


def _draw_deadlock(log: EventLog) -> Markup | None:
    # Moments refer to calls by position in the log, so include all calls.
    timeline = read_timeline(log, with_harness=True)
    awaited = _awaited(log, timeline.calls)
    if not awaited:
        return None
    missing = {
        rank: sorted(set(chain.from_iterable(map(_missing, calls))))
        for rank, calls in awaited.items()
    }
    absent = sorted(set(chain.from_iterable(missing.values())))
    # First the ranks that do not wait themselves, because they are the cause.
    absent.sort(key=lambda rank: rank in awaited)
    others = [rank for rank in (*awaited, *range(timeline.world_size)) if rank not in absent]
    ranks = sorted(list(dict.fromkeys([*absent[:_ABSENT_MAX], *others]))[:RANKS_MAX])
    boxes = [
        box
        for lane, rank in enumerate(ranks)
        for box in _lane(
            lane,
            [c for c in timeline.calls if c.record.rank == rank and not c.of_harness],
            awaited=awaited.get(rank, [])[-1:],
            is_absent=rank in absent,
        )
    ]
    shown = [rank for rank in absent if rank in ranks]
    arrows = [
        _Arrow(
            x=100 - _ARROWS + _ARROWS * (index + 1) / (len(shown) + 1),
            tails=[ranks.index(r) * _LANE + 7 for r in ranks if rank in missing.get(r, ())],
            # Below the tail, because this rank may wait, too.
            head=ranks.index(rank) * _LANE + 17,
        )
        for index, rank in enumerate(shown)
    ]
    more = timeline.world_size - len(ranks)
    return _render(
        [f"rank {rank}" for rank in ranks],
        boxes,
        arrows,
        title="Who waits for whom",
        note=f"{more} more ranks are not drawn." if more else "",
    )


def _awaited(log: EventLog, calls: Sequence[CallSpan]) -> Mapping[int, Sequence[CallSpan]]:
    """Return the unfinished calls that each rank waits for, or its last if no wait is logged."""
    begun = {moment.record for moment in log.moments if moment.what == "wait"}
    unfinished: dict[int, list[tuple[bool, CallSpan]]] = {}
    for index, call in enumerate(calls):
        if not call.completed:
            unfinished.setdefault(call.record.rank, []).append((index in begun, call))
    return {
        rank: [call for is_awaited, call in own if is_awaited] or [own[-1][1]]
        for rank, own in sorted(unfinished.items())
    }


def _missing(call: CallSpan) -> set[int]:
    """Return the members that did not come to a call."""
    if call.record.kind in ("send", "recv"):
        return set() if call.peer is None else {call.peer}
    return set(call.record.group_ranks) - set(call.came)


def _lane(
    lane: int, calls: Sequence[CallSpan], *, awaited: Sequence[CallSpan], is_absent: bool
) -> Iterator[_Box]:
    """Yield boxes for a rank's last calls, ending with its awaited call or an empty box."""
    y, x = lane * _LANE, (LATEST_CALLS - 1) * _PAST
    past = [call for call in calls if call not in awaited][1 - LATEST_CALLS :]
    # From right to left, so that the latest calls of all ranks are aligned.
    for index, call in enumerate(reversed(past), start=1):
        yield _call_box(call, x=x - index * _PAST, width=_PAST, y=y)
    for call in awaited:
        yield _call_box(call, x=x, width=_LATEST, y=y)
    if not awaited:
        class_, title = "unowned" if is_absent else "part", "it made no further call"
        yield _Box(x=x, width=_LATEST, y=y, label="no more calls", title=title, class_=class_)


def _call_box(call: CallSpan, *, x: float, width: float, y: float) -> _Box:
    class_ = class_of(call.record.kind) + ("" if call.completed else " open")
    record = call.record
    label = record.text.partition(" of group ")[0]
    label += "" if record.group == "world" else f" of {record.group}"
    return _Box(x=x, width=width, y=y, label=label, title=record.text, class_=class_)


def _draw_race(log: EventLog, finding: Finding) -> Markup | None:
    # The finding refers to the call only in its message.
    calls = [call for call in read_timeline(log).calls if call.record.rank == finding.rank]
    found = [
        index
        for index, call in enumerate(calls)
        if f"{call.record.kind} #{call.record.sequence} of group {call.record.group}"
        in finding.message
    ]
    if not found:
        return None
    issued, later = calls[found[-1]], len(calls) - found[-1] - 1
    operation = finding.message.partition(": ")[2].partition(" at ")[0]
    calls_later = "1 call" if later == 1 else f"{later} calls"
    box = _call_box(issued, x=0, width=30, y=0)
    boxes = [
        replace(box, class_=class_of(issued.record.kind)),
        _Box(
            x=30, width=17, y=0, label=calls_later, title=f"{calls_later} after it", class_="part"
        ),
        _Box(x=47, width=23, y=0, label="no wait()", title="wait() is missing", class_="unowned"),
        _Box(x=70, width=30, y=0, label=operation, title=finding.message, class_="bad"),
        replace(box, width=100, y=_LANE, label="lent to the call, in flight"),
    ]
    return _render([f"rank {finding.rank}", "memory"], boxes, [], title="The race", note="")


def _render(
    rows: Sequence[str], boxes: Sequence[_Box], arrows: Sequence[_Arrow], *, title: str, note: str
) -> Markup:
    return pages.render(
        "lanes.html",
        rows=rows,
        boxes=boxes,
        arrows=arrows,
        edge=100 - _ARROWS,
        lane=_LANE,
        height=len(rows) * _LANE,
        title=title,
        note=note,
    )
