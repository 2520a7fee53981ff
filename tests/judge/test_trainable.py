"""Steps that the reference cannot train are an error of the case, not a finding."""

import math

import pytest
import torch

from zero_sim.scenario.spec import DataSpec, ModelSpec, NanSpec, OptimizerSpec, RunSpec
from zero_sim.zero.optimizer import DistributedOptimizer

MODEL = ModelSpec(name="mlp", hidden=4)
TWO_STEPS = RunSpec(steps=2)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_planted_value_without_a_loss_scale_is_an_error(judged, value):
    result = judged(
        model=MODEL, run=TWO_STEPS, data=DataSpec(nan=NanSpec(step=1, rank=1, value=value))
    )
    assert (result.verdict, result.findings) == ("error", ())
    assert "of micro-batch 0 of step 1 on rank 1" in result.error
    assert "data.nan plants it" in result.error


def test_step_that_overflows_masters_is_an_error(judged):
    result = judged(model=MODEL, run=TWO_STEPS, optimizer=OptimizerSpec(name="sgd", lr=3e38))
    assert (result.verdict, result.findings) == ("error", ())
    assert "Try a smaller optimizer.lr than 3e+38" in result.error


def test_masters_that_overflow_in_the_last_step_are_compared(judged):
    result = judged(model=MODEL, run=RunSpec(steps=1), optimizer=OptimizerSpec(name="sgd", lr=3e38))
    assert result.verdict == "pass", result.error


def test_infinity_in_the_system_alone_is_a_finding(judged, monkeypatch):
    right = DistributedOptimizer.step

    def overflows(self):
        result = right(self)
        with torch.no_grad():
            next(iter(self.ddp.module.parameters())).view(-1)[0] = math.inf
        return result

    monkeypatch.setattr(DistributedOptimizer, "step", overflows)
    result = judged(model=MODEL, run=TWO_STEPS)
    assert result.verdict == "fail", result.error
    assert result.findings[0].check in ("equality.params", "invariant.cast")
