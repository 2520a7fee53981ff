"""Peers: the same programs with torch's own ways to run many ranks in a process.

The threaded process group has a thread per rank and no baton, so results depend on thread timing if
ranks share random numbers. `LocalTensorMode` runs all ranks in lock-step in a single thread, so it
cannot run programs that branch on the rank. Because both replace global state in torch, each runs
in its own process, and measurements alternate between processes.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c_bindings
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_sim.errors import EnvironmentProblem
from zero_sim.sim import World

RANKS = 4
_STEPS = 3

Program = Callable[[int], object]
Way = Callable[[Program], AbstractContextManager[Callable[[], object]]]
"""Context manager that yields a function to run a program once, on warm ranks if possible."""


def all_reduce(rank: int) -> None:
    """All-reduce a single element."""
    dist.all_reduce(torch.tensor([float(rank)]))


def train_fsdp2(rank: int) -> None:
    """Train three AdamW steps with FSDP2, sharding each layer separately."""
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    _train(model, rank)


def train_ddp(rank: int) -> None:
    """Train three AdamW steps with DDP."""
    _train(DistributedDataParallel(_model()), rank)


@contextlib.contextmanager
def simulated(program: Program) -> Iterator[Callable[[], object]]:
    """Run on simulated ranks, which stay warm between runs."""
    with World(RANKS) as world:
        yield lambda: world.run(program)


@contextlib.contextmanager
def threaded(program: Program) -> Iterator[Callable[[], object]]:
    """Run on torch's threaded process group. Each run starts new threads, as in torch's tests."""
    from torch.testing._internal.distributed import multi_threaded_pg as peer

    # These torch functions have no types.
    install: Callable[[], object] = peer._install_threaded_pg
    install()
    isolate: Callable[[bool], object] = getattr(c_bindings, "_set_thread_isolation_mode")  # noqa: B009
    # Gives each thread its own process groups, as a process would have.
    isolate(True)
    yield lambda: _on_threads(program)


@contextlib.contextmanager
def in_lock_step(program: Program) -> Iterator[Callable[[], object]]:
    """Run with `LocalTensorMode`, in a fake process group."""
    from torch.distributed._local_tensor import LocalTensorMode

    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=store)

    def run() -> None:
        # A single call runs all ranks.
        with LocalTensorMode(RANKS):
            program(0)

    yield run


WAYS: Mapping[str, Way] = {
    "simulated": simulated,
    "threaded": threaded,
    "in-lock-step": in_lock_step,
}
PROGRAMS: Mapping[str, Program] = {
    "all-reduce": all_reduce,
    "fsdp2": train_fsdp2,
    "ddp": train_ddp,
}


class PeerProcess:
    """A process that runs a program with a peer, to be used in a `with` statement."""

    def __init__(self, way: str, program: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, way, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._name = f"{program} {way}"

    def __enter__(self) -> Self:
        # The first run includes imports and warm-up.
        self.seconds()
        return self

    def __exit__(self, *exception: object) -> None:
        # Closes the input, which ends the loop in `main`.
        self._process.communicate()

    def seconds(self) -> float:
        """Run the program again, and return its processor seconds.

        Raises:
            EnvironmentProblem: It cannot run here.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        # An empty line means that the process has ended.
        answer = self._process.stdout.readline()
        if not answer:
            _, stderr = self._process.communicate()
            why = stderr.strip().splitlines()[-1:] or ["no message"]
            raise EnvironmentProblem(f"expected {self._name} to run, got {why[0]}")
        return float(answer)


def ratio_of(program: str, *, peer: str, repeats: int) -> float:
    """Return a program's median time on a peer, over simulated ranks.

    Args:
        program: Name in `PROGRAMS`.
        peer: Name in `WAYS`.
        repeats: Number of pairs of runs.

    Raises:
        EnvironmentProblem: The peer cannot run it here.
    """
    with PeerProcess(peer, program) as other, PeerProcess("simulated", program) as own:
        return statistics.median(other.seconds() / own.seconds() for _ in range(repeats))


def main(way: str, program: str) -> None:
    """Run a program once for each input line; runs in the process that `PeerProcess` starts."""
    torch.set_num_threads(1)
    with WAYS[way](PROGRAMS[program]) as run:
        for _ in sys.stdin:
            began = time.process_time()
            run()
            sys.stdout.write(f"{time.process_time() - began}\n")
            # The parent process waits for this line.
            sys.stdout.flush()


def _on_threads(program: Program) -> None:
    # Threads lose exceptions, so collect and raise them here.
    raised: list[BaseException] = []
    store = dist.HashStore()

    def on_rank(rank: int) -> None:
        torch.set_num_threads(1)
        # Single-threaded autograd runs backward in the rank's thread, which has the group.
        try:
            with torch.autograd.set_multithreading_enabled(False):
                dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
                program(rank)
                dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def _model() -> nn.Sequential:
    # Equal weights on all ranks.
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 17), nn.Tanh(), nn.Linear(17, 5)
    )


def _train(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(_STEPS):
        # [rows, features], fp32. Values differ by rank, so gradients must be averaged.
        rows = torch.full((8, 13), float(rank + step))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
