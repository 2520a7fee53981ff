"""Profiles of Hypothesis, and worlds shared by all tests: opening one costs more than a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from zero_sim.fuzz.profiles import register_profiles
from zero_sim.sim import World
from zero_sim.sim.schedule import Recipe

register_profiles()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def _open_worlds() -> Iterator[dict[int, World]]:
    worlds: dict[int, World] = {}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture
def world_of(_open_worlds: dict[int, World]) -> Callable[..., World]:
    """A shared world of the wanted size, set to the defaults or to what is given."""

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
        )
        return world

    return get
