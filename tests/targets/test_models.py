"""Models supplied by a target."""

from dataclasses import replace
from itertools import count

import pytest

from tests.own_models import TINY, ForgetsNorms, OwnModelTarget
from zero_sim.errors import ProtocolError
from zero_sim.rules.judging import run_case
from zero_sim.scenario.spec import ModelSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.shrink.models import plainer_models
from zero_sim.targets import capabilities_of, find_target, refusals
from zero_sim.testing import conformance
from zero_sim.testing.conformance import NotConformant

CASE = Scenario(
    schema=1, model=ModelSpec(name="own:tiny"), world=WorldSpec(size=3), system=SystemSpec(stage=0)
)


def test_target_with_its_own_model_conforms():
    conformance(OwnModelTarget(), cases=10)()


def test_layer_that_is_never_reduced_is_found():
    with pytest.raises(NotConformant, match=r"param 'norm\.") as found:
        conformance(ForgetsNorms(), cases=10, shrink_seconds=0)()
    assert found.value.scenario.model.name == "own:tiny"


def test_case_shrinks_to_bare_params_of_the_models_shapes():
    capabilities_of(OwnModelTarget())
    shapes = {case.model.shapes for case in plainer_models(CASE)}
    assert {((28,), (4,), (4,), (16,), (4,)), ((7, 4), (4,), (4,), (4, 4), (4,))} <= shapes


def test_zero_sim_trains_models_of_known_targets():
    capabilities_of(OwnModelTarget())
    bf16 = replace(CASE, model=replace(CASE.model, dtype="bf16"), system=SystemSpec(stage=3))
    assert run_case(bf16).verdict == "pass"


def test_target_without_the_model_refuses_it():
    (problem,) = refusals(find_target("torch-ddp"), CASE)
    assert problem.path == "model.name"
    assert "`models` (none), got 'own:tiny'" in problem.message


@pytest.mark.parametrize("models", [[TINY], {"tiny": TINY.build}, {"a b": TINY}, {3: 4}])
def test_invalid_models_are_an_error(models):
    target = OwnModelTarget()
    target.models = models
    with pytest.raises(ProtocolError, match="`models` of target 'own-model'"):
        capabilities_of(target)


def test_model_name_refers_to_the_judged_target():
    """Two targets may have models of the same name."""
    other = OwnModelTarget()
    other.models = {"tiny": replace(TINY, loss=lambda module, *batch: 1 / 0)}
    assert run_case(CASE, target=other).verdict != "pass"
    assert run_case(CASE, target=OwnModelTarget()).verdict == "pass"


def test_random_model_builder_is_an_error():

    target, calls = OwnModelTarget(), count()
    target.models = {"tiny": replace(TINY, build=lambda: _shifted(next(calls)))}
    result = run_case(CASE, target=target)
    assert result.verdict == "error"
    assert "other bits of 'tokens.weight'" in result.error


def _shifted(by):
    module = TINY.build()
    module.tokens.weight.data.add_(by)
    return module
