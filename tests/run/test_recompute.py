"""zero_sim's own system with models that recompute blocks in backward."""

from dataclasses import replace

import pytest

from zero_sim import run_case
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="mlp", hidden=2, recompute="reentrant"),
    world=WorldSpec(size=2, timing="hostile"),
    system=SystemSpec(stage=3, bucket_elems=1),
    run=RunSpec(steps=2, micro_batches=2),
)


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "gpt", "moe", "transformer-260"])
def test_recomputed_activations_give_the_same_bits(pool, name, stage, recompute):
    model = ModelSpec(name=name, hidden=2, recompute=recompute)
    case = replace(CASE, model=model, system=replace(CASE.system, stage=stage))
    result = run_case(case, pool=pool)
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize("evaluate", ["between-steps", "within-step"])
def test_evaluation_runs_each_block_once(pool, evaluate):
    result = run_case(replace(CASE, run=replace(CASE.run, evaluate=evaluate)), pool=pool)
    assert (result.verdict, result.findings) == ("pass", ())


def test_gradients_counted_twice_are_found(pool, broken):
    broken("W62")
    assert run_case(CASE, pool=pool).findings[0].check == "equality.grad"


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_params_kept_during_backward_are_found(pool, broken, recompute):
    broken("W56")
    result = run_case(replace(CASE, model=replace(CASE.model, recompute=recompute)), pool=pool)
    assert {finding.check for finding in result.findings} == {"invariant.memory"}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (replace(CASE, model=replace(CASE.model, name="gpt", blocks=1)), "is used twice"),
        (replace(CASE, run=replace(CASE.run, own_micro_batches=(1, 2))), "a joining rank"),
    ],
)
def test_impossible_recompute_is_refused_with_the_reason(case, words):
    (problem,) = check_scenario(case)
    assert problem.path == "model.recompute"
    assert words in problem.message
