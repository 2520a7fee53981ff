"""Named orders of addition over real gloo processes."""

import importlib.util
from pathlib import Path

import pytest

from zero_sim.sim import World


def _collectives_of():
    spec = importlib.util.spec_from_file_location("jobs", Path(__file__).with_name("jobs.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.collectives_of


@pytest.mark.parametrize("order", ["linear", "linear-fp32", "ring", "tree"])
def test_collectives_give_the_bits_of_the_simulated_world(run_job, order):
    size, program = 3, _collectives_of()
    with World(size, order=order) as world:
        simulated = world.run(lambda rank: program(rank, size))
    endings = run_job("every_collective", size, order=order)
    assert [ending.result for ending in endings] == simulated


def test_plain_gloo_adds_in_another_order(run_job):
    size, program = 4, _collectives_of()
    with World(size) as world:
        simulated = world.run(lambda rank: program(rank, size))
    real = [ending.result for ending in run_job("every_collective", size, order=None)]
    name = "all_reduce torch.float32"
    assert real[0][name] != simulated[0][name]
    assert real[0]["all_gather"] == simulated[0]["all_gather"]
