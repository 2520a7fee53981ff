"""Event logs as a Chrome trace, with the field names of Kineto, for Perfetto and torch's own tools.

One process a rank; its lanes are: who holds the baton, where calls are issued, and, where the log
knows, what is in flight. Arrows lead through the calls that make up one collective or message, in
the order in which ranks came. The clock is the log's own: one tick is shown as one microsecond, and
says nothing about how long anything would take on a device.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path

from zero_sim.host.files import unwritten, write_whole
from zero_sim.report.timeline import CallSpan, Timeline, read_timeline
from zero_sim.report.torch_names import output_elems, profiler_name, scalar_type
from zero_sim.sim import EventLog

_BATON, _ISSUE, _IN_FLIGHT = 0, 1, 2
"""Lanes of a rank; flights that overlap take further ones."""

_RANKS_SHOWN = 30
"""Ranks of a group that torch's profiler writes out."""

Event = dict[str, object]


def chrome_trace(logs: Sequence[EventLog], *, name: str) -> dict[str, object]:
    """The trace of one case.

    Args:
        logs: The log of each world that the case ran in; they are shown one after another.
        name: What the trace is of.

    Returns:
        An object ready for JSON.
    """
    timelines = [read_timeline(log) for log in logs]
    world_size = max((timeline.world_size for timeline in timelines), default=0)
    groups = {(c.record.group, c.record.group_ranks) for t in timelines for c in t.calls}
    events: list[Event] = []
    lane_counts = [_IN_FLIGHT] * world_size
    base = 0
    for timeline in timelines:
        lanes = _flight_lanes(timeline)
        for index, lane in lanes.items():
            rank = timeline.calls[index].record.rank
            lane_counts[rank] = max(lane_counts[rank], lane + 1)
        events.extend(_turn_events(timeline, base))
        events.extend(_call_events(timeline, base, lanes))
        events.extend(_flow_events(timeline, base, first_id=len(events)))
        base += timeline.stop_tick
    return {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {
            "backend": "sim",
            "world_size": world_size,
            "pg_count": len(groups),
            "pg_config": [
                {
                    "pg_name": group,
                    "pg_desc": "undefined",
                    "backend_config": "cpu:sim",
                    "pg_size": len(ranks),
                    "ranks": list(ranks),
                }
                for group, ranks in sorted(groups)
            ],
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceEvents": [*_names(lane_counts), *events],
        "traceName": name,
    }


def write_chrome_trace(path: Path, logs: Sequence[EventLog], *, name: str) -> None:
    """Write the trace of one case to a file, compressed where its name ends in `.gz`.

    Raises:
        UsageError: The file cannot be written there.
        EnvironmentProblem: There is no room for it.
    """
    text = json.dumps(chrome_trace(logs, name=name))
    data = text.encode()
    try:
        write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise unwritten("a trace", path, error) from None


def _names(lane_counts: Sequence[int]) -> Iterator[Event]:
    for rank, lane_count in enumerate(lane_counts):
        lanes = ["baton", "issue", *(f"in flight {n}" for n in range(lane_count - _IN_FLIGHT))]
        yield _meta("process_name", rank, 0, name=f"rank {rank}")
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
        for lane, label in enumerate(lanes):
            yield _meta("thread_name", rank, lane, name=label)
            yield _meta("thread_sort_index", rank, lane, sort_index=lane)


def _meta(what: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "ts": 0, "pid": pid, "tid": tid, "args": args}


def _turn_events(timeline: Timeline, base: int) -> Iterator[Event]:
    for number, turn in enumerate(timeline.turns):
        yield {
            "ph": "X",
            "cat": "user_annotation",
            "name": "turn",
            "pid": turn.rank,
            "tid": _BATON,
            "ts": base + turn.start_tick,
            "dur": turn.stop_tick - turn.start_tick,
            "args": {"Turn": number},
        }


def _flight_lanes(timeline: Timeline) -> dict[int, int]:
    """Lane of every call that is known to be in flight: spans of one lane must not overlap."""
    busy: dict[int, list[tuple[int, int]]] = defaultdict(list)
    free: dict[int, list[int]] = defaultdict(list)
    lanes: dict[int, int] = {}
    for index, call in enumerate(timeline.calls):
        stop, rank = _stop_tick(call, timeline), call.record.rank
        if stop is None:
            continue
        while busy[rank] and busy[rank][0][0] <= call.issue_tick:
            heappush(free[rank], heappop(busy[rank])[1])
        lane = heappop(free[rank]) if free[rank] else len(busy[rank])
        heappush(busy[rank], (stop, lane))
        lanes[index] = _IN_FLIGHT + lane
    return lanes


def _stop_tick(call: CallSpan, timeline: Timeline) -> int | None:
    """When the call left flight: at the end of all, where others landed and it never did."""
    if call.land_tick is None and timeline.knows_landing:
        return timeline.stop_tick
    return call.land_tick


def _call_events(timeline: Timeline, base: int, lanes: dict[int, int]) -> Iterator[Event]:
    for index, call in enumerate(timeline.calls):
        event: Event = {
            "ph": "X",
            "cat": "cpu_op",
            "name": "record_param_comms",
            "pid": call.record.rank,
            "tid": _ISSUE,
            "ts": base + call.issue_tick,
            # Of some length, or no arrow could be tied to it.
            "dur": 1,
            "args": _args(call),
        }
        yield event
        stop = _stop_tick(call, timeline)
        if stop is not None:
            span = {"cat": "user_annotation", "name": call.record.kind, "tid": lanes[index]}
            yield {**event, **span, "dur": stop - call.issue_tick}


def _flow_events(timeline: Timeline, base: int, *, first_id: int) -> Iterator[Event]:
    """An arrow from each rank's call to the next one's, for what more than one rank came to.

    Args:
        timeline: The run.
        base: When it begins.
        first_id: Of its arrows; those of another run need ids of their own.
    """
    operations: dict[tuple[object, ...], list[CallSpan]] = {}
    for call in timeline.calls:
        record = call.record
        message_ranks = call.came if record.kind in ("send", "recv") else ()
        key = record.group, record.group_ranks, message_ranks, call.number
        operations.setdefault(key, []).append(call)
    for number, calls in enumerate(each for each in operations.values() if len(each) > 1):
        came = sorted(calls, key=lambda call: call.issue_tick)
        for place, call in enumerate(came):
            event: Event = {
                "ph": "s" if place == 0 else "f" if place == len(came) - 1 else "t",
                "id": first_id + number,
                "cat": "collective",
                "name": came[0].record.kind,
                "pid": call.record.rank,
                "tid": _ISSUE,
                "ts": base + call.issue_tick,
            }
            # The end binds to what encloses it, not to what begins after it.
            yield {**event, "bp": "e"} if event["ph"] == "f" else event


def _args(call: CallSpan) -> dict[str, object]:
    record = call.record
    args: dict[str, object] = {
        "Collective name": profiler_name(record),
        "dtype": scalar_type(record),
        "In msg nelems": record.elems,
        "Out msg nelems": output_elems(record),
        "Group size": len(record.group_ranks),
        "Process Group Name": record.group,
        "Process Group Description": "undefined",
        "Process Group Ranks": _shown(record.group_ranks),
        "Rank": record.rank,
        "Seq": call.number,
        "Is asynchronized op": record.asynchronous,
        "Detail": record.detail,
        "Call site": record.site,
        "Completed": call.completed,
    }
    if record.kind in ("send", "recv"):
        ends = (record.rank, call.peer) if record.kind == "send" else (call.peer, record.rank)
        args |= {"Src Rank": ends[0], "Dst Rank": ends[1]}
    if call.refused:
        args["Refused"] = True
    return args


def _shown(ranks: Sequence[int]) -> str:
    if len(ranks) <= _RANKS_SHOWN:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[: _RANKS_SHOWN - 1]))}, ..., {ranks[-1]}]"
