"""One process computes the reference for all while values agree; findings do not change."""

import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.judge.test_step_digests import taken
from zero_sim.backends.side_channel import SideChannel
from zero_sim.judge.step_digests import digests_of
from zero_sim.run.real import WiredSteps
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)

OVERFLOW = {
    "data": DataSpec(nan=NanSpec(step=1, rank=1, value="inf")),
    "optimizer": OptimizerSpec(loss_scale=LossScaleSpec()),
}


@pytest.fixture
def steps_taken(on_gloo, told):
    """Run a case; return its result and the number of reference steps of each process."""

    def run(target="counts", **parts):
        result = on_gloo(target, **parts)
        taken = {}
        for path in sorted(told.glob("steps-*")):
            taken[int(path.name.removeprefix("steps-"))] = len(path.read_text().split())
            path.unlink()
        return result, taken

    return run


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"world": WorldSpec(size=3, order="gloo")},
        {"system": SystemSpec(overlap_params=True, bucket_elems=40)},
        {"system": SystemSpec(stage=3)},
        {"model": ModelSpec(name="moe", experts=6), "topology": TopologySpec(ep=3)},
        {"optimizer": OptimizerSpec(name="adamw", clip_norm=0.1)},
    ],
    ids=["plain", "gloo's order", "overlap", "stage 3", "experts", "clipping"],
)
def test_one_process_takes_the_steps_while_all_agree(steps_taken, parts):
    result, taken = steps_taken(**parts)
    assert result.verdict == "pass"
    assert taken == {0: 3}


def test_one_process_takes_the_steps_of_groups_with_a_shared_norm(steps_taken):
    parts = {"world": WorldSpec(size=4), "topology": TopologySpec(tp=2)}
    result, taken = steps_taken(optimizer=OptimizerSpec(clip_norm=0.1), **parts)
    assert result.verdict == "pass"
    assert taken == {0: 6}


def test_wrong_rank_takes_all_steps_itself(steps_taken, judged, targets):
    result, taken = steps_taken("flips_and_counts")
    # Ranks 0 and 2 gathered params that rank 1 corrupted, so all ranks look for a cause.
    assert taken[1] == 2
    simulated = judged(targets.flips, run=RunSpec(steps=3))
    assert result.findings == tuple(
        replace(finding, call_start=None, call_stop=None) for finding in simulated.findings
    )
    assert result.findings[0].rank == 1


@pytest.mark.parametrize(
    "parts",
    [
        {"world": WorldSpec(size=3, order_known=False)},
        {"reload": ReloadSpec(step=1, world_size=2)},
        {"expect": ExpectSpec(one_device=True), "data": DataSpec(ranks="same")},
    ],
    ids=["unknown order", "reload", "one device"],
)
def test_case_without_digests_takes_steps_on_each_process(steps_taken, parts):
    result, taken = steps_taken(**parts)
    assert result.error == ""
    assert not taken or set(taken) == {0, 1, 2}


def test_steps_after_an_overflow_are_taken_on_each_process(steps_taken):
    result, taken = steps_taken(**OVERFLOW)
    assert result.verdict == "pass"
    assert taken == {0: 3, 1: 3, 2: 3}


@pytest.fixture
def ends():
    """Return both ends of a store: the rank that takes the steps, and another rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)

    def of(stall_seconds=0.1):
        ranks = [SideChannel(rank=i, store=each) for i, each in enumerate((store, other))]
        for each in ranks:
            each.begin(0)
        return [WiredSteps(each, stall_seconds=stall_seconds) for each in ranks]

    return of


@pytest.fixture
def step():
    """Return a step and its group."""
    return taken()


def test_shared_step_is_received(ends, step):
    (teller, hearer), (own, group) = ends(), step
    teller.begin(0)
    teller.keep([own], groups=[group])
    assert hearer.find(0) == [digests_of(own, group=group)]
    assert teller.find(0) is None


def test_stop_of_sharing_is_received(ends):
    teller, hearer = ends(3600.0)
    teller.stop(4)
    assert hearer.find(4) is None


def test_step_never_begun_is_not_awaited(ends):
    _, hearer = ends(3600.0)
    assert hearer.find(0) is None


def test_step_begun_but_never_shared_times_out(ends):
    teller, hearer = ends()
    teller.begin(0)
    assert hearer.find(0) is None


def test_slow_step_is_awaited(monkeypatch, ends, step):
    monkeypatch.setattr("zero_sim.run.real._BEGIN_SECONDS", 0.0)
    (teller, hearer), (own, group) = ends(60.0), step
    teller.begin(0)
    later = threading.Timer(0.2, lambda: teller.keep([own], groups=[group]))
    later.start()
    assert hearer.find(0) is not None
    later.join()


def test_close_releases_waiting_ranks(ends, step):
    (teller, hearer), (own, group) = ends(3600.0), step
    teller.begin(0)
    teller.keep([own], groups=[group])
    teller.begin(1)
    teller.close(3)
    assert hearer.find(1) is None
    assert hearer.find(0) is not None
