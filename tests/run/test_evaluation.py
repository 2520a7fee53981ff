"""Forward passes under no_grad, between two steps or within one."""

from dataclasses import replace

import pytest
import torch

from tests.run.summing import CASE, Engine, Target
from zero_sim import run_case
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import RunSpec, SystemSpec
from zero_sim.zero.gathers import OnUse

WHEN = ("between-steps", "within-step")
SYSTEMS = {
    "overlapped": SystemSpec(bucket_elems=3, overlap_params=True),
    "freed": SystemSpec(stage=3, bucket_elems=3),
    "prefetched": SystemSpec(stage=3, bucket_elems=3, prefetch=2),
    "kept": SystemSpec(stage=3, bucket_elems=3, reshard_after_forward=False),
}


class LazyEngine(Engine):
    """Copies masters to params before a forward, unless done since the last backward.

    Args:
        forgets: True if the next forward after a step copies masters again.
        others: As for `Engine`.
    """

    def __init__(self, *others, forgets, **named):
        super().__init__(*others, **named)
        self.forgets, self.is_whole = forgets, False
        self.masters = {n: p.detach().clone() for n, p in self.module.named_parameters()}
        self.module.register_forward_pre_hook(self.gather)

    def gather(self, module, args):
        if not self.is_whole:
            with torch.no_grad():
                for name, param in module.named_parameters():
                    param.copy_(self.masters[name])
        self.is_whole = True

    def backward(self, loss, *, last_micro, rows):
        loss.backward()
        self.is_whole = False

    def step(self, *, lr_factor):
        was_whole = self.is_whole
        kept = [param.detach().clone() for param in self.module.parameters()]
        self.is_whole = False
        self.gather(self.module, ())
        super().step(lr_factor=lr_factor)
        self.masters = {n: p.detach().clone() for n, p in self.module.named_parameters()}
        with torch.no_grad():
            for param, old in zip(self.module.parameters(), kept, strict=True):
                param.copy_(old)
        self.is_whole = was_whole and not self.forgets

    def params(self):
        return self.masters


class LazyTarget(Target):
    """Target around the engine."""

    def __init__(self, *, forgets):
        super().__init__("adamw")
        self.forgets = forgets

    def build(self, module, *, scenario, group):
        options = {"averages": True, "keeps": False}
        return LazyEngine(module, scenario, group, forgets=self.forgets, **options)


def judged(pool, when, *, target=None, **parts):
    case = replace(CASE, run=RunSpec(steps=2, evaluate=when), **parts)
    assert check_scenario(case) == []
    return run_case(case, pool=pool, target=target)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("system", SYSTEMS)
def test_own_system_gathers_and_reshards(pool, when, system):
    result = judged(pool, when, system=SYSTEMS[system])
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize("when", ["never", *WHEN])
def test_engine_that_gathers_after_a_step_passes(pool, when):
    assert judged(pool, when, target=LazyTarget(forgets=True)).verdict == "pass"


def test_stale_params_after_a_step_are_found(pool):
    target = LazyTarget(forgets=False)
    assert judged(pool, "never", target=target).verdict == "pass"
    result = judged(pool, "within-step", target=target)
    assert {finding.step for finding in result.findings} == {1}
    assert "equality.loss" in {finding.check for finding in result.findings}


def test_different_loss_under_no_grad_is_found(pool, monkeypatch):
    def build(self, module, **named):
        engine = Target.build(self, module, **named)
        module.register_forward_hook(
            lambda module, args, output: output if torch.is_grad_enabled() else output + 1.0
        )
        return engine

    monkeypatch.setattr(LazyTarget, "build", build)
    target = LazyTarget(forgets=True)
    assert judged(pool, "never", target=target).verdict == "pass"
    first = judged(pool, "between-steps", target=target).findings[0]
    assert (first.check, first.step) == ("equality.loss", 0)
    assert "under no_grad" in first.message


def test_extra_gather_under_no_grad_is_found(pool, monkeypatch):
    leave = OnUse._leave

    def leave_twice(self, unit, *, has_backward):
        leave(self, unit, has_backward=has_backward)
        if not has_backward:
            unit.start_gather()
            leave(self, unit, has_backward=has_backward)

    monkeypatch.setattr(OnUse, "_leave", leave_twice)
    assert judged(pool, "never", system=SYSTEMS["freed"]).verdict == "pass"
    result = judged(pool, "within-step", system=SYSTEMS["freed"])
    assert [finding.check for finding in result.findings] == ["invariant.volume"]
