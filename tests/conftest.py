"""Hypothesis profiles and shared worlds, because opening a world costs more than a test."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.older_torch import provide_names
from tests.profiles import register_profiles
from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.findings.records import CaseResult
from zero_sim.mutants import find_mutants
from zero_sim.scenario.spec import DataSpec, ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.sim import EventLog, World
from zero_sim.sim.schedule import Recipe
from zero_sim.sim.world.run import Run

register_profiles()
provide_names()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _one_terminal() -> Iterator[None]:
    """Make printed output independent of the terminal and the user's settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        for name in ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "PYTEST_ADDOPTS"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _interrupts_heard() -> Iterator[None]:
    """Restore Ctrl-C, which shells disable for background jobs and all their children."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class _RanksEnded:
    """Replacement for the event that all ranks of a run have ended; see `StallClock`."""

    def __init__(self) -> None:
        self.looks = threading.Semaphore(0)
        """Released each time the watching thread begins to wait."""
        self.over = threading.Semaphore(0)
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self.over.release()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        self.looks.release()
        if not self._is_set:
            self.over.acquire()
        return self._is_set


class StallClock:
    """Stall limits that expire only when a rank requests it."""

    def __init__(self) -> None:
        self.run = _RanksEnded()
        """Event of the latest run."""
        self._ran_out = False

    def passes(self, *, times: int) -> None:
        """Let the limit expire `times` times, and wait for the reaction each time."""
        for _ in range(times):
            self.run.looks.acquire()
            self.run.over.release()
        self.run.looks.acquire()
        self.run.looks.release()

    def runs_out(self) -> bool:
        """Let the limit expire for good, for a rank with nothing left to do, and return True."""
        if not self._ran_out:
            self._ran_out = True
            # The first look records the ranks' progress, the second finds none since.
            self.run.over.release(2)
        return True


@pytest.fixture
def stall_clock(monkeypatch: pytest.MonkeyPatch) -> StallClock:
    """A clock that replaces real time in deciding when a rank is stalled."""
    clock, right = StallClock(), World._new_run

    def new_run(world: World, log: EventLog) -> Run:
        run = right(world, log)
        clock.run = _RanksEnded()
        monkeypatch.setattr(run.baton, "all_ended", clock.run)
        return run

    monkeypatch.setattr(World, "_new_run", new_run)
    return clock


@pytest.fixture
def with_enough_time() -> Callable[..., Any]:
    """Call with a time limit, and with longer ones if it was too short for a busy machine."""

    def call(
        attempt: Callable[[float], Any], *, seconds: float, fits: Callable[[Any], bool]
    ) -> Any:
        for factor in (1, 8, 64):
            outcome = attempt(seconds * factor)
            if fits(outcome):
                break
        return outcome

    return call


@pytest.fixture(scope="session")
def _open_worlds() -> Iterator[dict[int, World]]:
    worlds: dict[int, World] = {}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture
def world_of(_open_worlds: dict[int, World]) -> Callable[..., World]:
    """A shared world of the requested size, with default or given settings."""

    def get(
        size: int,
        *,
        order: str = "linear",
        schedule: str | Recipe = "round-robin",
        timing: str = "eager",
        seed: int = 0,
        depth: int = 3,
        races: bool = False,
        strict: bool = True,
    ) -> World:
        world = _open_worlds.get(size)
        if world is None or world.closed:
            world = _open_worlds[size] = World(size)
        world.configure(
            order=order,
            schedule=schedule,
            timing=timing,
            seed=seed,
            depth=depth,
            races=races,
            strict=strict,
            initialized=True,
            faults=(),
        )
        return world

    return get


@pytest.fixture
def lone_group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A gloo group with this process as its only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.fixture
def run_ranks(world_of: Callable[..., World]) -> Callable[..., Any]:
    """Run `program(rank)` on simulated ranks and return the results in rank order and the log."""

    def run(world_size: int, program: Callable[[int], Any]) -> Any:
        world = world_of(world_size)
        return world.run(program), world.log

    return run


@pytest.fixture(scope="session")
def pool() -> Iterator[WorldPool]:
    """Worlds for cases, reused by all tests."""
    with WorldPool() as worlds:
        yield worlds


@pytest.fixture
def judged(pool: WorldPool) -> Callable[..., CaseResult]:
    """Run a small case whose tables are replaced by keyword arguments."""

    def run(
        target: Any = None, *, turns: Any = (), keep_logs: bool = False, **parts: Any
    ) -> CaseResult:
        chosen = {
            "model": ModelSpec(name="mlp", dtype="bf16", hidden=5),
            "world": WorldSpec(size=3),
            "system": SystemSpec(),
            "data": DataSpec(),
            "run": RunSpec(steps=2),
            **parts,
        }
        scenario = Scenario(schema=1, name="case", **chosen)
        return run_case(scenario, pool=pool, target=target, turns=turns, keep_logs=keep_logs)

    return run


@pytest.fixture
def broken() -> Iterator[Callable[[str], None]]:
    """Apply the mutant with the given id until the end of the test."""
    with ExitStack() as stack:

        def apply(id: str) -> None:
            (one,) = find_mutants([id])
            stack.enter_context(one.apply())

        yield apply
