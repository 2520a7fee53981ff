"""This process as one of those that torchrun, or anything that sets the same variables, started."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zero_sim.backends.real import RealRank
from zero_sim.backends.worker import stack_of
from zero_sim.errors import EnvironmentProblem
from zero_sim.host import supervisor

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_COLLECT_SECONDS = 10.0
_POLL_SECONDS = 0.2

NCCL_PINS = {
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_CTAS": "1",
    "NCCL_MAX_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_PAT_ENABLE": "0",
    "NCCL_WIN_ENABLE": "0",
}
"""What makes NCCL add in one ring on one channel; what is set already stays as it is."""


def is_launched() -> bool:
    """Whether this process was started as one rank of several."""
    return all(name in os.environ for name in _NEEDED)


def place() -> tuple[int, int]:
    """This process's rank, and how many there are, as the launcher says."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def join(backend: str) -> tuple[RealRank, int]:
    """Take this process's seat.

    Args:
        backend: `gloo` or `nccl`.

    Returns:
        The seat, and how many processes there are.

    Raises:
        EnvironmentProblem: The variables are not set, or the device of this rank does not exist.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise EnvironmentProblem(
            f"expected to be started by torchrun, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. "
            "Try torchrun --nproc-per-node 4 -m zero_sim run PATH."
        )
    if backend == "nccl":
        _take_device()
        for name, value in NCCL_PINS.items():
            os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    torch.get_num_threads()
    store, rank, world_size = next(dist.rendezvous("env://"))
    return RealRank(
        backend=backend, rank=rank, store=dist.PrefixStore("zero_sim", store)
    ), world_size


def pinned(backend: str) -> tuple[str, ...]:
    """What was fixed about a backend, in words, after `join`: its version, algorithm, protocol."""
    if backend != "nccl":
        return ()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    pins = " ".join(f"{name}={os.environ[name]}" for name in NCCL_PINS)
    return (
        f"NCCL {version} on {torch.cuda.get_device_name()}, {os.environ['WORLD_SIZE']} processes",
        f"pinned: {pins}",
    )


def _take_device() -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    count = torch.cuda.device_count()
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if count == 0 or (local_rank >= count and not shared):
        raise EnvironmentProblem(
            f"expected a GPU for local rank {local_rank}, but this machine has {count}. "
            "Try fewer processes a node, or NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer."
        )
    torch.cuda.set_device(local_rank % count)


class Watchdog:
    """Turns a hang into a report: where every rank was, told through the store.

    A collective that never completes cannot be interrupted, so the processes end after it.

    Args:
        seat: This process's rank.
        world_size: How many processes there are.
        on_hang: Called on rank 0 with every rank's stack, and after how many seconds without a
            sign of life, before the processes end.
    """

    def __init__(
        self,
        seat: RealRank,
        *,
        world_size: int,
        on_hang: Callable[[Mapping[int, str], float], None],
    ) -> None:
        self._seat = seat
        # The main thread may sit in the other connection for as long as it listens to others.
        # torch's stub does not show `clone`.
        self._store = seat.store.clone()  # pyrefly: ignore
        self._world_size = world_size
        self._on_hang = on_hang
        self._deadline: float | None = None
        self._seconds = 0.0
        self._key = ""
        self._main = threading.get_ident()
        seat.on_sign = self._put_off
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextmanager
    def watching(self, number: int, *, seconds: float) -> Iterator[None]:
        """Watch over one case.

        Args:
            number: Of the case; the same on all ranks.
            seconds: How long a rank may give no sign of life.
        """
        self._key, self._seconds = f"hang/{number}", seconds
        self._put_off()
        try:
            yield
        finally:
            self._deadline = None

    def _put_off(self) -> None:
        self._deadline = time.monotonic() + self._seconds

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            deadline = self._deadline
            if deadline is None:
                continue
            # Who listens to others does not hang; one of the others does.
            overdue = time.monotonic() > deadline and not self._seat.is_listening
            if overdue:
                self._store.set(f"{self._key}/asked", "")
            if overdue or self._store.check([f"{self._key}/asked"]):
                self._report()

    def _report(self) -> None:
        store, key = self._store, self._key
        store.set(
            f"{key}/{self._seat.rank}", json.dumps(self._seat.last_words or stack_of(self._main))
        )
        if self._seat.rank == 0:
            stacks = {}
            until = time.monotonic() + _COLLECT_SECONDS
            waiting = set(range(self._world_size))
            while waiting and time.monotonic() < until:
                for rank in sorted(waiting):
                    if store.check([f"{key}/{rank}"]):
                        stacks[rank] = json.loads(store.get(f"{key}/{rank}"))
                        waiting.discard(rank)
                time.sleep(_POLL_SECONDS)
            stacks.update(dict.fromkeys(waiting, "(no answer: gone, or not in this case)"))
            self._on_hang(dict(sorted(stacks.items())), self._seconds)
            store.set(f"{key}/reported", "")
        else:
            # Rank 0 keeps the store: whoever ends before it has read would be missing.
            until = time.monotonic() + 2 * _COLLECT_SECONDS
            while time.monotonic() < until and not store.check([f"{key}/reported"]):
                time.sleep(_POLL_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        supervisor.end_process(1)
