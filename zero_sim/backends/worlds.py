"""Simulated worlds kept open from case to case, so that set-up does not dominate a small case."""

from __future__ import annotations

from dataclasses import asdict
from typing import Self

from zero_sim.host.dynamo import defer_dynamo
from zero_sim.host.garbage import spare_imports
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import Fault, World

WORLDS_OPEN_MAX = 8


class WorldPool:
    """Open worlds by size; the least recently used one is closed when there are too many."""

    def __init__(self, *, worlds_open_max: int = WORLDS_OPEN_MAX) -> None:
        defer_dynamo()
        spare_imports()
        self._worlds_open_max = worlds_open_max
        self._worlds: dict[int, World] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def world_for(self, scenario: Scenario) -> World:
        """A world of the scenario's size, set to all that the scenario says of it.

        Args:
            scenario: The case that will run on it; only one case may at a time.
        """
        size = scenario.world.size
        world = self._worlds.pop(size, None)
        if world is not None and world.closed:
            world = None
        if world is None:
            world = World(size)
            while len(self._worlds) >= self._worlds_open_max:
                self._worlds.pop(next(iter(self._worlds))).close()
        self._worlds[size] = world
        world.configure(
            order=scenario.world.order,
            schedule=scenario.world.schedule,
            timing=scenario.world.timing,
            seed=scenario.run.seed,
            races=scenario.world.races,
            strict=scenario.world.strict,
            stall_seconds=scenario.run.stall_seconds,
            faults=[Fault(**asdict(spec)) for spec in scenario.faults],
        )
        return world

    def close(self) -> None:
        """Close every world."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
