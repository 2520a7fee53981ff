"""Update rules of a target's own; cases that need one are refused without it."""

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
    def test_own_rule_is_the_default_optimizer(self):
        assert capabilities_of(ByStep()).optimizers == ("own",)

    def test_declared_optimizers_are_kept(self):
        able = Capabilities(optimizers=("own", "sgd"))
        assert capabilities_of(target_with(capabilities=able)).optimizers == ("own", "sgd")

    def test_unlimited_capabilities_include_an_own_rule_only_if_defined(self):
        assert "own" in capabilities_of(target_with(capabilities=None)).optimizers
        assert "own" not in capabilities_of(ZeroSimTarget()).optimizers

    def test_own_optimizer_without_a_rule_is_an_error(self):
        able = Capabilities(optimizers=("own",))
        with pytest.raises(ProtocolError, match="reference_step or reference_optimizer"):
            capabilities_of(target_with(capabilities=able, reference_step=None))


class TestRefusals:
    def test_refusal_without_a_rule_names_the_missing_attributes(self):
        (problem,) = refusals(ZeroSimTarget(), CASE)
        assert "no update rule of its own, reference_step or" in problem.message

    def test_unknown_order_needs_an_elementwise_rule(self):
        case = changed(CASE, world={"order_known": False})
        assert refusals(ByStep(), case) == ()
        (problem,) = refusals(target_with(numerics=Numerics()), case)
        assert problem.path == "world.order_known"
        assert "elementwise=True" in problem.suggestion


class TestRules:
    @pytest.mark.parametrize("target", [ByStep(), ByOptimizer()])
    def test_own_rule_reaches_the_reference(self, target):
        own = rules_of(target, CASE).own
        assert own.elementwise
        assert own.name.endswith("of target 'own-adamw'")
        assert rules_of(target, CASE) == rules_of(target, CASE)

    def test_torch_optimizer_has_no_own_rule(self):
        case = changed(CASE, optimizer={"name": "sgd"})
        assert rules_of(ByStep(), case).own is None

    def test_two_own_rules_are_an_error(self):
        target = target_with(reference_optimizer=lambda self, named, scenario: None)
        with pytest.raises(ProtocolError, match="got both"):
            rules_of(target, CASE)

    @pytest.mark.parametrize("rule", [3, staticmethod(lambda param: None)])
    def test_own_rule_with_other_arguments_is_an_error(self, rule):
        with pytest.raises(ProtocolError, match=r"reference_step\(param, grad, state, settings\)"):
            rules_of(target_with(reference_step=rule), CASE)


def test_own_optimizer_has_no_torch_class():
    with pytest.raises(ProtocolError, match="which is the target's own"):
        class_of(CASE.optimizer)
