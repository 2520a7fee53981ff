"""A broken system, and a bundle of its failure."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from zero_sim import run_case
from zero_sim.bundle import read_bundle, write_bundle
from zero_sim.scenario.spec import ModelSpec, ReloadSpec, RunSpec, Scenario, WorldSpec
from zero_sim.zero.optimizer import DistributedOptimizer


@contextlib.contextmanager
def broken_division():
    """Skip the division of sums on two ranks: a case that reloads fails in its second world."""
    right = DistributedOptimizer.step

    def undivided(self):
        if dist.get_world_size() == 2:
            with torch.no_grad():
                self.ddp.divisor.fill_(1.0)
        return right(self)

    DistributedOptimizer.step = undivided
    try:
        yield
    finally:
        DistributedOptimizer.step = right


@pytest.fixture(scope="session")
def scenario():
    """Three ranks, then two, in random turns."""
    return Scenario(
        schema=1,
        name="broken/size=3",
        model=ModelSpec(name="mlp", dtype="bf16", hidden=5),
        world=WorldSpec(size=3, schedule="random"),
        run=RunSpec(steps=2, seed=7),
        reload=ReloadSpec(step=1, world_size=2),
    )


@pytest.fixture(scope="session")
def failed(scenario, pool):
    """Result of the case in the broken system."""
    with broken_division():
        return run_case(scenario, pool=pool)


@pytest.fixture
def broken():
    """The broken system, for the time of a test."""
    with broken_division():
        yield


@pytest.fixture
def folder(tmp_path):
    """Folder for bundles."""
    return tmp_path / "bundles"


@pytest.fixture
def path(scenario, failed, folder):
    """Path of a bundle of the failed case."""
    return write_bundle(scenario, failed, folder=folder)


@pytest.fixture
def bundle(path):
    return read_bundle(path)
