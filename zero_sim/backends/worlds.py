"""Simulated worlds that stay open between cases, because set-up would dominate small cases."""

from __future__ import annotations

from dataclasses import asdict
from typing import Self

from zero_sim.host.dynamo import defer_dynamo
from zero_sim.host.garbage import spare_imports
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import Fault, World

# Each world keeps one thread per rank.
WORLDS_OPEN_MAX = 8


class WorldPool:
    """Open worlds by size. If there are too many, the least recently used world is closed."""

    def __init__(self, *, worlds_open_max: int = WORLDS_OPEN_MAX) -> None:
        # Before the first world is made, because torch's process groups import the compiler.
        defer_dynamo()
        spare_imports()
        self._worlds_open_max = worlds_open_max
        self._worlds: dict[int, World] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def world_for(self, scenario: Scenario) -> World:
        """Return a world with a scenario's size and settings. Only one case may run at a time."""
        size = scenario.world.size
        world = self._worlds.pop(size, None)
        # A failed case may have closed its world.
        if world is not None and world.closed:
            world = None
        if world is None:
            world = World(size)
            while len(self._worlds) >= self._worlds_open_max:
                self._worlds.pop(next(iter(self._worlds))).close()
        # The most recently used world is last in the dict.
        self._worlds[size] = world
        world.configure(
            order=scenario.world.order,
            schedule=scenario.world.schedule,
            timing=scenario.world.timing,
            seed=scenario.run.seed,
            races=scenario.world.races,
            strict=scenario.world.strict,
            stall_seconds=scenario.run.stall_seconds,
            # The world does not know scenario records.
            faults=[Fault(**asdict(spec)) for spec in scenario.faults],
        )
        return world

    def close(self) -> None:
        """Close every world."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
