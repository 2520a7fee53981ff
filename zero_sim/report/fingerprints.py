"""Fingerprints: a rank's calls from a log or file, and a fingerprint as text.

A file is a Chrome trace or a Flight Recorder dump.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_sim.calculators.fingerprint import GRAMMARS, Fingerprint, ObservedCall, shortened
from zero_sim.errors import UsageError
from zero_sim.report.amounts import aligned
from zero_sim.report.timeline import read_timeline
from zero_sim.sim import EventLog
from zero_sim.untrusted import NESTING_MAX, Unreadable, nests_too_deep, printable, read_regular

# 512 MiB, before and after unpacking.
FILE_BYTES_MAX = 2**29
_ELEM_BYTES = {
    "double": 8, "long": 8, "float64": 8, "int64": 8, "float": 4, "int": 4, "float32": 4,
    "int32": 4, "half": 2, "bfloat16": 2, "float16": 2, "byte": 1, "char": 1, "uint8": 1,
    "int8": 1, "bool": 1, "long int": 8, "signed char": 1, "unsigned char": 1,
}  # fmt: skip
# `c10d` operators whose first argument is the output and the second the input.
_INPUT_SECOND = ("allgather", "reduce_scatter", "alltoall")
# Substring of a name in the profiler or Flight Recorder, and its kind. The first match wins, so
# `reduce` is last.
_KINDS = (
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
)


def calls_of_log(log: EventLog, *, rank: int) -> list[ObservedCall]:
    """Return a rank's calls in a log."""
    calls = []
    for call in read_timeline(log).calls:
        record = call.record
        # Messages and barriers do not depend on the stage.
        if record.rank == rank and record.kind not in ("send", "recv", "barrier"):
            stop = call.issue_tick if call.land_tick is None else call.land_tick
            calls.append(
                ObservedCall(
                    kind=record.kind,
                    ranks=len(record.group_ranks),
                    elems=record.elems,
                    elem_bytes=record.elem_bytes,
                    dtype=record.dtype,
                    start=float(call.issue_tick),
                    # A synchronous call ends before the rank's next call, so it overlaps none.
                    stop=float(stop if record.asynchronous else call.issue_tick),
                )
            )
    return calls


def traces_in(path: Path) -> list[Path]:
    """Return the file itself, or a folder's traces and dumps, sorted by name.

    Raises:
        UsageError: If the folder has none.
    """
    if not path.is_dir():
        return [path]
    files = sorted(f for f in path.iterdir() if f.name.endswith((".json", ".json.gz")))
    if not files:
        raise UsageError(
            f"expected traces or dumps in the folder {path}, got no .json or .json.gz file. Try "
            "`zero-sim run --trace`, or torch's profiler."
        )
    return files


def read_calls(path: Path, *, rank: int) -> list[ObservedCall]:
    """Read a rank's calls from a trace or dump.

    Args:
        path: A Chrome trace of torch's profiler (`.json`, `.json.gz`), or a Flight Recorder dump as
            JSON.
        rank: The rank, if the file has several.

    Raises:
        UsageError: If the file is neither, or has no collectives of this rank.
    """
    raw = _load(path)
    if isinstance(raw.get("traceEvents"), list):
        calls = _of_trace(raw, rank=rank, path=path)
    elif isinstance(raw.get("entries"), list):
        calls = list(_of_dump(raw))
    else:
        raise UsageError(
            "expected a Chrome trace with traceEvents, or a Flight Recorder dump with entries, "
            f"got {path} with neither. Try `zero-sim export`, or torch's profiler."
        )
    if not calls:
        raise UsageError(
            f"expected collectives of rank {rank} in {path}, got none. Try another --rank."
        )
    return sorted(calls, key=lambda call: call.start)


