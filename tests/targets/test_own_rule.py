"""A target may bring its own update rule; cases that need one are refused without it."""

import pytest

from tests.targets.own_adamw import ByOptimizer, ByStep
from zero_sim.errors import ProtocolError
from zero_sim.run.small_cases import changed
from zero_sim.scenario.spec import ModelSpec, OptimizerSpec, Scenario, SystemSpec
from zero_sim.targets import Capabilities, Numerics, capabilities_of, refusals, rules_of
from zero_sim.targets.own import ZeroSimTarget
from zero_sim.targets.torch.optim import class_of

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="mlp"),
    optimizer=OptimizerSpec(name="own"),
    system=SystemSpec(stage=1),
)


def target_with(**attributes):
    return type("Mine", (ByStep,), attributes)()


class TestCapabilities:
    def test_are_those_of_the_own_rule_by_default(self):
        assert capabilities_of(ByStep()).optimizers == ("own",)

    def test_keep_what_is_declared_besides(self):
        able = Capabilities(optimizers=("own", "sgd"))
        assert capabilities_of(target_with(capabilities=able)).optimizers == ("own", "sgd")

    def test_of_everything_have_an_own_rule_only_with_one(self):
        assert "own" in capabilities_of(target_with(capabilities=None)).optimizers
        assert "own" not in capabilities_of(ZeroSimTarget()).optimizers

    def test_cannot_promise_a_rule_that_is_not_there(self):
        able = Capabilities(optimizers=("own",))
        with pytest.raises(ProtocolError, match="reference_step or reference_optimizer"):
            capabilities_of(target_with(capabilities=able, reference_step=None))


class TestRefusals:
    def test_of_a_target_without_a_rule_name_what_is_missing(self):
        (problem,) = refusals(ZeroSimTarget(), CASE)
        assert "no update rule of its own, reference_step or" in problem.message

    def test_of_an_unknown_order_unless_the_rule_is_elementwise(self):
        case = changed(CASE, world={"order_known": False})
        assert refusals(ByStep(), case) == ()
        (problem,) = refusals(target_with(numerics=Numerics()), case)
        assert problem.path == "world.order_known"
        assert "elementwise=True" in problem.suggestion


class TestRules:
    @pytest.mark.parametrize("target", [ByStep(), ByOptimizer()])
    def test_reach_the_reference(self, target):
        own = rules_of(target, CASE).own
        assert own.elementwise
        assert own.name.endswith("of target 'own-adamw'")
        assert rules_of(target, CASE) == rules_of(target, CASE)

    def test_are_none_for_an_optimizer_of_torch(self):
        case = changed(CASE, optimizer={"name": "sgd"})
        assert rules_of(ByStep(), case).own is None

    def test_may_be_one_only(self):
        target = target_with(reference_optimizer=lambda self, named, scenario: None)
        with pytest.raises(ProtocolError, match="got both"):
            rules_of(target, CASE)

    @pytest.mark.parametrize("rule", [3, staticmethod(lambda param: None)])
    def test_must_be_functions_of_their_arguments(self, rule):
        with pytest.raises(ProtocolError, match=r"reference_step\(param, grad, state, settings\)"):
            rules_of(target_with(reference_step=rule), CASE)


def test_torch_has_no_class_for_it():
    with pytest.raises(ProtocolError, match="which is the target's own"):
        class_of(CASE.optimizer)
