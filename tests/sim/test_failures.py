"""Failures keep their cause and attributes when they are sent between processes."""

import pickle

import pytest

from zero_sim.errors import Problem, ScenarioError
from zero_sim.sim import ContractViolation, Deadlock, InFlightRace, RankFailed, RankStalled, World
from zero_sim.sim.failures import LentMemory

FAILURES = (
    ContractViolation("no", aspect="dtype", rank=1, other_rank=0),
    Deadlock((), cycle=("rank 0 waits",)),
    InFlightRace(
        "no",
        rank=1,
        memory=LentMemory(operation="all_reduce", site="a.py:1", dtype="f", shape=(2,)),
        detail="",
        hint="",
    ),
    RankStalled(1, 2.0, "here"),
    ScenarioError("a.toml", [Problem(path="world.size", message="no")]),
)


def raises_on_rank_1(rank):
    if rank == 1:
        raise ValueError("my own mistake")


@pytest.fixture
def rank_failed():
    with World(2) as world, pytest.raises(RankFailed) as caught:
        world.run(raises_on_rank_1)
    return caught.value


def test_unpickled_failure_keeps_its_cause(rank_failed):
    copy = pickle.loads(pickle.dumps(rank_failed))
    assert (str(copy), copy.rank, copy.report) == (
        str(rank_failed),
        rank_failed.rank,
        rank_failed.report,
    )
    assert isinstance(copy.__cause__, ValueError)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_failure_can_be_pickled(failure):
    copy = pickle.loads(pickle.dumps(failure))
    assert (type(copy), str(copy), vars(copy)) == (type(failure), str(failure), vars(failure))
