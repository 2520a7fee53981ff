"""Late timings: zero_sim's own system passes, and faults of overlap fail."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from zero_sim.scenario.spec import RunSpec, SystemSpec, WorldSpec
from zero_sim.zero.states import GradState
from zero_sim.zero.unit import Unit

SYSTEMS = {
    "plain": SystemSpec(bucket_elems=60),
    "overlap": SystemSpec(bucket_elems=60, overlap_grads=True, overlap_params=True),
    "redundancy": SystemSpec(
        bucket_elems=60, overlap_grads=True, overlap_params=True, redundancy=2
    ),
    "grads-only": SystemSpec(bucket_elems=60, overlap_grads=True, stage=0),
}
LATE = [("lazy", 0), ("hostile", 0), ("hostile", 1)]


@pytest.mark.parametrize("schedule", ["random", "pct"])
@pytest.mark.parametrize(("timing", "seed"), LATE)
@pytest.mark.parametrize("name", SYSTEMS)
def test_own_system_passes_under_late_timings(judged, pool, name, timing, seed, schedule):
    world = WorldSpec(size=4, timing=timing, schedule=schedule)
    result = judged(
        system=SYSTEMS[name], world=world, run=RunSpec(steps=2, micro_batches=2, seed=seed)
    )
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize(
    ("timing", "verdict"), [("eager", "pass"), ("lazy", "fail"), ("hostile", "fail")]
)
def test_missing_wait_passes_only_in_an_eager_world(judged, monkeypatch, timing, verdict):
    def finish_reduce(self):
        dist.barrier()
        self._reducing, self.grad_state = None, GradState.REDUCED

    monkeypatch.setattr(Unit, "finish_reduce", finish_reduce)
    # A strict world would report works without a wait under any timing.
    world = WorldSpec(size=3, timing=timing, strict=False)
    result = judged(system=SYSTEMS["overlap"], world=world)
    assert result.verdict == verdict


def test_race_in_flight_is_a_finding_with_its_rank(judged, broken):
    broken("Y04")
    overlap = replace(SYSTEMS["overlap"], sync="every")
    result = judged(system=overlap, world=WorldSpec(size=2, timing="lazy"))
    assert result.findings[0].check == "world.in-flight-race"
    assert result.findings[0].rank is not None
    assert "reduce_scatter" in result.findings[0].message
