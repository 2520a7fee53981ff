"""What hides behind computing, and what does not."""

import math
from dataclasses import replace

import pytest

from zero_sim.cost.counted import counted_model
from zero_sim.cost.network import Compute, Link, Network
from zero_sim.cost.step_time import step_time
from zero_sim.cost.traffic import traffic_of
from zero_sim.run.cost_models import model_of_case
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)

NO_TIME = Link(name="a", gigabytes_per_second=10**9, microseconds=0.0)


def network(*, latency=0.0, speed=1.0, tokens=None):
    """Two ranks on one node; a Tflop/s, so that 10^9 params take 2 ms a token in a forward."""
    link = Link(name="x", gigabytes_per_second=speed, microseconds=latency)
    compute = None if tokens is None else Compute(teraflops=1.0, tokens=tokens)
    return Network(ranks_per_node=2, inside=link, between=NO_TIME, compute=compute)


def case(**parts):
    plain = {"model": ModelSpec(name="params", shapes=((8,),)), "world": WorldSpec(size=2)}
    return Scenario(schema=1, name="case", **(plain | parts))


def timed(params, *, network, stage=1, **system):
    model = counted_model(params, dtype="bf16").with_choice(ranks=2, stage=stage, **system)
    return step_time(model.laid_out(), scenario=model.scenario, rank=0, network=network)


def test_with_one_bucket_nothing_hides():
    time = timed(10**9, network=network(tokens=1000))
    # Of 2 GB a rank of two sends half, twice: reduce-scatter and all-gather; 24 bytes of the norm.
    assert time.compute == pytest.approx(6 * 1e9 * 1000 / 1e12)
    assert time.communication == pytest.approx(2.0 + 24e-9)
    assert time.exposed == pytest.approx(time.communication)


def test_of_buckets_all_but_the_last_sum_and_the_first_gather_hide():
    """Computing takes longer than communicating, so that one bucket each way is exposed."""
    time = timed(10**9, network=network(tokens=10**6), bucket_elems=10**8)
    assert time.exposed == pytest.approx(0.2 + 24e-9)
    assert time.communication == pytest.approx(2.0 + 24e-9)


def test_one_call_a_param_costs_latencies():
    few, many = (
        timed(10**6, network=network(latency=100.0), bucket_elems=elems) for elems in (10**5, 10**2)
    )
    # A reduce-scatter and a gather of one message each, a bucket.
    assert many.communication - few.communication == pytest.approx(
        (10**4 - 10) * 2 * 100e-6, rel=1e-9
    )


def test_the_best_bucket_lies_between():
    sizes = [10**9, 10**8, 10**7, 10**6, 10**5, 10**4]
    times = [
        timed(10**9, network=network(latency=50.0, tokens=1000), bucket_elems=elems).total
        for elems in sizes
    ]
    best = times.index(min(times))
    assert 0 < best < len(sizes) - 1


def test_stage_3_gathers_ahead_of_use():
    ahead, late = (
        timed(10**9, network=network(tokens=10**5), stage=3, bucket_elems=10**8, prefetch=count)
        for count in (1, 0)
    )
    assert ahead.communication == late.communication
    assert ahead.total < late.total


EVERY_CALL = {
    "gathered after the step": case(system=SystemSpec(stage=3, gather_after_step=True)),
    "whole params twice": case(optimizer=OptimizerSpec(name="lamb")),
    "scales": case(model=ModelSpec(name="fp8", hidden=2)),
    "experts beside others": case(
        model=ModelSpec(name="moe", hidden=2),
        world=WorldSpec(size=4),
        topology=TopologySpec(ep=2),
        system=SystemSpec(stage=3),
    ),
}


@pytest.mark.parametrize("scenario", EVERY_CALL.values(), ids=EVERY_CALL)
def test_a_step_takes_as_long_as_all_its_calls(scenario):
    """Each message takes a second, whatever its length, so that no sum is rounded."""
    seconds = network(latency=1e6, speed=math.inf)
    model = model_of_case(scenario)
    said = {"scenario": model.scenario, "rank": 0, "network": replace(seconds, ranks_per_node=8)}
    time = step_time(model.laid_out(), **said)
    assert time.communication == traffic_of(model.laid_out(), **said).seconds


def test_kept_params_are_gathered_once():
    again, kept = (
        timed(10**9, network=network(), stage=3, bucket_elems=10**8, reshard_after_forward=reshard)
        for reshard in (True, False)
    )
    # Nine of ten buckets are gathered once more; each rank sends half of 0.2 GB.
    assert again.communication - kept.communication == pytest.approx(9 * 0.1)