def _load(path: Path) -> dict[str, Any]:
    # The file may come from a stranger, so only read JSON of bounded size, never a pickle.
    try:
        data = read_regular(path, bytes_max=FILE_BYTES_MAX)
    except Unreadable as reason:
        raise UsageError(f"expected a trace or a dump at {path}, got: {reason}.") from None
    # Detect gzip by content, not by name. Bound the output, because a small file may unpack to
    # terabytes.
    if data[:2] == b"\x1f\x8b":
        unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
        try:
            data = unpack.decompress(data, FILE_BYTES_MAX)
        except (zlib.error, gzip.BadGzipFile) as error:
            raise UsageError(f"expected a gzip file at {path}, got: {error}.") from None
    # Pickles of protocol 2 and later start with this byte, including torch's dumps.
    if data[:1] == b"\x80":
        raise UsageError(
            f"expected JSON, got a pickle at {path}, which could run any code. Use torch's dump as "
            "JSON (dump_nccl_trace_json)."
        )
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"expected JSON at {path}, got: {printable(str(error))}.") from None
    if not isinstance(raw, dict) or nests_too_deep(raw):
        got = "something else" if not isinstance(raw, dict) else f"more than {NESTING_MAX} levels"
        raise UsageError(f"expected an object as JSON at {path}, got {got}.")
    return raw


def _of_dump(raw: Mapping[str, Any]) -> Iterator[ObservedCall]:
    # The file may be forged, so any value may be missing or have another type.
    configs = raw.get("pg_config")
    for entry in raw["entries"]:
        kind = _kind(entry.get("profiling_name")) if isinstance(entry, dict) else ""
        if not kind:
            continue
        group = entry.get("process_group")
        name = group[0] if isinstance(group, list) and group else ""
        config = configs.get(str(name)) if isinstance(configs, dict) else None
        ranks = config.get("ranks", "") if isinstance(config, dict) else ""
        dtypes = entry.get("input_dtypes")
        dtype = str(dtypes[0]) if isinstance(dtypes, list) and dtypes else ""
        start = _number(entry.get("time_created_ns"))
        stop = _number(entry.get("time_discovered_completed_ns")) or start
        yield ObservedCall(
            kind=kind,
            ranks=len([part for part in str(ranks).strip("[]").split(",") if part.strip()]),
            elems=_elems(entry.get("input_sizes")),
            elem_bytes=_ELEM_BYTES.get(dtype.lower(), 1),
            dtype=dtype,
            start=start,
            # In a forged file, a call may complete before its issue.
            stop=max(start, stop),
        )


def _of_trace(raw: Mapping[str, Any], *, rank: int, path: Path) -> list[ObservedCall]:
    """Return the rank's calls in a trace."""
    events = raw["traceEvents"]
    named = [e for e in events if isinstance(e, dict) and isinstance(e.get("args"), dict)]
    described = [e for e in named if "Collective name" in e["args"]]
    if not described:
        return list(_of_operators(named, world_size=_world_size(raw), path=path))
    pids = {e.get("pid") for e in described}
    # In our own traces, process ids are ranks. torch writes a file per rank, with any process id.
    if len(pids) > 1 and rank in pids:
        described = [e for e in described if e.get("pid") == rank]
    # On NCCL, both the kernel and the call that issued it have a description. Count kernels,
    # because they have device times.
    kernels = [e for e in described if e.get("cat") == "kernel"]
    issued = [e for e in described if e.get("cat") == "cpu_op"]
    return list(_of_descriptions(kernels or issued, are_kernels=bool(kernels)))


def _of_descriptions(events: Sequence[Any], *, are_kernels: bool) -> Iterator[ObservedCall]:
    """Yield calls from events that describe their collective, as on NCCL and in our own traces."""
    for event in events:
        args = event["args"]
        kind = _kind(args["Collective name"])
        if not kind:
            continue
        start = _number(event.get("ts"))
        dtype = str(args.get("dtype", ""))
        yield ObservedCall(
            kind=kind,
            ranks=int(_number(args.get("Group size"))),
            elems=int(_number(args.get("In msg nelems"))),
            elem_bytes=_ELEM_BYTES.get(dtype.lower(), 1),
            dtype=dtype,
            start=start,
            stop=start + (_number(event.get("dur")) if are_kernels else 0.0),
        )


