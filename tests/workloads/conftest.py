"""Scenarios for the tests of the workloads."""

from __future__ import annotations

import pytest

from zero_sim.scenario.spec import DataSpec, ModelSpec, RunSpec, Scenario, WorldSpec


@pytest.fixture
def make_scenario():
    """Return a function from a model's name and settings to a scenario of two ranks."""

    def make(name, *, data=None, run=None, world=None, **model):
        return Scenario(
            schema=1,
            model=ModelSpec(name=name, **model),
            data=data or DataSpec(),
            run=run or RunSpec(),
            world=world or WorldSpec(),
        )

    return make
