"""Explanations: loaded on the first difference, by every judge, and consistent with all values."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.judge.ruled import Engine, Target
from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.rules.judging import EXPLAINER
from zero_sim.run.judges import Chosen, JobsJudge, open_judge
from zero_sim.run.runner import judge_simulated
from zero_sim.run.simulated import Simulated
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.targets import Numerics

CASE = Scenario(
    schema=1,
    name="explained",
    model=ModelSpec(name="mlp", hidden=3, blocks=1, dtype="bf16"),
    world=WorldSpec(size=3),
    system=SystemSpec(stage=0),
    run=RunSpec(steps=2, micro_batches=3),
)
PREMUL = Target({"divide": "premul"}, Numerics(reported_grads="before-division"))
ADVICE = "If this is intended, declare Numerics(divide='premul')"


@pytest.fixture(scope="module")
def pool():
    with WorldPool() as worlds:
        yield worlds


def test_passing_case_loads_no_explainer(pool):
    right = Target({"divide": "premul"}, Numerics(divide="premul"))
    backend = Simulated(worlds=pool, target=right, explainer="no_such_module:Explainer")
    assert judge_simulated(CASE, backend).verdict == "pass"


def test_findings_without_an_explainer_are_equal_but_unexplained(pool):
    plain = judge_simulated(CASE, Simulated(worlds=pool, target=PREMUL))
    result = run_case(CASE, pool=pool, target=PREMUL)
    assert [f.identity for f in plain.findings] == [f.identity for f in result.findings]
    assert "declare" not in plain.findings[0].detail
    assert result.findings[0].detail.endswith(ADVICE)


@contextmanager
def in_jobs(chosen):
    with JobsJudge([CASE] * 2, jobs=2, chosen=chosen) as judge:
        yield judge


@pytest.mark.parametrize("way_in", [open_judge, pytest.param(in_jobs, marks=pytest.mark.slow)])
def test_every_judge_of_cases_explains(way_in):
    with way_in(Chosen(target=f"{__name__}:PREMUL", explainer=EXPLAINER)) as judge:
        assert judge(CASE).findings[0].detail.endswith(ADVICE)


class RightSums(Engine):
    """Engine that reports the expected sums and steps by other sums."""

    def zero_grad(self):
        super().zero_grad()
        self.right = {}

    def backward(self, loss, *, last_micro, rows):
        loss.backward()
        for name, param in self.named.items():
            held = self.right.get(name)
            self.right[name] = param.grad.clone() if held is None else held + param.grad
            param.grad = None
        # The same gradients again, for the sums that it steps by.
        for name, param in self.named.items():
            param.grad = self.right[name].clone()
        self.local = {name: grad.clone() for name, grad in self.right.items()}
        if last_micro:
            self.reduce(last=True)
        for param in self.named.values():
            param.grad = None

    def step(self, *, lr_factor):
        result = super().step(lr_factor=lr_factor)
        self.shown = {}
        for name, grad in self.right.items():
            self.shown[name] = grad.clone()
            dist.all_reduce(self.shown[name], group=self.group)
        return result


class RightSumsTarget(Target):
    def build(self, module, *, scenario, group):
        return RightSums(module, scenario, group, self.does)


def test_equal_gradients_exclude_rules_about_gradients(pool):
    """The explanation must fit both the reported gradients and the update."""
    in_fp32 = {"reduce": torch.float32, "tells no norm": True}
    target = RightSumsTarget(in_fp32, Numerics(reported_grads="before-division"))
    (first, *_) = run_case(CASE, pool=pool, target=target).findings
    assert first.check in ("equality.master", "equality.state")
    assert "declare" not in first.detail
    assert "gradient" not in first.message
    # If the engine reports no gradients, they cannot rule the explanation out.
    silent = Target({**in_fp32, "told": "not"}, target.numerics)
    assert "reduce_dtype='fp32'" in run_case(CASE, pool=pool, target=silent).findings[0].detail


def test_rule_about_the_update_is_named_if_gradients_agree(pool):
    target = Target({"divide": "postmul"}, Numerics(reported_grads="before-division"))
    case = replace(CASE, model=ModelSpec(name="mlp", hidden=3, blocks=1))
    (first, *_) = run_case(case, pool=pool, target=target).findings
    assert "divide = 'postmul'" in first.detail
