"""Event logs for other tools: Chrome traces for Perfetto, Flight Recorder dumps for `torchfrtrace`.

A Chrome trace uses Kineto's field names, which torch's own tools read. Each rank is a process, with
lanes for its turns, its calls and, if logged, its collectives in flight. Arrows connect the calls
of a collective or message, in order of arrival.

Flight Recorder dumps are the only pickles that zero_sim writes. It never reads pickles.
"""

from __future__ import annotations

import gzip
import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from zero_sim.errors import UsageError
from zero_sim.host.files import folder_whole, unwritten, write_whole
from zero_sim.report.timeline import CallSpan, Timeline, read_timeline
from zero_sim.sim import CollectiveRecord, EventLog

# C++ names of dtypes that torch's tools know. Others keep their name from the log.
_DTYPES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16",
    "int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte",
    "bool": "Bool", "complex64": "ComplexFloat", "complex128": "ComplexDouble",
    "float8_e4m3fn": "Float8_e4m3fn", "float8_e5m2": "Float8_e5m2",
}  # fmt: skip
# Flight Recorder's names of collectives, for the analysers of torch 2.13 and older.
_FLIGHT_RECORDER = {
    "all_reduce_sparse": "all_reduce",
    "reduce_scatter": "_reduce_scatter_base",
    "reduce_scatter_list": "reduce_scatter",
    "all_gather": "_all_gather_base",
    "all_gather_list": "all_gather",
    "all_to_all_list": "all_to_all",
}
# The profiler's names of collectives, as in `record_param_comms`.
_PROFILER = {
    **_FLIGHT_RECORDER,
    "all_reduce": "allreduce",
    "all_reduce_sparse": "allreduce",
    "all_gather": "_allgather_base",
}

# Lanes of a rank. Overlapping collectives in flight take further lanes.
_BATON, _ISSUE, _IN_FLIGHT = 0, 1, 2

# torch's profiler lists groups of up to this size in full.
_RANKS_SHOWN = 30

FORMAT_VERSION = "2.10"
"""Dump format of torch 2.13."""
SUSPECT_FOLDER = "suspect"
"""Subfolder for the dump of a rank with a refused call."""

# Both formats show a tick as a microsecond. This is unrelated to durations on a device.
_TICK_NS = 1000
# Names for which the analyser skips its check of sizes, which an incomplete group would fail.
_WITHOUT_SIZES = {
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter": "reduce_scatter_v",
    "all_gather": "all_gather_v",
}

Event = dict[str, object]


