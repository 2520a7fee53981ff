"""Effort of a case, estimated without running it, and the bounds on steps and chunks."""

from dataclasses import replace

import pytest

from zero_sim.fuzz.effort import CHUNKS_MAX, EFFORT_MAX, chunk_within, effort_of, steps_within
from zero_sim.scenario.spec import ModelSpec, ReloadSpec, RunSpec, Scenario, SystemSpec, WorldSpec

SIZES = [4, 4, 4]
CASE = Scenario(
    schema=1, model=ModelSpec(name="params", shapes=((4,), (4,), (4,))), run=RunSpec(steps=2)
)


@pytest.mark.parametrize(
    "more",
    [
        {"world": WorldSpec(size=3)},
        {"world": WorldSpec(timing="lazy")},
        {"world": WorldSpec(races=True)},
        {"system": SystemSpec(bucket_elems=1)},
        {"run": RunSpec(steps=3)},
        {"run": RunSpec(steps=2, micro_batches=2)},
        {"reload": ReloadSpec(step=1)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_more_work_is_more_effort(more):
    assert effort_of(replace(CASE, **more), sizes=SIZES) > effort_of(CASE, sizes=SIZES)


def test_ranks_after_a_reload_count_for_later_steps():
    few, many = (
        replace(CASE, reload=ReloadSpec(step=1, world_size=ranks), run=RunSpec(steps=3))
        for ranks in (1, 8)
    )
    assert effort_of(few, sizes=SIZES) < effort_of(many, sizes=SIZES)


def test_steps_fill_the_effort_budget():
    large = replace(CASE, world=WorldSpec(size=8))
    most = steps_within(large, sizes=SIZES, most=100)
    within, above = (replace(large, run=RunSpec(steps=steps)) for steps in (most, most + 1))
    assert effort_of(within, sizes=SIZES) <= EFFORT_MAX < effort_of(above, sizes=SIZES)


def test_huge_case_keeps_two_steps():
    huge = replace(CASE, world=WorldSpec(size=12, races=True, timing="hostile"))
    assert steps_within(huge, sizes=[1] * 500, most=4) == 2
    assert steps_within(huge, sizes=[1] * 500, most=1) == 1


CHUNKED = replace(
    CASE, world=WorldSpec(size=4), system=SystemSpec(stage=1, align_elems=50, gather_chunk_elems=4)
)
"""Shards of 50 elements, gathered in chunks of 4. Two of the four ranks hold no params."""


def test_more_gather_chunks_are_more_effort():
    few = replace(CHUNKED, system=replace(CHUNKED.system, gather_chunk_elems=100))
    assert effort_of(CHUNKED, sizes=SIZES) > effort_of(few, sizes=SIZES)


def test_bucket_has_a_bounded_number_of_gather_chunks():
    chunk = chunk_within(CHUNKED, sizes=SIZES)
    assert -(-50 // (chunk // 4)) <= CHUNKS_MAX < 50


def test_few_chunks_are_not_changed():
    few = replace(CHUNKED, system=replace(CHUNKED.system, gather_chunk_elems=100))
    assert chunk_within(few, sizes=SIZES) == 100
    assert chunk_within(CASE, sizes=SIZES) is None
