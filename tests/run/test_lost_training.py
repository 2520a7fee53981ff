"""Loads after discarded training, and checkpoints that are not the first one."""

from copy import deepcopy
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from tests.run.summing import Engine
from zero_sim import run_case
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    FreezeSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.targets import Capabilities

PLAIN = ReloadSpec(step=1)
LOST = {
    "steps": ReloadSpec(step=1, lost_steps=2),
    "micro-batch": ReloadSpec(step=1, lost_micro_batches=1),
    "both": ReloadSpec(step=2, lost_steps=1, lost_micro_batches=2, early_save=True),
}
CASE = Scenario(
    schema=1, name="case", model=ModelSpec(name="mlp", hidden=3), world=WorldSpec(size=2),
    optimizer=OptimizerSpec(lr=0.1), run=RunSpec(steps=4, micro_batches=2), reload=PLAIN,
)  # fmt: skip
SCALED = OptimizerSpec(lr=0.1, loss_scale=LossScaleSpec(initial=8.0, growth_interval=1))


def judged(pool, target=None, **parts):
    case = replace(CASE, **parts)
    assert check_scenario(case) == []
    return run_case(case, pool=pool, target=target)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("lost", LOST)
def test_own_system_keeps_nothing_of_lost_training(pool, stage, lost):
    system = SystemSpec(stage=stage, bucket_elems=20)
    result = judged(pool, system=system, reload=replace(LOST[lost], world_size=3))
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize(
    "parts",
    [
        {"world": WorldSpec(size=2, order="ring", timing="hostile", races=True)},
        {"system": SystemSpec(bucket_elems=10, overlap_grads=True, overlap_params=True)},
        {"system": SystemSpec(stage=2, sync="every")},
        {"optimizer": SCALED, "data": replace(CASE.data, nan=NanSpec(step=2, rank=0))},
        {"system": SystemSpec(offload_state=True)},
        {"model": ModelSpec(name="fp8"), "optimizer": OptimizerSpec(name="lamb", lr=0.1)},
        {"model": ModelSpec(name="moe", experts=2), "topology": TopologySpec(ep=2)},
        {"world": WorldSpec(size=4), "topology": TopologySpec(pp=2)},
        {"model": replace(CASE.model, freeze=(FreezeSpec(param="0.up.bias", start=1, stop=3),))},
    ],
    ids=["ring", "overlapped", "every", "scaled", "offloaded", "fp8", "experts", "parts", "frozen"],
)
def test_lost_training_passes_with_other_features(pool, parts):
    result = judged(pool, reload=LOST["both"], **parts)
    assert (result.verdict, result.findings) == ("pass", ())


class Saving(Engine):
    """Minimal DDP with checkpoints in memory."""

    files: ClassVar[dict[object, object]] = {}

    def __init__(self, module, scenario, group):
        super().__init__(module, scenario, group, averages=True, keeps=False)

    def save(self, path, *, form):
        self.files[path] = deepcopy((self.module.state_dict(), self.optimizer.state_dict()))
        dist.barrier(self.group)

    def load(self, path, *, weights_only=False):
        weights, state = deepcopy(self.files[path])
        self.module.load_state_dict(weights)
        self.load_state(state)

    def load_state(self, state):
        self.optimizer.load_state_dict(state)


class KeepsState(Saving):
    def load_state(self, state):
        if not self.optimizer.state:
            self.optimizer.load_state_dict(state)


class KeepsSums(Saving):
    """Accumulates in its own memory, which only a step clears."""

    def __init__(self, module, scenario, group):
        super().__init__(module, scenario, group)
        self.sums = [torch.zeros_like(param) for param in module.parameters()]

    def backward(self, loss, *, last_micro, rows):
        self.optimizer.zero_grad()
        loss.backward()
        for total, param in zip(self.sums, self.module.parameters(), strict=True):
            total += param.grad

    def step(self, *, lr_factor):
        for total, param in zip(self.sums, self.module.parameters(), strict=True):
            param.grad = total.clone()
            total.zero_()
        super().step(lr_factor=lr_factor)


class SavesFirst(Saving):
    """Collects the state to save only once."""

    def save(self, path, *, form):
        if not hasattr(self, "state"):
            self.state = deepcopy((self.module.state_dict(), self.optimizer.state_dict()))
        self.files[path] = self.state
        dist.barrier(self.group)


class Target:
    name = "saving"
    capabilities = Capabilities(
        stages=(0,), optimizers=("adamw",), follows=("reload", "run.micro_batches")
    )

    def __init__(self, engine):
        self.engine = engine

    def build(self, module, *, scenario, group):
        return self.engine(module, scenario, group)


@pytest.mark.parametrize("lost", LOST)
def test_right_user_engine_passes(pool, lost):
    result = judged(pool, Target(Saving), system=SystemSpec(stage=0), reload=LOST[lost])
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize(("engine", "reload"), [
    (KeepsState, LOST["steps"]),
    (KeepsSums, LOST["micro-batch"]),
    (SavesFirst, ReloadSpec(step=1, early_save=True)),
])  # fmt: skip
def test_remains_of_lost_training_are_found(pool, engine, reload):
    target, system = Target(engine), SystemSpec(stage=0)
    assert judged(pool, target, system=system).verdict == "pass"
    result = judged(pool, target, system=system, reload=reload)
    assert (result.verdict, result.findings[0].step) == ("fail", 1)


@pytest.mark.parametrize(("reload", "path"), [
    (ReloadSpec(step=1, lost_steps=1, weights_only=True), "reload.weights_only"),
    (ReloadSpec(step=1, lost_micro_batches=3), "reload.lost_micro_batches"),
])  # fmt: skip
def test_impossible_lost_training_is_refused(reload, path):
    (problem,) = check_scenario(replace(CASE, reload=reload))
    assert problem.path == path


def test_gradients_of_params_frozen_in_lost_training_are_observed(pool):
    """Otherwise memory within the step would look unexplained."""
    model = ModelSpec(
        name="params", shapes=((1,), (1,)), nested=True, tied=("p1",), tied_first=True,
        freeze=(FreezeSpec(param="m0.p0", start=1, stop=2),),
    )  # fmt: skip
    result = judged(
        pool,
        model=model,
        system=SystemSpec(stage=3, bucket_elems=1),
        reload=LOST["micro-batch"],
    )
    assert (result.verdict, result.findings) == ("pass", ())
