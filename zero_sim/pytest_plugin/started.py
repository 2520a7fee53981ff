"""`--zero-sim-spawn`: a test's own processes run as ranks in pytest's process.

Suites that use `torch.multiprocessing.spawn` or torch's `MultiProcessTestCase` run unchanged.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from zero_sim.errors import UsageError
from zero_sim.pytest_plugin.resources import RESOURCES

if TYPE_CHECKING:
    from zero_sim.script.started_ranks import RankPopen

_OPTIONS = ("timing", "schedule", "seed", "races", "strict")
"""`World` arguments with a command-line option."""


def add_options(parser: pytest.Parser, group: pytest.OptionGroup) -> None:
    """Add the options for tests that start processes."""
    parser.addini(
        "zero_sim_rank_local",
        "With --zero-sim-spawn: names with a separate value for each rank, such as "
        "package.module:GLOBAL, module:Class.attribute, module:function(argument) or module:*.",
        type="linelist",
        default=[],
    )
    group.addoption(
        "--zero-sim-spawn",
        action="store_true",
        help="Run processes that tests start (torch.multiprocessing.spawn, MultiProcessTestCase, "
        "multiprocessing.Process) as simulated ranks in the process of pytest.",
    )
    group.addoption(
        "--zero-sim-timing",
        choices=("eager", "lazy", "hostile"),
        help="With --zero-sim-spawn: when operations read and write (default: eager).",
    )
    group.addoption(
        "--zero-sim-schedule",
        choices=("round-robin", "random", "pct"),
        help="With --zero-sim-spawn: which rank runs next (default: round-robin).",
    )
    group.addoption(
        "--zero-sim-seed",
        type=int,
        metavar="N",
        help="With --zero-sim-spawn: seed of schedule, timing and random numbers (default: 0).",
    )
    group.addoption(
        "--zero-sim-races",
        action="store_true",
        # None, because False would look like a given option to `check_options`.
        default=None,
        help="With --zero-sim-spawn: check every operation for uses of memory in flight.",
    )
    group.addoption(
        "--zero-sim-no-strict",
        dest="zero_sim_strict",
        action="store_const",
        const=False,
        help="With --zero-sim-spawn: accept calls that gloo accepts and NCCL does not.",
    )


def check_options(config: pytest.Config) -> None:
    """Refuse options without effect.

    Raises:
        pytest.UsageError: If an option lacks or excludes another.
    """
    for name in ("spawn", "cuda_is_cpu"):
        if config.getoption(f"zero_sim_{name}") and config.getoption("zero_sim_backend") != "sim":
            raise pytest.UsageError(
                f"expected --zero-sim-{name.replace('_', '-')} or another --zero-sim-backend than "
                "sim, got both. Omit one: on a backend, tests run on real processes and devices."
            )
    gpus = config.getoption("zero_sim_gpus")
    if gpus is not None and (gpus < 1 or not config.getoption("zero_sim_cuda_is_cpu")):
        raise pytest.UsageError(
            "expected --zero-sim-cuda-is-cpu with --zero-sim-gpus and a positive number, got "
            f"{gpus}. Add --zero-sim-cuda-is-cpu, or omit --zero-sim-gpus."
        )
    if config.getoption("zero_sim_spawn"):
        return
    for name in _OPTIONS:
        if config.getoption(f"zero_sim_{name}") is not None:
            option = "no-strict" if name == "strict" else name
            raise pytest.UsageError(
                f"expected --zero-sim-spawn with --zero-sim-{option}, got it alone. Add "
                "--zero-sim-spawn, or give settings of marked tests in their marks."
            )


def processes_as_ranks(config: pytest.Config) -> AbstractContextManager[None]:
    """Run a test's own processes as ranks, under `--zero-sim-spawn`."""
    if not config.getoption("zero_sim_spawn"):
        return contextlib.nullcontext()
    return _as_ranks(config)


@contextlib.contextmanager
def _as_ranks(config: pytest.Config) -> Iterator[None]:
    from zero_sim.script.remote_calls import remote_calls_refused
    from zero_sim.script.started_ranks import StartedRanks, started_as_ranks

    names: list[str] = list(config.getini("zero_sim_rank_local"))
    ranks = StartedRanks(lambda processes: _run(processes, config, names), all_own=True)
    with (
        started_as_ranks(ranks, stall_seconds=_stall_seconds()),
        remote_calls_refused(),
        _world_per_test(names),
    ):
        yield


@contextlib.contextmanager
def _world_per_test(names: list[str]) -> Iterator[None]:
    """End the processes of torch's `MultiProcContinuousTest` after each test.

    Args:
        names: Receives the rank-local attributes of the test's class.
    """
    module = sys.modules.get("torch.testing._internal.common_distributed")
    if module is None:
        yield
        return
    case = module.MultiProcContinuousTest
    set_up = case.setUp

    def set_up_and_end(self: Any) -> None:
        set_up(self)
        kind = type(self)
        names.extend(f"{kind.__module__}:{kind.__qualname__}.{name}" for name in ("pg", "rank"))
        # Ranks run only when the test waits for them, so queue the end of their loop now.
        for queue in self.task_queues:
            queue.put(None)
        # The next test spawns new processes.
        kind._processes_spawned = False

    with mock.patch.object(case, "setUp", set_up_and_end):
        yield


def _stall_seconds() -> float:
    from zero_sim.sim.world.settings import WorldSettings

    return WorldSettings().stall_seconds


def _run(processes: Sequence[RankPopen], config: pytest.Config, names: Sequence[str]) -> None:
    """Run processes as ranks that share all modules except for rank-local names."""
    from zero_sim.script.rank_local_names import NoSuchName, find_slots
    from zero_sim.script.rank_state import RankState
    from zero_sim.script.settings import SINGLETONS
    from zero_sim.sim import RankFailed, World

    given = {name: config.getoption(f"zero_sim_{name}") for name in _OPTIONS}
    settings = {name: value for name, value in given.items() if value is not None}
    in_rank = config.stash[RESOURCES].in_rank
    # Check names here, so that the error names the ini option.
    for name in names:
        try:
            find_slots(name)
        except NoSuchName as error:
            pytest.fail(f"expected a name in zero_sim_rank_local, got {name}: {error}")
    known = [name for name in SINGLETONS if name.partition(":")[0] in sys.modules]
    # Singletons of imported libraries such as accelerate.
    state = RankState(environment=lambda rank: {}, folder=None, names=[*known, *names])

    def program(rank: int) -> None:
        with in_rank():
            processes[rank].run_program(None)

    try:
        with World(len(processes), initialized=False, rank_local=state, **settings) as world:
            world.run(program)
    except UsageError as error:
        pytest.fail(f"expected options that fit the ranks of this test: {error}", pytrace=False)
    except RankFailed as failed:
        # As a process would. The test itself only gets an exit code.
        sys.stderr.write(f"rank {failed.rank}:\n{failed.traceback_text}")
        raise
    finally:
        state.forget()
