"""Loss that differs because the forward read stale params."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.judge.by_owner import OwnerEngine, judge, target
from zero_sim.run.simulated import Simulated
from zero_sim.scenario.spec import ExpectSpec, FaultSpec, RunSpec, SystemSpec, WorldSpec

KNOWN = WorldSpec(size=2)
ORDERS = pytest.mark.parametrize("known", [True, False], ids=["known order", "unknown order"])


class ForgetsToCopy(OwnerEngine):
    """Engine that reports gathered params, but once does not copy them to rank 1's module."""

    def step(self, *, lr_factor):
        before = {name: param.detach().clone() for name, param in self.named.items()}
        super().step(lr_factor=lr_factor)
        self.gathered = {name: param.detach().clone() for name, param in self.named.items()}
        if self.steps == 2 and self.rank == 1:
            self.named["p1"].data.copy_(before["p1"])

    def params(self):
        super().params()
        return getattr(self, "gathered", self.named)


class ReadsNothingAnew(OwnerEngine):
    """Gathers inside a replaced module forward, so that hooks see stale params."""

    def __init__(self, module, group, **wrong):
        super().__init__(module, group, **wrong)
        self.right = {name: param.detach().clone() for name, param in self.named.items()}
        forward = module.forward

        def gathered(*args):
            for name, param in self.named.items():
                param.data.copy_(self.right[name])
            output = forward(*args)
            for param in self.named.values():
                param.data = param.data + 7
            return output * (2 if self.steps == 1 else 1)

        module.forward = gathered

    def step(self, *, lr_factor):
        for name, param in self.named.items():
            param.data.copy_(self.right[name])
        super().step(lr_factor=lr_factor)
        self.right = {name: param.detach().clone() for name, param in self.named.items()}

    def params(self):
        super().params()
        return self.right


@ORDERS
def test_stale_param_is_named_before_the_loss(judged, known):
    world = replace(KNOWN, order="tree", order_known=known)
    result = judge(judged, target(ForgetsToCopy), world=world)
    first, second = result.findings[:2]
    assert (first.check, first.phase) == ("equality.params", "forward")
    assert (first.step, first.rank, first.param) == (2, 1, "p1")
    assert "the forward of micro-batch 0 read other values of this param" in first.message
    assert "the value is that read in the step before" in first.message
    assert (second.check, second.step, second.rank) == ("equality.loss", 2, 1)


def test_param_gathered_after_the_hooks_is_not_blamed(judged):
    result = judge(judged, target(ReadsNothingAnew), world=KNOWN)
    assert (result.findings[0].check, result.findings[0].step) == ("equality.loss", 1)


@pytest.mark.parametrize("size", [2, 3])
def test_corrupt_gather_in_forward_is_named(judged, size):
    # The harness issues the first gather, to observe params before the first step.
    fault = FaultSpec(
        kind="corrupt", rank=1, collective="all_gather", call=1, side="receive", element=0, bit=13
    )
    case = {"system": SystemSpec(stage=3), "world": WorldSpec(size=size), "faults": (fault,)}
    result = judged(run=RunSpec(steps=2), **case)
    first = result.findings[0]
    assert (first.check, first.phase, first.rank) == ("equality.params", "forward", 1)
    assert (first.step, first.offset_in_param, first.differ_count) == (0, 0, 1)
    assert [found.check for found in result.findings[1:2]] == ["equality.loss"]


def test_expected_loss_difference_is_run_once(judged, monkeypatch):
    runs = []
    right = Simulated.run
    monkeypatch.setattr(Simulated, "run", lambda *args: runs.append(1) or right(*args))
    expect = ExpectSpec(finding="equality.loss")
    assert judge(judged, target(ForgetsToCopy), world=KNOWN, expect=expect).verdict == "pass"
    assert len(runs) == 1