def chrome_trace(logs: Sequence[EventLog], *, name: str) -> dict[str, object]:
    """Return a case's trace, ready for JSON.

    Args:
        logs: Logs of the case's worlds, shown one after another.
        name: Name of the trace.
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
        # Each arrow has at least two events, so ids of earlier worlds are less than `len(events)`.
        events.extend(_flow_events(timeline, base, first_id=len(events)))
        base += timeline.stop_tick  # The next world starts where this one ends.
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
    """Write a case's trace to a file, compressed if its name ends in `.gz`.

    Raises:
        UsageError: If the file cannot be written.
        EnvironmentProblem: If the disk is full.
    """
    text = json.dumps(chrome_trace(logs, name=name))
    data = text.encode()
    # mtime = 0, so that equal runs write equal files.
    try:
        write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise unwritten("a trace", path, error) from None


def _names(lane_counts: Sequence[int]) -> Iterator[Event]:
    for rank, lane_count in enumerate(lane_counts):
        # In the order of the constants `_BATON`, `_ISSUE`, `_IN_FLIGHT`.
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
    """Return the lane of each call in flight, by call index."""
    # In Perfetto, spans of a lane must not overlap, so use the first free lane.
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
    """Return the tick at which a call landed; None if the log has no such ticks."""
    # A call that never landed is in flight until the run ends.
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
            # Perfetto only attaches arrows to spans with a duration.
            "dur": 1,
            "args": _args(call),
        }
        yield event
        stop = _stop_tick(call, timeline)
        if stop is not None:
            span = {"cat": "user_annotation", "name": call.record.kind, "tid": lanes[index]}
            yield {**event, **span, "dur": stop - call.issue_tick}


def _flow_events(timeline: Timeline, base: int, *, first_id: int) -> Iterator[Event]:
    """Yield arrows that connect the calls of each collective or message.

    Args:
        timeline: Timeline of a world.
        base: Tick at which it starts.
        first_id: First id of its arrows. Ids must be distinct over all worlds.
    """
    operations: dict[tuple[object, ...], list[CallSpan]] = {}
    for call in timeline.calls:
        record = call.record
        message_ranks = call.came if record.kind in ("send", "recv") else ()
        # Messages are numbered per pair of ranks, so their key contains the pair.
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
            # bp = e binds the arrow's end to the enclosing span, not to the next span.
            yield {**event, "bp": "e"} if event["ph"] == "f" else event


def _args(call: CallSpan) -> dict[str, object]:
    record = call.record
    args: dict[str, object] = {
        "Collective name": _PROFILER.get(record.kind, record.kind),
        "dtype": _DTYPES.get(record.dtype, record.dtype),
        "In msg nelems": record.elems,
        "Out msg nelems": _output_elems(record),
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


def write_flight_recorder(folder: Path, log: EventLog) -> list[Path]:
    """Write a dump per rank: `rank_0`, `rank_1`, ...

    Args:
        folder: An empty or new folder.
        log: Log of a run.

    Returns:
        The files in rank order.

    Raises:
        UsageError: If the folder is not empty or cannot be written.
        EnvironmentProblem: If the disk is full.
    """
    timeline = read_timeline(log)
    # The analyser assumes that the first dump it reads is right, and reports ranks that differ. It
    # reads a folder before its subfolders, so put the dump with the refused call in a subfolder.
    suspect = next((call.record.rank for call in timeline.calls if call.refused), None)
    files: list[Path] = []
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(
                f"expected an empty folder for dumps, got {folder}, whose files the analyser would "
                "also read. Choose a new folder."
            )
        with folder_whole(folder) as aside:
            for rank, dump in enumerate(flight_recorder_dumps(timeline)):
                home = Path(SUSPECT_FOLDER if rank == suspect else "")
                (aside / home).mkdir(exist_ok=True)
                file = home / f"rank_{rank}"
                # The analyser only reads pickles. Protocol 2, like torch's own dumps.
                (aside / file).write_bytes(pickle.dumps(dump, protocol=2))
                files.append(folder / file)
    except OSError as error:
        raise unwritten("dumps", folder, error) from None
    return files


def flight_recorder_dumps(timeline: Timeline) -> list[dict[str, object]]:
    """Return each rank's Flight Recorder dump at the end of a run, in rank order."""
    # The analyser reports each group member that did not come to a collective as missing. If a
    # refused call ended the run, other ranks may not have had their turn, so their next calls are
    # unknown. Such a collective gets a group of its own, with only the ranks that came.
    refused = any(call.refused for call in timeline.calls)
    entries: list[list[dict[str, object]]] = [[] for _ in range(timeline.world_size)]
    groups: list[dict[str, object]] = [{} for _ in range(timeline.world_size)]
    for call in timeline.calls:
        group = _group_of(call, is_cut_short=refused and not call.completed)
        if group.name not in groups[call.record.rank]:
            config = {"name": group.name, "desc": "undefined", "ranks": str(list(group.ranks))}
            # For all members, because some may not have made a call in this group.
            for rank in group.ranks:
                groups[rank][group.name] = config
        mine = entries[call.record.rank]
        mine.append(_entry(call, group, record_id=len(mine), timeline=timeline))
    return [
        {"version": FORMAT_VERSION, "pg_config": config, "pg_status": {}, "entries": mine}
        for config, mine in zip(groups, entries, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    name: str
    ranks: Sequence[int]
    is_cut_short: bool


def _group_of(call: CallSpan, *, is_cut_short: bool) -> _Group:
    record = call.record
    # A group per pair of ranks, because NCCL creates a communicator per pair for messages.
    if record.kind in ("send", "recv") and call.peer is not None:
        ranks = sorted({record.rank, call.peer})
        name = f"{record.group}: mail of ranks {' and '.join(map(str, ranks))}"
    else:
        ranks, name = list(record.group_ranks), record.group
    # The number makes the name unique, because each such collective has its own group.
    if is_cut_short and len(call.came) < len(ranks):
        name = f"{name}: those who came to #{call.number}"
        return _Group(name=name, ranks=call.came, is_cut_short=True)
    return _Group(name=name, ranks=ranks, is_cut_short=False)


def _entry(
    call: CallSpan, group: _Group, *, record_id: int, timeline: Timeline
) -> dict[str, object]:
    record = call.record
    is_message = record.kind in ("send", "recv")
    # A refused call never started. By its state, the analyser also reports faults that dumps do not
    # contain, such as a wrong reduce operation.
    state = "completed" if call.completed else "scheduled" if call.refused else "started"
    issued_ns = call.issue_tick * _TICK_NS
    landed = timeline.stop_tick if call.land_tick is None else call.land_tick
    dtype = _DTYPES.get(record.dtype, record.dtype)
    kind = _FLIGHT_RECORDER.get(record.kind, record.kind)
    if group.is_cut_short:
        kind = _WITHOUT_SIZES.get(kind, kind)
    return {
        "record_id": record_id,
        "pg_id": 0,
        "process_group": (group.name, "undefined"),
        "collective_seq_id": call.number,
        "p2p_seq_id": call.number if is_message else 0,
        "op_id": record_id,
        "is_p2p": is_message,
        "profiling_name": f"nccl:{kind}{_ends(call, group)}",
        "time_created_ns": issued_ns,
        "input_sizes": [[record.elems]],
        "input_dtypes": [dtype],
        "output_sizes": [[_output_elems(record)]],
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": None if state == "scheduled" else issued_ns,
        "time_discovered_completed_ns": landed * _TICK_NS if call.completed else None,
        "retired": call.completed,
        "timeout_ms": 0,
        "frames": [{"name": record.kind, "filename": record.file, "line": record.line}],
    }


def _ends(call: CallSpan, group: _Group) -> str:
    """Return the ends of a message as group ranks, such as ` 0->1`."""
    record = call.record
    if record.kind not in ("send", "recv"):
        return ""
    # An unmatched receive from any rank has no peer, but the analyser requires a number.
    peer = record.rank if call.peer not in group.ranks else call.peer
    mine, other = group.ranks.index(record.rank), group.ranks.index(peer)
    return f" {mine}->{other}" if record.kind == "send" else f" {mine}<-{other}"


def _output_elems(record: CollectiveRecord) -> int:
    """Return a call's output elements. Like torch, count a send's input as its output."""
    return record.elems if record.kind == "send" else record.output_elems
