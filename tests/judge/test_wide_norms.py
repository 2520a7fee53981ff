"""Norms reported in fp64."""

from itertools import islice

import pytest
import torch
import torch.distributed as dist

from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.rules.judging import run_case
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import (
    Capabilities,
    Numerics,
    StepResult,
    WholeParamEngine,
    plain_optimizer,
)

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="mlp"),
    world=WorldSpec(size=2),
    system=SystemSpec(stage=0),
    optimizer=OptimizerSpec(clip_norm=0.01),
    run=RunSpec(steps=3),
)


class _Clipping(WholeParamEngine):
    """Clips as ColossalAI does: squares in fp32; root, factor and product in fp64."""

    def update(self):
        grads = [param.grad for param in self.named.values() if param.grad is not None]
        norm = self.target.norm_of(grads, self.group)
        if self.norm_max is not None:
            combined = max(1.0, (norm + 1e-6) / self.norm_max)
            for grad in grads:
                grad.mul_(1.0 / combined)
        super().update()
        return StepResult(norm=torch.tensor(norm, dtype=self.target.reported_norm))


def rounded(grads, group):
    """fp64 root of a sum of squares rounded to fp32."""
    return sum(grad.square().sum() for grad in grads).item() ** 0.5


def exact(grads, group):
    """fp64 root of a sum of squares in fp64."""
    return sum(grad.double().square().sum() for grad in grads).item() ** 0.5


def over_ranks(grads, group):
    """Root of squares added over ranks, although each rank has the whole gradient."""
    squares = torch.tensor(exact(grads, group) ** 2)
    dist.all_reduce(squares, group=group)
    return squares.item() ** 0.5


def off(grads, group):
    """`exact`, too large by far less than an fp32 rounding."""
    return exact(grads, group) * (1 + 2.0**-36)


class _Target:
    name = "clipping"
    capabilities = Capabilities(stages=(0,), follows=("optimizer.clip_norm",))

    def __init__(self, norm_of, *, told=torch.float64, **numerics):
        self.norm_of, self.reported_norm = norm_of, told
        self.numerics = Numerics(reported_grads="after-division", **numerics)

    def build(self, module, *, scenario, group):
        spec = scenario.optimizer
        engine = _Clipping(
            module, plain_optimizer(spec, dict(module.named_parameters())), group=group
        )
        engine.target, engine.norm_max = self, spec.clip_norm
        return engine


TOLD = {"norm": "reported", "clip": "fp64-inverse"}
ROOT = {"clip": "fp64-root-inverse"}


def verdicts(target, *, cases=40):
    drawn = islice(draws(drawn_cases(target, ranks_max=2), seed="3"), cases)
    clipped = [case for case in drawn if case.optimizer.clip_norm is not None]
    assert clipped
    return {run_case(case, target=target).verdict for case in clipped}


def test_clipping_by_a_norm_reported_in_fp64_passes():
    assert verdicts(_Target(rounded, **TOLD)) == {"pass"}


def test_clipping_by_a_norm_reported_in_fp32_fails():
    assert "fail" in verdicts(_Target(rounded, reported_norm=torch.float32, **TOLD))


def test_fp64_norm_is_compared_in_fp64():
    assert run_case(CASE, target=_Target(exact, **ROOT)).verdict == "pass"
    found = run_case(CASE, target=_Target(off, **ROOT)).findings
    assert [each.check for each in found][:1] == ["equality.norm"]


def test_norm_that_is_wrong_in_fp32_is_found():
    found = run_case(CASE, target=_Target(over_ranks, **ROOT)).findings
    assert "equality.norm" in {each.check for each in found}


@pytest.mark.parametrize(("norm_of", "verdict"), [(exact, "pass"), (over_ranks, "fail")])
def test_fp64_norm_is_checked_against_bounds(norm_of, verdict):
    unknown = Scenario(
        schema=1,
        model=CASE.model,
        world=WorldSpec(size=3, order="ring", order_known=False),
        system=CASE.system,
    )
    target = _Target(norm_of)
    target.capabilities = Capabilities(stages=(0,), orders=("unknown",))
    assert run_case(unknown, target=target).verdict == verdict