def _of_operators(
    events: Sequence[dict[str, Any]], *, world_size: int, path: Path
) -> Iterator[ObservedCall]:
    """Yield calls on gloo, for which the profiler only records `c10d` operators."""
    # Another thread executes each call, in an event `gloo:...` with dtype and duration. gloo may
    # execute a reduce-scatter as an all-reduce, so take the kind from the operator.
    done = [e for e in events if str(e.get("name")).startswith("gloo:")]
    done.sort(key=lambda event: _number(event.get("ts")))
    waiting: dict[int, deque[dict[str, Any]]] = defaultdict(deque)
    for event in done:
        waiting[_elems(event["args"].get("Input Dims"))].append(event)
    operators = [e for e in events if str(e.get("name")).startswith("c10d::")]
    for event in sorted(operators, key=lambda event: _number(event.get("ts"))):
        kind, args = _kind(event["name"]), event["args"]
        if not kind:
            continue
        dims = args.get("Input Dims")
        if not isinstance(dims, list) or len(dims) < 2:
            raise UsageError(
                f"expected the sizes of collectives in {path}, got none. Use "
                "torch.profiler.profile(record_shapes=True)."
            )
        is_second = any(name in event["name"] for name in _INPUT_SECOND)
        output, elems = _elems(dims[:1]), _elems(dims[int(is_second) : int(is_second) + 1])
        ranks = world_size
        if kind == "reduce_scatter" and not elems:
            # The profiler does not record the input, a list of lists of tensors.
            elems = output * ranks
        elif kind in ("reduce_scatter", "all_gather") and output and elems:
            # The profiler does not record the group size, but it is the ratio of input and output.
            ranks = max(output, elems) // min(output, elems)
        start = _number(event.get("ts"))
        did = next(_begun_after(start, waiting[elems]), event)
        types = did["args"].get("Input type")
        dtype = str(types[0]) if isinstance(types, list) and types else ""
        yield ObservedCall(
            kind=kind,
            ranks=ranks,
            elems=elems,
            elem_bytes=_ELEM_BYTES.get(dtype.lower().removeprefix("c10::"), 1),
            dtype=dtype,
            start=start,
            stop=start if did is event else _number(did.get("ts")) + _number(did.get("dur")),
        )


def _begun_after(start: float, events: deque[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while events:
        event = events.popleft()
        if _number(event.get("ts")) >= start:
            yield event


def _world_size(raw: Mapping[str, Any]) -> int:
    info = raw.get("distributedInfo")
    return int(_number(info.get("world_size"))) if isinstance(info, dict) else 0


def _kind(name: object) -> str:
    text = str(name).lower()
    return next((kind for part, kind in _KINDS if part in text), "")


def _elems(sizes: object) -> int:
    """Return the number of elements in a tensor or list of tensors, by shape."""
    if not isinstance(sizes, list) or not sizes:
        return 0
    if any(isinstance(size, list) for size in sizes):
        return sum(map(_elems, sizes))
    return math.prod(int(_number(size)) for size in sizes)


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The comparison rejects NaN, infinity, and integers that would overflow a float.
    return float(value) if is_number and abs(value) < 2**62 else 0.0  # type: ignore[arg-type]


def render_fingerprint(found: Fingerprint) -> str:
    """Render the stage that fits the calls, odd calls, and message sizes."""
    lines = [
        f"{found.stage or 'no stage'}: {found.why}",
        f"step: {shortened(found.letters)}",
        "  A all-reduce, R reduce-scatter, C sum over replicas, G gather, D reduce, B broadcast",
        f"seen {found.steps:g} times in {found.calls:,} calls; replicas of each shard: "
        f"{found.copies}",
        f"{found.overlapping:,} of {found.calls:,} calls were in flight when the next was issued",
    ]
    lines += [f"odd: {each}" for each in found.odd] or ["odd: nothing"]
    if not found.stage:
        lines += ["", "Known stages:"]
        lines += [f"  {grammar:<14} {stage}: {why}" for grammar, stage, why in GRAMMARS]
    if found.sizes:
        rows = [["messages of", "calls"]]
        rows += [[f"{low:,} to {high:,} bytes", f"{count:,}"] for low, high, count in found.sizes]
        lines += ["", aligned(rows)]
    return "\n".join(lines)
