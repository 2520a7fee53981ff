"""Worlds, worker processes and judge of a pytest session, opened on first use."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from zero_sim.host.packages import packages_needed

if TYPE_CHECKING:
    from zero_sim.findings.records import CaseResult
    from zero_sim.scenario.spec import Scenario
    from zero_sim.sim import World

GPUS = 4
"""Default number of GPUs under `--zero-sim-cuda-is-cpu`."""
RESOURCES: pytest.StashKey[SessionResources] = pytest.StashKey()


class SessionResources:
    """Worlds, worker processes and judge of a session, opened on first use."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.backend: Literal["sim", "gloo", "nccl"] = config.getoption("--zero-sim-backend")
        self.timeout_seconds: float = config.getoption("--zero-sim-timeout")
        self.bundles = Path(config.getoption("--zero-sim-bundles"))
        self.in_rank: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        """Context for a rank's program, entered in its thread."""
        self._stack = contextlib.ExitStack()
        if config.getoption("zero_sim_cuda_is_cpu"):
            self._find_gpus(config.getoption("zero_sim_gpus") or GPUS)
        # By size. Tests share worlds, because a new world starts a thread per rank.
        self._worlds: dict[int, World] = {}
        self._judge: Any = None
        self._teams: Any = None

    def _find_gpus(self, count: int) -> None:
        """Simulate GPUs now, before collection, because test modules check for them."""
        with packages_needed():
            from zero_sim.script.cuda import CudaOnCpu
            from zero_sim.sim.world.rank_threads import rank_state

        cuda = CudaOnCpu(
            device_count=count, rank=lambda: -1 if rank_state.rank is None else rank_state.rank
        )
        self._stack.enter_context(cuda.installed())
        self._stack.enter_context(cuda.in_rank())
        self.in_rank = cuda.in_rank

    def world(self, size: int, settings: Mapping[str, Any]) -> World:
        """Return an open world with these settings, and defaults for all others."""
        from zero_sim.sim import World

        world = self._worlds.get(size)
        # An earlier test may have closed its world.
        if world is None or world.closed:
            world = self._worlds[size] = World(size)
            self._stack.callback(world.close)
        # Set defaults explicitly, because the world keeps the settings of an earlier test.
        named = inspect.signature(World).parameters.values()
        defaults = {p.name: p.default for p in named if p.default is not p.empty}
        world.configure(**{**defaults, **settings})
        return world

    def teams(self) -> Any:
        """Return worker processes for a real backend."""
        if self._teams is None:
            from zero_sim.backends.team import Teams

            # Imported before workers are forked, so that each of them starts fast.
            preload = ("zero_sim.backends.worker", "zero_sim.pytest_plugin.processes")
            self._teams = self._stack.enter_context(Teams(backend=self.backend, preload=preload))
        return self._teams

    def judge(self, scenario: Scenario) -> Any:
        """Run and judge a case."""
        if self._judge is None:
            with packages_needed():
                from zero_sim.rules.judging import EXPLAINER
                from zero_sim.run.judges import Chosen, open_judge
            chosen = Chosen(explainer=EXPLAINER)
            self._judge = self._stack.enter_context(open_judge(chosen, backend=self.backend))
        return self._judge(scenario)

    def write_bundle(self, scenario: Scenario, result: CaseResult) -> str:
        """Write a failed case's bundle and return its id; empty if nothing can be replayed.

        Raises:
            OSError: If the bundle cannot be written.
        """
        # Without findings, a replay has nothing to reproduce.
        if result.verdict != "fail" or not result.findings:
            return ""
        from zero_sim.bundle import Ran, write_bundle

        ran = Ran(backend=self.backend)
        return write_bundle(scenario, result, folder=self.bundles, ran=ran).name

    def close(self) -> None:
        """Close all resources, latest first."""
        self._stack.close()
