"""Worker process: runs jobs, and reports its stack on request.

A job names a function, `module:name`, of the job's payload and this rank's `RealRank`. Its result
must be writable as JSON. The names come from the process that started the workers.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from zero_sim.backends.nccl import check_alike
from zero_sim.backends.real import RealRank
from zero_sim.backends.side_channel import RankGone
from zero_sim.backends.transports import local_rank_of
from zero_sim.errors import EnvironmentProblem

_PACKAGE = str(Path(__file__).parent.parent)
# Our own process groups count as torch's in stacks.
_CALLED = (f"{_PACKAGE}/sim/", f"{_PACKAGE}/backends/folding")
_FRAMES_MAX = 10
_TICK_SECONDS = 0.25
# Pending calls that a report lists.
_PENDING_MAX = 8


def serve(connection: Connection, *, rank: int) -> None:
    """Run JSON jobs from a connection until it ends, as a rank of a team."""
    # One thread, because the thread count decides the bits of products. Read it back: torch applies
    # the process-wide count to a thread at its first computation, and reading counts as such.
    torch.set_num_threads(1)
    torch.get_num_threads()
    # Messages arrive in a thread, so that a stack can be requested while a job hangs.
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    # Three threads send answers, which must not mix.
    sending = threading.Lock()
    main_thread = threading.get_ident()

    def answer(message: Mapping[str, Any]) -> None:
        with sending:
            connection.send_bytes(json.dumps(message).encode())

    def listen() -> None:
        while True:
            try:
                message = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                # The owner is gone, and a job may hang forever.
                os._exit(0)
            if message["op"] == "stack":
                where = [stack_of(main_thread), pending_calls()]
                answer({"op": "stack", "text": "\n".join(filter(None, where))})
            else:
                jobs.put(message)

    threading.Thread(target=listen, name="listen", daemon=True).start()
    real_rank: RealRank | None = None

    # In a thread, because the main thread may be blocked in the store or in NCCL.
    def tick() -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            if real_rank is not None and real_rank.is_setting_up:
                answer({"op": "alive"})
            # While a rank waits for a message, it gives no other sign of life. It does not hang.
            elif real_rank is not None and real_rank.channel.is_listening:
                answer({"op": "listening"})

    threading.Thread(target=tick, name="tick", daemon=True).start()
    while True:
        message = jobs.get()
        if message["op"] == "join":
            try:
                real_rank = _join(message, rank=rank)
                real_rank.channel.on_sign = lambda: answer({"op": "alive"})
            except (EnvironmentProblem, RankGone) as error:
                # Only the rank with the actual problem gave up. RankGone follows on other ranks.
                first = isinstance(error, EnvironmentProblem)
                answer({"op": "raised", "error": str(error), "traceback": "", "gave_up": first})
                continue
            answer({"op": "joined"})
            continue
        assert real_rank is not None
        answer(_run(message, real_rank))


def _join(message: Mapping[str, Any], *, rank: int) -> RealRank:
    host, port = message["store"]
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    # Teams share one store, so each has a prefix.
    own = dist.PrefixStore(f"team-{message['team']}", store)
    real_rank = RealRank(backend=message["backend"], rank=rank, store=own)
    try:
        # First, because NCCL reads the environment at the device's first communicator.
        real_rank.transport.prepare(os.environ)
        real_rank.transport.take_device(local_rank_of(rank=rank))
        identity = dict(real_rank.transport.identity())
    except EnvironmentProblem:
        real_rank.channel.withdraw(["identity"])
        raise
    # On every rank, so that all ranks refuse together.
    check_alike(real_rank.channel.exchange(identity, size=message["size"], about="identity"))
    return real_rank


def _run(message: Mapping[str, Any], real_rank: RealRank) -> dict[str, Any]:
    module, _, name = message["job"].partition(":")
    real_rank.begin(message["payload"]["number"])
    try:
        result = getattr(importlib.import_module(module), name)(message["payload"], real_rank)
    # A failed job is a result, and the worker continues.
    except Exception as error:  # noqa: BLE001
        return {
            "op": "raised",
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
            "spoilt": real_rank.is_spoilt,
        }
    gave_up = bool(real_rank.last_words)
    return {"op": "done", "result": result, "gave_up": gave_up, "spoilt": real_rank.is_spoilt}


def stack_of(thread: int) -> str:
    """Return a thread's stack, innermost call last, without frames up to our last frame.

    Calls inside our own process groups count as torch's.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "(no stack)"
    frames = traceback.extract_stack(frame)
    # A stack that ends in our process group shows the caller of the collective last.
    while frames and frames[-1].filename.startswith(_CALLED):
        frames.pop()
    # Frames below our last frame belong to the user's code or to torch.
    ours = [i for i, entry in enumerate(frames) if entry.filename.startswith(_PACKAGE)]
    below = frames[ours[-1] + 1 :] if ours else frames
    return "".join(traceback.format_list((below or frames)[-_FRAMES_MAX:])).rstrip()


def _recorded_calls() -> dict[str, Any]:
    """Return all records of torch's Flight Recorder, for gloo and NCCL; empty without any.

    `TORCH_FR_BUFFER_SIZE` sets the number of calls it keeps.
    """
    # Until torch 2.11 the function had NCCL's name.
    read = getattr(c10d, "_dump_fr_trace_json", None) or getattr(
        c10d, "_dump_nccl_trace_json", None
    )
    return {} if read is None else json.loads(read(True, False))


def pending_calls() -> str:
    """List calls that have not ended, oldest first, one per line."""
    entries = _recorded_calls().get("entries", ())
    pending = [_in_words(entry) for entry in entries if not _is_over(entry)]
    left = len(pending) - _PENDING_MAX
    more = [f"pending: and {left} more"] if left > 0 else []
    return "\n".join([*pending[:_PENDING_MAX], *more])


def _is_over(entry: Mapping[str, Any]) -> bool:
    # Some backends retire a finished call, others set its state.
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
