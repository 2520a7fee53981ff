"""NCCL workers on its stand-in: all code around CUDA runs as with one GPU per worker."""

import sys
from pathlib import Path

import pytest

from tests.backends.test_folding import _collectives_of
from zero_sim.backends.team import Teams
from zero_sim.errors import EnvironmentProblem
from zero_sim.sim import World

HERE = Path(__file__).parent


@pytest.fixture
def gpus(monkeypatch):
    """Workers on a machine with four devices."""
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])
    monkeypatch.setenv("ZERO_SIM_TEST_GPUS", "4")
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)

    def open_teams():
        return Teams(backend="nccl", preload=("preload_standin", "zero_sim.backends.worker"))

    return open_teams


def run(teams, job, size, **payload):
    payload = {"size": size, **payload}
    return teams.run(f"jobs:{job}", payload, size=size, timeout_seconds=600.0)


@pytest.mark.parametrize("order", [None, "tree"])
def test_collectives_give_simulated_bits_plain_and_folded(gpus, order):
    size, program = 3, _collectives_of()
    with World(size, order=order or "nccl-ring") as world:
        simulated = world.run(lambda rank: program(rank, size))
    with gpus() as teams:
        endings = run(teams, "every_collective", size, order=order)
    assert [ending.result for ending in endings] == simulated


def test_failed_rank_replaces_all_workers(gpus):
    with gpus() as teams:
        before = [ending.result["pid"] for ending in run(teams, "add_ranks", 2)]
        failed = run(teams, "leave_a_collective_open", 2)
        after = [ending.result["pid"] for ending in run(teams, "add_ranks", 2)]
    assert [ending.how for ending in failed] == ["raised", "raised"]
    assert not set(before) & set(after)


def test_dead_rank_fails_only_its_job(gpus):
    with gpus() as teams:
        died = run(teams, "die", 2)
        again = run(teams, "add_ranks", 2)
    assert died[1].error == "its process ended with exit status 7"
    assert [ending.result["total"] for ending in again] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "value", "size", "said"),
    [
        ("NCCL_ALGO", "Tree", 2, "NCCL_ALGO='Tree', expected 'Ring'"),
        ("ZERO_SIM_TEST_GPUS", "2", 3, "expected a GPU for local rank 2, but this machine has 2"),
        ("ZERO_SIM_TEST_GPUS", "1", 2, "got ranks 0 and 1 on"),
        ("ZERO_SIM_TEST_GPU_NAMES", "A,B", 2, "expected the same GPU for all ranks"),
    ],
)
def test_unsuitable_machine_is_refused_before_the_first_job(
    gpus, monkeypatch, name, value, size, said
):
    monkeypatch.setenv(name, value)
    with gpus() as teams, pytest.raises(EnvironmentProblem) as raised:
        run(teams, "add_ranks", size)
    assert said in str(raised.value)
