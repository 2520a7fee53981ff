"""Stand-ins for the parts of PyTorch's test base classes that start the ranks of a test.

The tests, and a suite's setup and teardown in each rank, are unmodified. On processes the only
change is that ranks are forked, which saves each an import of torch. On simulated ranks, a test
method runs as a program of a fresh `World`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import types
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.common_distributed import (
    TEST_SKIPS,
    MultiProcessTestCase,
    MultiThreadedTestCase,
)

from tests.pytorch_suites import suites
from zero_sim.errors import ZeroSimError
from zero_sim.sim import World
from zero_sim.sim.world import c10d

STARTS_RANKS = "starts_ranks"
"""Attribute of a test function that starts its ranks itself, unlike its base class."""

TIMINGS = ("eager", "hostile")


class Rank(threading.local):
    """State of the current thread as a simulated rank."""

    world: World | None = None
    index = 0
    barriers = 0
    groups = 0


rank_state = Rank()


def fork_ranks() -> None:
    """Make suites of processes fork their ranks."""

    def start(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = start


def simulate_ranks(timing: str, *, strict: bool) -> None:
    """Make suites run their ranks in a `World`, under one of its timings.

    Args:
        timing: Name of the timing.
        strict: True if the world refuses calls that gloo accepts and NCCL does not.
    """

    def run(world_size: int, program: Callable[[int], Any]) -> list[Any]:
        return run_ranks(world_size, program, timing=timing, strict=strict)

    MultiProcessTestCase._spawn_processes = lambda self: None
    MultiProcessTestCase._join_processes = functools.partialmethod(_join_processes, run)
    MultiProcessTestCase.run_test = _run_test
    MultiThreadedTestCase._spawn_threads = _spawn_no_threads
    MultiThreadedTestCase.join_or_run = functools.partialmethod(_join_threads_or_run, run)
    MultiThreadedTestCase.run_test_with_threaded_pg = _run_test_with_threaded_group
    common_distributed.spawn_threads_and_init_comms = functools.partial(_threads_decorator, run)
    dist.ProcessGroupGloo = GlooOfRank
    torch.autograd.profiler.profile = NoProfile
    torch.profiler.profile = NoProfile


def put_cpus_for_gpus() -> None:
    """Make suites for GPUs run their ranks on a CPU. Call this before loading a suite."""
    from torch.testing._internal import common_fsdp

    def require_nothing(count: int, **options: Any) -> Callable[[Any], Any]:
        return lambda function: function

    common_distributed.skip_if_lt_x_gpu = require_nothing
    common_fsdp.DEVICE_COUNT = suites.RANKS_FOR_GPUS
    # The name in sources of torch 2.6.
    common_fsdp.test_compiled_fsdp = common_fsdp.compiled_fsdp_test
    torch.accelerator.device_count = lambda: suites.RANKS_FOR_GPUS


def adapt_installed_suite() -> None:
    """Give torch's `distributed_test` barriers and process ids that differ by rank."""
    from torch.testing._internal.distributed import distributed_test

    distributed_test.Barrier.sync = classmethod(_sync)
    distributed_test.os = _OsOfRank()
    # The stand-in for the profiler does not record these.
    distributed_test.PROFILING_SUPPORTED_BACKENDS = []
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []


def starts_ranks(test: unittest.TestCase) -> bool:
    """True if a test runs on several ranks, not just in its own process."""
    function = getattr(type(test), test._testMethodName)
    return hasattr(function, STARTS_RANKS) or isinstance(
        test, (MultiProcessTestCase, MultiThreadedTestCase)
    )


def run_ranks(
    world_size: int, program: Callable[[int], Any], *, timing: str, strict: bool = True
) -> list[Any]:
    """Run a program on the ranks of a fresh world; return each rank's result or exit code."""

    def enter(rank: int) -> Any:
        rank_state.world, rank_state.index, rank_state.groups = world, rank, 0
        try:
            return program(rank)
        except SystemExit as ended:
            return ended.code
        except unittest.SkipTest:
            return TEST_SKIPS["generic"].exit_code

    with World(world_size, timing=timing, strict=strict, initialized=False) as world:
        return world.run(enter)


