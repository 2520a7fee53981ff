"""A target's own update rule: run without ranks, repeatable, copied with its state."""

import random
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist

from tests.targets.own_adamw import OwnAdamW, adamw_step, settings_of
from zero_sim.errors import ProtocolError, UsageError
from zero_sim.reference.own_rule import OwnRule
from zero_sim.reference.rules import Rules
from zero_sim.reference.stepping import Stepper
from zero_sim.scenario.spec import ModelSpec, OptimizerSpec, ParamGroupSpec, Scenario
from zero_sim.sim import World
from zero_sim.targets import param_groups
from zero_sim.targets.own_rule import no_process_group

SPEC = OptimizerSpec(name="own", lr=0.1)
CASE = Scenario(schema=1, model=ModelSpec(name="mlp"), optimizer=SPEC)


def own(**rule):
    return OwnRule(name="the rule", scenario=CASE, alone=no_process_group, **rule)


def stepper_of(spec=SPEC, **rule):
    params = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    return Stepper(spec, params=params, rules=Rules(own=own(**rule)))


def step(stepper, value=1.0):
    stepper.step({name: torch.full_like(each, value) for name, each in stepper.masters.items()})


def build(named, scenario):
    return OwnAdamW(named.values(), **settings_of(scenario.optimizer))


class Counting(torch.optim.Optimizer):
    """Optimizer that uses a count in its group, with state in bf16."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "count": torch.tensor(0.0)})

    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                sums = self.state[param].setdefault("sum", torch.zeros_like(param).bfloat16())
                sums.add_(param.grad)
                param.sub_(sums * group["lr"] * group["count"])


def count(named, scenario):
    return Counting(named.values(), lr=scenario.optimizer.lr)


class TestSteps:
    def test_function_gets_the_settings_of_the_param_group(self):
        spec = OptimizerSpec(name="own", lr=0.1, groups=(ParamGroupSpec(match="b", lr=0.5),))

        def descend(param, grad, state, settings):
            param.sub_(settings["lr"] * grad)

        stepper = stepper_of(spec, step=descend)
        step(stepper)
        assert stepper.masters["w"].tolist() == pytest.approx([0.9, 1.9])
        assert stepper.masters["b"].tolist() == pytest.approx([2.5])

    def test_class_and_function_give_the_same_bits(self):
        pair = stepper_of(step=adamw_step), stepper_of(build=build)
        for value in (1.0, -3.0, 0.5):
            for each in pair:
                step(each, value)
        first, second = pair
        assert all(torch.equal(first.masters[n], second.masters[n]) for n in first.masters)
        assert first.state()["w"].keys() == {"step", "exp_avg", "exp_avg_sq"}

    def test_warm_up_scales_the_rates_of_a_class(self):
        stepper = stepper_of(build=count)
        stepper.step({"b": torch.ones(1), "w": torch.ones(2)}, factor=0.5)
        assert stepper.masters["b"].tolist() == pytest.approx(
            [2.95], rel=1e-3
        )  # The sum is in bf16.

    def test_rule_that_writes_to_the_gradient_changes_a_copy(self):
        grad = torch.ones(2)
        stepper = stepper_of(step=lambda param, grad, state, settings: param.sub_(grad.mul_(2)))
        stepper.step({"w": grad})
        assert grad.tolist() == [1.0, 1.0]


class TestCopies:
    @pytest.mark.parametrize("copied", [deepcopy, Stepper.fork])
    def test_have_group_state_and_step_independently(self, copied):
        stepper = stepper_of(build=count)
        step(stepper)
        twin = copied(stepper)
        assert twin.state()["w"]["sum"].dtype == torch.bfloat16
        before = stepper.masters["w"].clone()
        step(twin)
        assert torch.equal(stepper.masters["w"], before)
        step(stepper)
        assert torch.equal(stepper.masters["w"], twin.masters["w"])

    def test_read_state_returns_state_of_groups(self):
        def of_groups(optimizer, named):
            (group,) = optimizer.param_groups
            return {"w": {"count": group["count"]}}

        stepper = stepper_of(build=count, read_state=of_groups)
        step(stepper)
        assert stepper.state() == {"w": {"count": torch.tensor(1.0)}, "b": {}}

    def test_skip_groups_without_picked_params(self):
        spec = OptimizerSpec(name="own", lr=0.1, groups=(ParamGroupSpec(match="b", lr=0.5),))

        def grouped(named, scenario):
            return OwnAdamW(param_groups(spec, named), **settings_of(spec))

        rules = Rules(own=own(build=grouped, elementwise=True))
        params = {"w": torch.ones(9), "b": torch.ones(())}
        stepper = Stepper(spec, params=params, rules=rules)
        step(stepper)
        picked = stepper.picked("w", torch.arange(2), counters=("step",))
        assert picked.settings()["w"] == stepper.settings()["w"]
        assert picked.settings().keys() == {"w"}


class TestRefusals:
    def refused(self, text, **rule):
        with pytest.raises(ProtocolError, match=text):
            step(stepper_of(**rule))

    @pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random])
    def test_random_numbers(self, draw):
        def noisy(param, grad, state, settings):
            param.add_(float(draw()))

        self.refused("the rule to use no random numbers", step=noisy)

    def test_state_outside_the_copies(self):
        counts = []

        def hidden(param, grad, state, settings):
            counts.append(1)
            param.sub_(grad * len(counts))

        self.refused("other bits of the value of param 'w'", step=hidden)

    def test_exception_with_its_location(self):
        def broken(param, grad, state, settings):
            param.add_(torch.ones(7))

        self.refused(r"RuntimeError: .*test_own_rule.py:\d+", step=broken)

    def test_optimizer_without_some_params(self):
        def some(named, scenario):
            return OwnAdamW([named["w"]], **settings_of(scenario.optimizer))

        self.refused("exactly one param group, .* wrong for b", build=some)

    def test_object_that_is_not_an_optimizer(self):
        self.refused("an optimizer with param_groups, state, step", build=lambda *_: object())

    def test_group_without_a_rate(self):
        def unrated(named, scenario):
            return torch.optim.Optimizer(named.values(), {})

        self.refused("'lr' in every param group", build=unrated)

    def test_missing_rule(self):
        with pytest.raises(UsageError, match="`reference_step` or `reference_optimizer`"):
            Stepper(SPEC, params={"w": torch.ones(1)})


class TestProcessGroups:
    def test_do_not_exist_during_a_rule(self):
        seen = []

        def look(param, grad, state, settings):
            seen.append(dist.is_initialized())

        def rank(rank):
            step(stepper_of(step=look))
            return dist.is_initialized()

        with World(2) as world:
            assert world.run(rank) == [True, True]
        assert set(seen) == {False}

    def test_rule_that_uses_one_is_refused(self):
        def ask(param, grad, state, settings):
            param.div_(dist.get_world_size())

        def rank(rank):
            with pytest.raises(ProtocolError, match="no process group exists, got ValueError"):
                step(stepper_of(step=ask))

        with World(1) as world:
            world.run(rank)
