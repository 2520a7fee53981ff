"""Segments of a case, and the factor of the learning rate."""

import pytest

from zero_sim.run.program import lr_factor, segments_of
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="mlp"),
    world=WorldSpec(size=3),
    system=SystemSpec(bucket_elems=10),
    run=RunSpec(steps=5),
)


def test_case_without_a_reload_is_one_segment(tmp_path):
    (segment,) = segments_of(CASE, folder=tmp_path)
    assert (segment.start, segment.stop, segment.load, segment.save) == (0, 5, None, None)


def test_reload_saves_and_resumes_in_another_world(tmp_path):
    from dataclasses import replace

    case = replace(CASE, reload=ReloadSpec(step=2, world_size=4, redundancy=2))
    before, after = segments_of(case, folder=tmp_path)
    assert (before.start, before.stop, after.start, after.stop) == (0, 2, 2, 5)
    assert before.save == after.load
    assert (after.scenario.world.size, after.scenario.system.redundancy) == (4, 2)
    assert after.scenario.system.bucket_elems == 10


@pytest.mark.parametrize(("warmup_steps", "factors"), [(0, [1, 1, 1]), (2, [0.5, 1, 1])])
def test_warm_up_is_linear(warmup_steps, factors):
    from dataclasses import replace

    case = replace(CASE, optimizer=OptimizerSpec(warmup_steps=warmup_steps))
    assert [lr_factor(case, step) for step in range(3)] == factors
