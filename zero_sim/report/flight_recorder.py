"""Event logs as dumps of PyTorch's Flight Recorder, which its own analyser `torchfrtrace` reads.

The analyser reads pickles only, so this is the one place that writes any: dicts, lists, strings and
numbers, nothing with code of its own. We never read one.

[Note: what the analyser believes]
It takes the rank whose dump it reads first to be right and calls those that differ culprits. It
reads a folder before its subfolders; so, where a call was refused, the dump of the rank that made
it lies in a subfolder. A refused call is `scheduled` where the others' are `started`, since it
never began; so the analyser sees even what it does not record, such as a wrong reduce operation.

It also takes every member of a group that did not come to a collective to be missing. Where a
refused call ended the run, other ranks had not had their turn yet, and nobody knows what they would
have called: such a collective is shown in a group of those that had come.

Messages get a group for each pair of ranks, as NCCL makes a communicator for each.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_sim.errors import UsageError
from zero_sim.host.files import folder_whole, unwritten
from zero_sim.report.timeline import CallSpan, Timeline, read_timeline
from zero_sim.report.torch_names import flight_recorder_name, output_elems, scalar_type
from zero_sim.sim import EventLog

FORMAT_VERSION = "2.10"
"""Format of the dumps, that of torch 2.13."""
FILE_PREFIX = "rank_"
SUSPECT_FOLDER = "suspect"
"""Subfolder for the dump of the rank whose call was refused."""

_TICK_NS = 1000
_WITHOUT_SIZES = {
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter": "reduce_scatter_v",
    "all_gather": "all_gather_v",
}
"""Spellings for which the analyser does not multiply by the size of a group that was cut short."""


def write_flight_recorder(folder: Path, log: EventLog) -> list[Path]:
    """Write one dump a rank: `rank_0`, `rank_1`, ...

    Args:
        folder: Where to; made if it is not there, refused if it holds anything.
        log: The log of one run.

    Returns:
        The files, in rank order.

    Raises:
        UsageError: The folder is not empty, or cannot be written there.
        EnvironmentProblem: There is no room for it.
    """
    timeline = read_timeline(log)
    suspect = next((call.record.rank for call in timeline.calls if call.refused), None)
    files: list[Path] = []
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(
                f"expected an empty folder for dumps, got {folder}, whose files the analyser would "
                "read as well. Try a new one."
            )
        with folder_whole(folder) as aside:
            for rank, dump in enumerate(flight_recorder_dumps(timeline)):
                home = Path(SUSPECT_FOLDER if rank == suspect else "")
                (aside / home).mkdir(exist_ok=True)
                file = home / f"{FILE_PREFIX}{rank}"
                (aside / file).write_bytes(pickle.dumps(dump, protocol=2))
                files.append(folder / file)
    except OSError as error:
        raise unwritten("dumps", folder, error) from None
    return files


def flight_recorder_dumps(timeline: Timeline) -> list[dict[str, object]]:
    """What the Flight Recorder of each rank would hold at the end of a run, in rank order."""
    refused = any(call.refused for call in timeline.calls)
    entries: list[list[dict[str, object]]] = [[] for _ in range(timeline.world_size)]
    groups: list[dict[str, object]] = [{} for _ in range(timeline.world_size)]
    for call in timeline.calls:
        group = _group_of(call, is_cut_short=refused and not call.completed)
        if group.name not in groups[call.record.rank]:
            config = {"name": group.name, "desc": "undefined", "ranks": str(list(group.ranks))}
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
    if record.kind in ("send", "recv") and call.peer is not None:
        ranks = sorted({record.rank, call.peer})
        name = f"{record.group}: mail of ranks {' and '.join(map(str, ranks))}"
    else:
        ranks, name = list(record.group_ranks), record.group
    if is_cut_short and len(call.came) < len(ranks):
        name = f"{name}: those who came to #{call.number}"
        return _Group(name=name, ranks=call.came, is_cut_short=True)
    return _Group(name=name, ranks=ranks, is_cut_short=False)


def _entry(
    call: CallSpan, group: _Group, *, record_id: int, timeline: Timeline
) -> dict[str, object]:
    record = call.record
    is_message = record.kind in ("send", "recv")
    state = "completed" if call.completed else "scheduled" if call.refused else "started"
    issued_ns = call.issue_tick * _TICK_NS
    landed = timeline.stop_tick if call.land_tick is None else call.land_tick
    dtype = scalar_type(record)
    kind = flight_recorder_name(record)
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
        "output_sizes": [[output_elems(record)]],
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": None if state == "scheduled" else issued_ns,
        "time_discovered_completed_ns": landed * _TICK_NS if call.completed else None,
        "retired": call.completed,
        "timeout_ms": 0,
        "frames": [{"name": record.kind, "filename": record.file, "line": record.line}],
    }


def _ends(call: CallSpan, group: _Group) -> str:
    """The ranks at the ends of a message, as numbered within its group."""
    record = call.record
    if record.kind not in ("send", "recv"):
        return ""
    # Received from whoever sends first, and nobody did: the analyser wants some number.
    peer = record.rank if call.peer not in group.ranks else call.peer
    mine, other = group.ranks.index(record.rank), group.ranks.index(peer)
    return f" {mine}->{other}" if record.kind == "send" else f" {mine}<-{other}"