def _join_processes(self: Any, run: Callable[..., list[Any]], fn: Callable[[], None]) -> None:
    name = self._current_test_name()
    codes = run(
        int(self.world_size), lambda rank: type(self)._run(rank, name, self.file_name, None)
    )
    _raise_skip(codes)
    expected = self.special_return_code_checks.get(fn, 0)
    if (codes[0] or 0) != expected:
        raise AssertionError(f"expected rank 0 to exit with {expected}, got {codes[0]}")


def _run_test(self: Any, test_name: str, parent_pipe: Any) -> None:
    common_utils.set_rng_seed()
    getattr(self, test_name)()
    if self.destroy_pg_upon_exit:
        with contextlib.suppress(AssertionError, ValueError):
            dist.destroy_process_group()


def _raise_skip(codes: list[Any]) -> None:
    for skip in TEST_SKIPS.values():
        if codes[0] == skip.exit_code:
            raise unittest.SkipTest(skip.message)


def _spawn_no_threads(self: Any) -> None:
    type(self).global_store = None


def _join_threads_or_run(self: Any, run: Callable[..., list[Any]], fn: Callable[[], None]) -> Any:
    @functools.wraps(fn)
    def wrapper(self: Any) -> None:
        if self.rank != self.MAIN_THREAD_RANK:
            fn()
            return
        size, name = self.world_size, self._current_test_name
        _raise_skip(run(size, lambda rank: type(self)._run(name, rank, size)))

    return types.MethodType(wrapper, self)


def _run_test_with_threaded_group(self: Any, test_name: str, rank: int, world_size: int) -> None:
    dist.init_process_group("threaded", rank=rank, world_size=world_size)
    self.perThreadSetUp()
    getattr(self, test_name)()
    with contextlib.suppress(AssertionError, ValueError):
        dist.destroy_process_group()
    self.perThreadTearDown()


def _threads_decorator(
    run: Callable[..., list[Any]],
    func: Any = None,
    timeout: Any = None,
    world_size: int = common_distributed.DEFAULT_WORLD_SIZE,
) -> Any:
    if func is None:
        return functools.partial(_threads_decorator, run, world_size=world_size)

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        def program(rank: int) -> None:
            dist.init_process_group("threaded", rank=rank, world_size=world_size)
            func(self, *args, **kwargs)

        def run_all() -> list[Any]:
            try:
                return run(world_size, program)
            except ZeroSimError as error:
                # The starter of the threads expects a RuntimeError.
                raise RuntimeError(str(error)) from error

        if c10d.rank_state.rank is None:
            _raise_skip(run_all())
            return
        # The test has a decorated function inside, but is none itself.
        with ThreadPoolExecutor(1) as beside:
            codes = beside.submit(run_all).result()
        _raise_skip(codes)

    setattr(wrapper, STARTS_RANKS, True)
    return wrapper


def _sync(cls: Any, wait_for: int | None = None, timeout: float = 10) -> None:
    world = rank_state.world
    assert world is not None
    rank_state.barriers += 1
    key = f"pytorch_suites/barrier/{rank_state.barriers}"
    if world._store.add(f"{key}/arrived", 1) == (wait_for or world.world_size):
        world._store.set(key, "all")
    world._store.wait([key])


class _OsOfRank:
    """Replacement for the module `os`, with another process id on each simulated rank."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def getpid(self) -> int:
        """Return a number that is unique to the rank."""
        return os.getpid() + rank_state.index


class GlooOfRank:
    """Create a simulated group of all ranks if a test constructs gloo's object.

    The real object connects to its peers in C++, which blocks if all ranks share a process.
    """

    _Options = dist.ProcessGroupGloo._Options
    create_device = dist.ProcessGroupGloo.create_device

    def __new__(cls, store: Any, rank: int, size: int, *options: Any) -> Any:
        """Return the calling rank's next group."""
        assert c10d.rank_state.make_group is not None
        rank_state.groups += 1
        name = f"gloo {rank_state.groups}"
        group = c10d.rank_state.make_group(name, list(range(size)), rank)
        timeout = getattr(options[0], "_timeout", options[0]) if options else None
        group.ask_for("gloo", timeout=timeout)
        return group


class NoProfile(contextlib.AbstractContextManager):
    """A profiler that records nothing, because torch's own fails if two threads use it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.function_events: list[Any] = []

    def __exit__(self, *exception: object) -> None:
        pass

    def events(self) -> list[Any]:
        """Return an empty list."""
        return self.function_events

    def key_averages(self) -> list[Any]:
        """Return an empty list."""
        return self.function_events

    def step(self) -> None:
        """Do nothing."""
