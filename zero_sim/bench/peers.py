"""Peers: the same programs on torch's own ways of running many ranks in one process.

Its threaded process group has a thread a rank and no baton; what it computes depends on which
thread comes first where they share random numbers. `LocalTensorMode` has all ranks in one thread,
in lock-step, and runs no program that branches on its rank. Each replaces what torch keeps once a
process, so each way has a process of its own, and they are asked in turns.
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
"""Gives what runs a program once on ranks that are there already, if the way has such."""


def all_reduce(rank: int) -> None:
    """One all_reduce of one element."""
    dist.all_reduce(torch.tensor([float(rank)]))


def train_fsdp2(rank: int) -> None:
    """Three AdamW steps of FSDP2, each layer sharded by itself."""
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    _train(model, rank)


def train_ddp(rank: int) -> None:
    """Three AdamW steps of DDP."""
    _train(DistributedDataParallel(_model()), rank)


@contextlib.contextmanager
def simulated(program: Program) -> Iterator[Callable[[], object]]:
    """Simulated ranks that stay."""
    with World(RANKS) as world:
        yield lambda: world.run(program)


@contextlib.contextmanager
def threaded(program: Program) -> Iterator[Callable[[], object]]:
    """A threaded process group, torch's: threads and groups anew each time, as in its tests."""
    from torch.testing._internal.distributed import multi_threaded_pg as peer

    # The ways into it have no types.
    install: Callable[[], object] = peer._install_threaded_pg
    install()
    isolate: Callable[[bool], object] = getattr(c_bindings, "_set_thread_isolation_mode")  # noqa: B009
    isolate(True)
    yield lambda: _on_threads(program)


@contextlib.contextmanager
def in_lock_step(program: Program) -> Iterator[Callable[[], object]]:
    """`LocalTensorMode`, whose ranks have a group that is made for nothing else."""
    from torch.distributed._local_tensor import LocalTensorMode

    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=store)

    def run() -> None:
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


class Asked:
    """A way of running a program, in a process of its own; to be closed."""

    def __init__(self, way: str, program: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, way, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._what = f"{program} {way}"

    def __enter__(self) -> Self:
        self.seconds()
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()

    def seconds(self) -> float:
        """Processor seconds of running it once more.

        Raises:
            EnvironmentProblem: It cannot be run here.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            _, said = self._process.communicate()
            why = said.strip().splitlines()[-1:] or ["nothing said"]
            raise EnvironmentProblem(f"expected {self._what} to run, got {why[0]}")
        return float(answer)


def ratio_of(program: str, *, peer: str, repeats: int) -> float:
    """How often a program on simulated ranks fits into the same on a peer; the median of pairs.

    Args:
        program: One of `PROGRAMS`.
        peer: One of `WAYS`.
        repeats: How many pairs.

    Raises:
        EnvironmentProblem: The peer cannot run it here.
    """
    with Asked(peer, program) as other, Asked("simulated", program) as own:
        return statistics.median(other.seconds() / own.seconds() for _ in range(repeats))


def main(way: str, program: str) -> None:
    """Body of the process that `Asked` starts: a run of the program for each line that it reads."""
    torch.set_num_threads(1)
    with WAYS[way](PROGRAMS[program]) as run:
        for _ in sys.stdin:
            began = time.process_time()
            run()
            sys.stdout.write(f"{time.process_time() - began}\n")
            sys.stdout.flush()


def _on_threads(program: Program) -> None:
    raised: list[BaseException] = []
    store = dist.HashStore()

    def on_rank(rank: int) -> None:
        torch.set_num_threads(1)
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
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 17), nn.Tanh(), nn.Linear(17, 5)
    )


def _train(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(_STEPS):
        rows = torch.full((8, 13), float(rank + step))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
