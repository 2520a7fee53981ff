"""Mistakes with params in fp8, made by hand: each fails, and the first finding points at it."""

import pytest
import torch

from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import own
from zero_sim.zero import buffer as buffer_module
from zero_sim.zero import fp8
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.fp8 import ScaleUpdate

# 400 elements of weight: with steps this large scales change in every one of them.
MODEL = ModelSpec(name="fp8", hidden=5)
SGD = OptimizerSpec(name="sgd", lr=0.3)


def first(result):
    assert result.verdict == "fail", result
    return result.findings[0].check


@pytest.fixture
def case(judged):
    """Run a small case in fp8."""

    def run(**parts):
        return judged(**{"model": MODEL, "optimizer": SGD, "run": RunSpec(steps=3), **parts})

    return run


@pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2", "mixed"])
def test_unbroken_it_passes(case, fp8_format):
    assert case(model=ModelSpec(name="fp8", hidden=5, fp8_format=fp8_format)).verdict == "pass"


def test_the_greatest_of_the_own_shard_alone(case, monkeypatch):
    monkeypatch.setattr(fp8, "all_reduce_max", lambda flat, *, group: None)
    assert first(case()) == "equality.scale"


def test_a_scale_that_is_never_updated(case, monkeypatch):
    monkeypatch.setattr(ScaleUpdate, "run", lambda self, masters: list(masters))
    assert first(case()) == "equality.scale"


def test_the_greatest_of_the_replicas(case, monkeypatch):
    right = ScaleUpdate.__init__

    def elsewhere(self, scales, *, group):
        right(self, scales, group=replicas[group])

    replicas = {}
    groups = own.build_redundancy_groups

    def remember(group, *, redundancy):
        shard_group, replica_group = groups(group, redundancy=redundancy)
        replicas[shard_group] = replica_group
        return shard_group, replica_group

    monkeypatch.setattr(own, "build_redundancy_groups", remember)
    monkeypatch.setattr(ScaleUpdate, "__init__", elsewhere)
    result = case(world=WorldSpec(size=4), system=SystemSpec(redundancy=2))
    assert first(result) == "equality.scale"


def test_one_format_taken_for_the_other(case, monkeypatch):
    right = fp8.choose_scale
    monkeypatch.setattr(
        fp8, "choose_scale", lambda amax, *, dtype: right(amax, dtype=torch.float8_e4m3fn)
    )
    result = case()
    assert first(result) == "equality.scale"
    assert result.findings[0].param.endswith("down.weight")


def test_values_that_are_not_clamped(case, monkeypatch):
    def overflows(values, master, *, scale):
        values.copy_(master / scale)

    monkeypatch.setattr(buffer_module, "quantize_", overflows)
    result = case(
        model=ModelSpec(name="fp8", hidden=4, fp8_format="e5m2"),
        system=SystemSpec(divide="none"),
        optimizer=OptimizerSpec(name="sgd", lr=3e38),
        run=RunSpec(steps=1),
    )
    assert first(result) == "invariant.cast"
    assert result.findings[0].got_value in ("inf", "-inf")


def test_a_stale_scale_on_one_rank(case, monkeypatch):
    right = ScaleUpdate.run

    def lags(self, masters):
        before = {param: scale.clone() for param, scale in self._scales.items()}
        right(self, masters)
        if self._group.rank() == 1:
            for param, scale in self._scales.items():
                scale.copy_(before[param])

    monkeypatch.setattr(ScaleUpdate, "run", lags)
    result = case()
    assert first(result) == "equality.scale"
    assert result.findings[0].rank == 1


def test_values_at_the_scale_before(case, monkeypatch):
    right = Buffer.write_param_shard

    def early(self, param, data):
        memory = self.memory[param]
        if memory.scale is not None:
            memory.scale.mul_(2)
        right(self, param, data)
        if memory.scale is not None:
            memory.scale.div_(2)

    monkeypatch.setattr(Buffer, "write_param_shard", early)
    assert first(case()) == "invariant.cast"


def test_a_scale_that_a_checkpoint_forgets(case, monkeypatch):
    right = own.checkpoint.load

    def forgetful(path, *, ddp, **others):
        right(path, ddp=ddp, **others)
        for scale in ddp.scales.values():
            scale.fill_(1.0)

    monkeypatch.setattr(own.checkpoint, "load", forgetful)
    result = case(reload=ReloadSpec(step=1))
    assert first(result) == "equality.load"
    assert {finding.step for finding in result.findings} == {1}
