"""torch's Flight Recorder, read: which calls of this process have not come to an end.

It keeps the last calls of gloo and NCCL alike where `TORCH_FR_BUFFER_SIZE` says how many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch._C import _distributed_c10d as c10d

CALLS_MAX = 8
"""Most pending calls that are told."""


def dump() -> dict[str, Any]:
    """All that it has kept; empty where this torch has none, or nothing was recorded."""
    # torch 2.11 calls it by NCCL's name.
    read = getattr(c10d, "_dump_fr_trace_json", None) or getattr(
        c10d, "_dump_nccl_trace_json", None
    )
    return {} if read is None else json.loads(read(True, False))


def pending_calls() -> str:
    """The calls that have not come to an end, oldest first, one a line; empty where none is."""
    entries = dump().get("entries", ())
    pending = [_in_words(entry) for entry in entries if not _is_over(entry)]
    left = len(pending) - CALLS_MAX
    more = [f"pending: and {left} more"] if left > 0 else []
    return "\n".join([*pending[:CALLS_MAX], *more])


def _is_over(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _in_words(entry: Mapping[str, Any]) -> str:
    name, description = [*entry.get("process_group", ("?", "?")), "?"][:2]
    sizes = ", ".join(map(str, entry.get("input_sizes", ())))
    dtypes = ", ".join(dict.fromkeys(entry.get("input_dtypes", ())))
    group = f" of group {description or name}" if description or name else ""
    return (
        f"pending: {entry.get('profiling_name', '?')}, call {entry.get('collective_seq_id', '?')}"
        f"{group}, of {sizes} {dtypes}, {entry.get('state', '?')}"
    )
