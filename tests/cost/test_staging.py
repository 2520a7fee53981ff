"""Staging in closed form: as long as a buffer, for any number of params."""

import pytest

from zero_sim.calculators.footprint import footprint_of
from zero_sim.cost.forms import ParamSize
from zero_sim.cost.staging import owned_lengths, staged_bytes, staging_peak
from zero_sim.scenario.spec import ModelSpec, Scenario, SystemSpec, WorldSpec


def sizes(*elems):
    return [
        ParamSize(
            name=f"p{i}", kind="dense", dtype="torch.float32", elems=e, param_bytes=4, grad_bytes=4
        )
        for i, e in enumerate(elems)
    ]


def case(ranks=1, **system):
    return Scenario(
        schema=1,
        model=ModelSpec(name="params", shapes=((1,),)),
        world=WorldSpec(size=ranks),
        system=SystemSpec(**system),
    )


def test_parts_are_cut_at_shard_borders():
    scenario = case(2)
    assert owned_lengths(sizes(3, 5, 2), scenario=scenario, rank=0) == [3, 2]
    assert owned_lengths(sizes(3, 5, 2), scenario=scenario, rank=1) == [3, 2]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("buffer", "given", "peak"), [(4, 20, 36), (8, 32, 32), (None, 44, 44)])
def test_bytes_by_stage_and_buffer(stage, buffer, given, peak):
    scenario = case(stage=stage, step_buffer_elems=buffer)
    params = sizes(3, 5, 2, 1)
    assert staged_bytes(params, scenario=scenario, rank=0) == given
    assert staging_peak(params, scenario=scenario, rank=0) == peak
    assert footprint_of(params, scenario=scenario, rank=0).moments["step"]["staging"] in (0, peak)


def test_peak_does_not_depend_on_the_number_of_params():
    scenario = case(step_buffer_elems=4)
    peaks = {staging_peak(sizes(*[3] * n), scenario=scenario, rank=0) for n in (1, 2, 50)}
    assert peaks == {16}
