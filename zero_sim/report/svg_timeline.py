"""The timeline of a run as SVG, with ranks as rows and calls as spans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from zero_sim.report import pages
from zero_sim.report.html_calls import class_of, first_shown, legend
from zero_sim.report.timeline import CallSpan, read_timeline

if TYPE_CHECKING:
    from zero_sim.findings.records import Finding
    from zero_sim.sim import CollectiveRecord, EventLog

CALLS_MAX = 600
"""Calls to draw. If the log is longer, draw those around the finding."""
RANKS_MAX = 32

_LANES_MAX = 8
_WIDTH, _LEFT, _TOP, _LANE, _GAP = 1000, 60, 16, 10, 6
_CHAR_WIDTH = 6


def draw_timeline(
    log: EventLog, finding: Finding | None, *, suspects: Collection[int] = ()
) -> tuple[Markup, str]:
    """Draw all ranks' calls around a finding.

    Args:
        log: Log of the finding's world.
        finding: The finding, whose step is shaded; None to draw the first calls.
        suspects: Log indices of calls to mark, on all their ranks.

    Returns:
        The picture, and a description of its extent.
    """
    # Findings and suspects refer to calls by position in the log, so include all calls.
    timeline = read_timeline(log, with_harness=True)
    first, last = _window(len(timeline.calls), finding)
    calls = [
        call
        for index, call in enumerate(timeline.calls[first:last], start=first)
        if not call.of_harness or index in suspects
    ]
    # Harness calls are only drawn if suspect, so do not count them.
    total = len(timeline.calls) - sum(call.of_harness for call in timeline.calls)
    ranks = _ranks(timeline.world_size, finding)
    start = calls[0].issue_tick if calls else 0
    stop = max([start + 1, *(_end(call, timeline.stop_tick) for call in calls)])
    scale = (_WIDTH - _LEFT) / (stop - start)

    def x(tick: float) -> float:
        return _LEFT + (min(max(tick, start), stop) - start) * scale

    placed = [_placed(calls, rank, timeline.stop_tick) for rank in ranks]
    marked = {_key(timeline.calls[index].record) for index in suspects}
    lane_count = max((lane for row in placed for _, _, lane in row), default=0) + 1
    row_height = lane_count * _LANE + _GAP
    height = _TOP + len(ranks) * row_height
    rows = []
    for i, (rank, row) in enumerate(zip(ranks, placed, strict=True)):
        top = _TOP + i * row_height
        spans = [
            _span(call, x(call.issue_tick), x(end), top + lane * _LANE, marked=marked)
            for call, end, lane in row
        ]
        rows.append({"rank": rank, "middle": top + lane_count * _LANE // 2 + 4, "spans": spans})
    extent = f"{len(calls)} of {total} calls" if len(calls) < total else f"all {total} calls"
    if len(ranks) < timeline.world_size:
        extent += f", {len(ranks)} of {timeline.world_size} ranks"
    kinds = {call.record.kind for call in calls}
    marks = [("mark suspect", "suspect")] if marked else []
    if any(not call.completed for call in calls):
        marks.append(("open", "never completed"))
    if finding is not None and finding.call_start is not None:
        marks.append(("step", "the bad step"))
    picture = pages.render(
        "timeline.html",
        legend=legend(kinds, *marks),
        width=_WIDTH,
        height=height,
        left=_LEFT,
        step=_shade(timeline.calls, finding, x=x),
        rows=rows,
    )
    return picture, extent


def _key(record: CollectiveRecord) -> tuple[object, ...]:
    """Return a key that is equal for all calls of a collective."""
    return record.group, record.group_ranks, record.sequence, record.kind


def _window(total: int, finding: Finding | None) -> tuple[int, int]:
    if total <= CALLS_MAX:
        return 0, total
    if finding is None:
        return 0, CALLS_MAX
    first = first_shown(total, finding, most=CALLS_MAX)
    return first, first + CALLS_MAX


def _ranks(world_size: int, finding: Finding | None) -> list[int]:
    """Return all ranks, or the `RANKS_MAX` around the finding's."""
    # Center on the finding's rank, if possible.
    first = 0
    if world_size > RANKS_MAX and finding is not None and finding.rank is not None:
        first = max(0, min(finding.rank - RANKS_MAX // 2, world_size - RANKS_MAX))
    return list(range(first, min(world_size, first + RANKS_MAX)))


def _end(call: CallSpan, stop: int) -> int:
    """Return the tick of a call's end, or of the run's end if it never completed."""
    # At least a tick, so that a call without a wait is visible.
    if call.land_tick is not None:
        return max(call.land_tick, call.issue_tick + 1)
    return call.issue_tick + 1 if call.completed else stop


def _placed(calls: Sequence[CallSpan], rank: int, stop: int) -> Sequence[tuple[CallSpan, int, int]]:
    """Return a rank's calls with end ticks and lanes. Overlapping calls get different lanes."""
    # `free` has the tick from which each lane is free.
    free = [0] * _LANES_MAX
    placed: list[tuple[CallSpan, int, int]] = []
    for call in calls:
        if call.record.rank != rank:
            continue
        start, end = call.issue_tick, _end(call, stop)
        # If no lane is free, end the call in the last lane where this call starts.
        lane = next((i for i, tick in enumerate(free) if tick <= start), _LANES_MAX - 1)
        if free[lane] > start:
            last = max(i for i, (_, _, other) in enumerate(placed) if other == lane)
            placed[last] = (placed[last][0], start, lane)
        free[lane] = end
        placed.append((call, end, lane))
    return placed


def _shade(
    calls: Sequence[CallSpan], finding: Finding | None, *, x: Callable[[float], float]
) -> dict[str, str] | None:
    if finding is None:
        return None
    start, stop = finding.call_start, finding.call_stop
    if start is None or stop is None or start >= len(calls):
        return None
    left = x(calls[start].issue_tick)
    right = x(calls[stop].issue_tick) if stop < len(calls) else float(_WIDTH)
    return {
        "x": f"{left:.2f}",
        "width": f"{max(1.0, right - left):.2f}",
        "title": f"step {finding.step} of rank {finding.rank}, until it was found",
    }


def _span(
    call: CallSpan, left: float, right: float, top: int, *, marked: Collection[object]
) -> dict[str, object]:
    record = call.record
    class_ = class_of(record.kind)
    if _key(record) in marked:
        class_ += " suspect"
    if call.refused:
        class_ += " refused"
    elif not call.completed:
        class_ += " open"
    landed = "never" if call.land_tick is None else str(call.land_tick)
    ended = "" if call.land_tick is None and call.completed else f", over at {landed}"
    came = ", ".join(map(str, call.came))
    # At least 1.5 units wide, with a gap of 0.5 between neighbours.
    width = max(1.5, right - left - 0.5)
    return {
        "x": f"{left:.2f}",
        "y": top,
        "width": f"{width:.2f}",
        "height": _LANE - 1,
        "class": class_,
        "title": f"rank {record.rank}: {record.text}; issued at {call.issue_tick}{ended}; "
        f"came: {came}",
        "label": record.kind if width > len(record.kind) * _CHAR_WIDTH else "",
        "label_x": f"{left + 2:.2f}",
    }
