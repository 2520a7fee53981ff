"""Seam between the judge and its reference, for known and unknown order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_sim.errors import UsageError
from zero_sim.judge.comparison import expected_steps_of, take_reference
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.ownership import Ownership
from zero_sim.reference import BoundedReference, Reference
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, WorldSpec
from zero_sim.targets import Numerics
from zero_sim.workloads import build_workload

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="mlp", hidden=3),
    world=WorldSpec(size=3),
    run=RunSpec(steps=2),
)
UNKNOWN = replace(CASE, world=replace(CASE.world, order_known=False))


def reference_of(case, *, before=None):
    return take_reference(case, before=before, workload=build_workload(case))


def steps_of(case):
    reference = reference_of(case)
    group = JudgedGroup(
        scenario=case,
        numerics=Numerics(),
        ownership=Ownership(case, held=reference.held),
        world_ranks=range(case.world.size),
        first_step=0,
        sees_all=True,
    )
    return expected_steps_of(group, reference=reference, order_seed=0).steps


@pytest.mark.parametrize(("case", "kind"), [(CASE, Reference), (UNKNOWN, BoundedReference)])
def test_reference_matches_the_known_order(case, kind):
    assert type(reference_of(case)) is kind


def test_reference_continues_in_another_world():
    before = reference_of(CASE)
    assert reference_of(replace(CASE, world=WorldSpec(size=2)), before=before) is before


def test_unknown_order_cannot_continue():
    with pytest.raises(UsageError, match=r"world\.order_known = false"):
        reference_of(UNKNOWN, before=reference_of(UNKNOWN))


@pytest.mark.parametrize("case", [CASE, UNKNOWN], ids=["known", "unknown"])
def test_step_is_kept_until_forgotten(case):
    source = steps_of(case)
    assert source.steps == {0: source.get(0)}
    source.forget(0)
    assert not source.steps


def test_step_survives_the_next_one():
    source = steps_of(CASE)
    before = {name: master.clone() for name, master in source.get(0).masters.items()}
    source.get(1)
    assert all(before[name].equal(kept) for name, kept in source.steps[0].masters.items())


@pytest.mark.parametrize(("case", "unseen"), [(CASE, True), (UNKNOWN, False)])
def test_only_a_known_order_needs_no_observed_values(case, unseen):
    assert steps_of(case).steps_unseen is unseen
