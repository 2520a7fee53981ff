"""An asynchronous checkpoint contains the state at the start of the save."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from tests.run.summing import Engine
from zero_sim import run_case
from zero_sim.errors import ScenarioError
from zero_sim.mutants import find_mutants
from zero_sim.run.program import segments_of
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
from zero_sim.targets import Capabilities, check_supported

LATER = ReloadSpec(step=1, async_steps=2)
CASE = Scenario(
    schema=1, name="case", model=ModelSpec(name="mlp", hidden=3), world=WorldSpec(size=2),
    optimizer=OptimizerSpec(lr=0.1), run=RunSpec(steps=4), reload=LATER,
)  # fmt: skip
SCALED = OptimizerSpec(lr=0.1, loss_scale=LossScaleSpec(initial=8.0, growth_interval=1))


def judged(pool, target=None, mutant=None, **parts):
    case = replace(CASE, **parts)
    assert check_scenario(case) == []
    if mutant is None:
        return run_case(case, pool=pool, target=target)
    (found,) = find_mutants([mutant])
    with found.apply() as patches:
        result = run_case(case, pool=pool, target=target)
    assert patches.armed
    return result


def test_second_world_starts_at_the_save_step(tmp_path):
    before, after = segments_of(CASE, folder=tmp_path)
    assert (before.start, before.save_step, before.stop) == (0, 1, 3)
    assert (after.start, after.save_step, after.stop) == (1, None, 4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("form", ["sharded", "consolidated"])
def test_own_system_resumes_from_the_save_step(pool, stage, form):
    result = judged(
        pool,
        system=SystemSpec(stage=stage, bucket_elems=20),
        reload=replace(LATER, form=form, world_size=3),
    )
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize("parts", [
    {"reload": ReloadSpec(step=1, async_steps=3, weights_only=True)},
    {"reload": ReloadSpec(step=2, async_steps=2)},
    {"world": WorldSpec(size=2, order="ring", timing="hostile", races=True)},
    {"optimizer": SCALED},
    {"optimizer": SCALED, "data": replace(CASE.data, nan=NanSpec(step=2, rank=0))},
    {"system": SystemSpec(offload_state=True)},
    {"model": ModelSpec(name="fp8"), "optimizer": OptimizerSpec(name="lamb", lr=0.1)},
    {"model": ModelSpec(name="moe", experts=2), "topology": TopologySpec(ep=2)},
    {"world": WorldSpec(size=4), "topology": TopologySpec(pp=2)},
    {"model": replace(CASE.model, freeze=(FreezeSpec(param="0.up.bias", start=2, stop=3),))},
], ids=[
    "weights-only", "to-the-end", "ring", "scale", "overflow", "offloaded", "fp8", "experts",
    "parts", "frozen",
])  # fmt: skip
def test_async_save_passes_with_other_features(pool, parts):
    result = judged(pool, **parts)
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize("overlap", ["grads", "params"])
def test_waits_before_a_save_are_not_failed_overlap(pool, overlap):
    system = SystemSpec(bucket_elems=10, **{f"overlap_{overlap}": True})
    result = judged(pool, system=system)
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize(("mutant", "what"), [
    ("C15", "the fp32 master"), ("C16", "optimizer state"), ("C17", "the fp32 master"),
    ("C18", "the fp32 master"),
])  # fmt: skip
def test_later_training_in_a_checkpoint_is_found_after_the_load(pool, mutant, what):
    finding = judged(pool, mutant=mutant).findings[0]
    assert (finding.check, finding.step) == ("equality.load", LATER.step)
    assert what in finding.message


def test_later_loss_scale_is_found_after_the_load(pool):
    finding = judged(pool, mutant="C19", optimizer=SCALED).findings[0]
    assert (finding.check, finding.step) == ("equality.load", LATER.step)
    assert "the loss scale" in finding.message


def test_wrong_step_during_a_save_is_found_in_its_own_world(pool):
    """Steps after the start of a save are judged like all others."""
    result = judged(pool, mutant="M41", run=RunSpec(steps=4, micro_batches=2))
    assert result.verdict == "fail"
    assert "checkpoint was loaded" not in result.findings[0].message


class Saving(Engine):
    """Minimal DDP with a checkpoint in memory, copied when the save starts."""

    files: ClassVar[dict[object, object]] = {}

    def __init__(self, module, scenario, group):
        super().__init__(module, scenario, group, averages=True, keeps=False)

    def save(self, path, *, form):
        raise AssertionError("asked to wait for a save")

    def kept(self):
        return {name: param.detach().clone() for name, param in self.params().items()}

    def save_async(self, path, *, form):
        return Handle(self, path, self.kept())

    def load(self, path, *, weights_only=False):
        with torch.no_grad():
            for name, param in self.params().items():
                param.copy_(self.files[path][name])


class Handle:
    def __init__(self, engine, path, kept):
        self.engine, self.path, self.kept = engine, path, kept

    def wait(self):
        self.engine.files[self.path] = self.kept
        dist.barrier(self.engine.group)


class KeepsViews(Saving):
    def kept(self):
        return {name: param.detach() for name, param in self.params().items()}


class NoHandle(Saving):
    def save_async(self, path, *, form):
        return None


class NoSaveAsync(Saving):
    save_async = property(lambda self: self.missing)


class Target:
    name = "saving"
    capabilities = Capabilities(
        stages=(0,), optimizers=("sgd",), follows=("reload", "reload.async_steps")
    )

    def __init__(self, engine):
        self.engine = engine

    def build(self, module, *, scenario, group):
        return self.engine(module, scenario, group)


PLAIN = {"optimizer": OptimizerSpec(name="sgd", lr=0.1), "system": SystemSpec(stage=0)}


def test_user_engine_is_checked(pool):
    assert judged(pool, Target(Saving), **PLAIN).verdict == "pass"
    finding = judged(pool, Target(KeepsViews), **PLAIN).findings[0]
    assert (finding.check, finding.step) == ("equality.load", LATER.step)
    assert "the working param differs from the checkpoint" in finding.message


@pytest.mark.parametrize(("engine", "message"), [
    (NoSaveAsync, "expected NoSaveAsync to have save_async(path, *, form), because its target"),
    (NoHandle, "expected `save_async` of NoHandle to return an object with wait(), got None"),
])  # fmt: skip
def test_target_without_the_declared_method_is_an_error(pool, engine, message):
    result = judged(pool, Target(engine), **PLAIN)
    assert result.verdict == "error"
    assert message in result.error


def test_undeclared_async_save_is_refused():
    class Waiting(Target):
        capabilities = Capabilities(stages=(0,), optimizers=("sgd",), follows=("reload",))

    with pytest.raises(ScenarioError, match=r"reload\.async_steps"):
        check_supported(Waiting(Saving), replace(CASE, **PLAIN))


def test_checkpoint_must_be_complete_within_the_run():
    (problem,) = check_scenario(replace(CASE, reload=ReloadSpec(step=2, async_steps=3)))
    assert problem.path == "reload.async_steps"
    assert problem.message == (
        "expected at most 2, because run.steps = 4 and reload.step = 2, got 3 (integer)."
    )
