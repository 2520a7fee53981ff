"""Options of FSDP1 and FSDP2: each setting equals the reference by its declared rules."""

from dataclasses import replace

import pytest
import torch

from zero_sim import run_case
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import find_target, refusals, with_options
from zero_sim.targets.torch.fsdp1 import FSDP1Engine
from zero_sim.targets.torch.fsdp2_engine import FSDP2Engine

CASE = Scenario(
    schema=1,
    name="set",
    model=ModelSpec(name="mlp", hidden=5),
    world=WorldSpec(size=3),
    system=SystemSpec(stage=3),
    optimizer=OptimizerSpec(clip_norm=1e-3),
    run=RunSpec(steps=2, micro_batches=2),
)


def case(target, options=None, *, dtype="fp32", ranks=3, micro_batches=2, **system):
    changed = replace(
        CASE,
        model=replace(CASE.model, dtype=dtype),
        world=WorldSpec(size=ranks),
        system=replace(CASE.system, target=target, **system),
        run=replace(CASE.run, micro_batches=micro_batches),
    )
    return with_options(changed, options or {})


def fsdp1(options=None, **fields):
    return case("torch-fsdp1", options, **fields)


def fsdp2(options=None, **fields):
    return case("torch-fsdp2", options, **fields)


SET = {
    "fsdp1, blocks": fsdp1(ranks=6, redundancy=2),
    "fsdp1, blocks, every, in bf16": fsdp1(
        ranks=6, redundancy=3, stage=2, sync="every", dtype="bf16"
    ),
    "fsdp1, reduced in bf16": fsdp1({"reduce_dtype": "bf16"}),
    "fsdp1, reduced in fp32": fsdp1({"reduce_dtype": "fp32"}, dtype="bf16"),
    "fsdp1, whole, in bf16": fsdp1({"reduce_dtype": "bf16"}, stage=0),
    "fsdp1, prefetch": fsdp1({"forward_prefetch": "true", "backward_prefetch": "post"}),
    "fsdp1, no prefetch": fsdp1(
        {"limit_all_gathers": "false", "backward_prefetch": "none"}, stage=2
    ),
    "force_sum": fsdp2({"force_sum": "true"}),
    "divide_factor": fsdp2({"divide_factor": "0.7"}),
    "divide_factor as AVG": fsdp2({"divide_factor": "3.0"}),
    "divide_factor, summed": fsdp2({"divide_factor": "0.7", "force_sum": "true"}, dtype="bf16"),
    "reduced in bf16": fsdp2({"reduce_dtype": "bf16"}, micro_batches=1),
    "reduced in fp16": fsdp2({"reduce_dtype": "fp16"}, micro_batches=1),
    "reduced in fp32": fsdp2({"reduce_dtype": "fp32", "fp32_output": "true"}, dtype="bf16"),
    "every, in bf16": fsdp2({"waits_at_last": "true"}, dtype="bf16", sync="every"),
    "kept": fsdp2(
        {"kept_after_backward": "true", "unshard_in_backward": "false"},
        reshard_after_forward=False, prefetch=1,
    ),
    "offloaded": fsdp2({"cpu_offload": "true"}),
    "blocks": fsdp2({"force_sum": "true"}, ranks=6, redundancy=2),
    "blocks of two": fsdp2(ranks=6, redundancy=3),
    "blocks of two, at stage 1": fsdp2(ranks=6, redundancy=3, stage=1),
    "blocks, every": fsdp2({"all_reduce_last": "true"}, ranks=6, redundancy=3, sync="every"),
    "kept by few": fsdp2({"reshard_ranks": "3"}, ranks=6),
}  # fmt: skip


@pytest.mark.parametrize("name", SET)
def test_each_setting_equals_the_reference(name):
    assert not refusals(find_target(SET[name].system.target), SET[name])
    result = run_case(SET[name])
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def test_reduction_at_the_last_micro_batch_only_is_found(monkeypatch):
    start = FSDP1Engine.start_micro_batch

    def late(self, *, last):
        self._syncs_every = False
        start(self, last=last)

    monkeypatch.setattr(FSDP1Engine, "start_micro_batch", late)
    assert run_case(SET["fsdp1, blocks, every, in bf16"]).findings[0].check == "equality.grad"


def test_divide_factor_not_set_is_found(monkeypatch):
    monkeypatch.setattr(FSDP2Engine, "_set", lambda self, unit: None)
    assert run_case(SET["divide_factor"]).findings[0].check == "equality.grad"


def test_replicas_never_reduced_are_found(monkeypatch):
    def never(self, *, last):
        self._sharded.set_requires_all_reduce(False)

    monkeypatch.setattr(FSDP2Engine, "start_micro_batch", never)
    assert run_case(SET["blocks, every"]).verdict == "fail"


def test_params_gathered_as_fp32_are_found(monkeypatch):
    right = FSDP2Engine._shard

    def wide(self, module, mesh):
        self._dtype, dtype = torch.float32, self._dtype
        sharded = right(self, module, mesh)
        self._dtype = dtype
        return sharded

    monkeypatch.setattr(FSDP2Engine, "_shard", wide)
    assert run_case(SET["reduced in fp32"]).verdict in ("fail", "error")


WRONG = {
    "over the ranks again": fsdp1(stage=0, sync="every"),
    "reduces nothing with HYBRID_SHARD": fsdp1(redundancy=3),
    "no rule can be declared, got shard groups of 3 ranks": fsdp2(ranks=6, redundancy=2),
    "adds fp32 gradients, not rounded to bf16": fsdp2({"reduce_dtype": "bf16"}),
}
REFUSED = WRONG | {
    "divides twice": fsdp2({"force_sum": "true", "divide_factor": "2.0"}, ranks=1),
    "which backward needs": fsdp2({"unshard_in_backward": "false"}),
    "no replicas": fsdp2({"all_reduce_last": "true"}),
    "expected one of bf16, fp16, fp32, param, got 'half'": fsdp2({"reduce_dtype": "half"}),
    "exceed the range of fp16": replace(
        SET["reduced in fp16"], model=ModelSpec(name="bit-hash", shapes=((3,),))
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_setting_without_a_rule_is_refused_with_the_reason(words):
    (problem,) = refusals(find_target(REFUSED[words].system.target), REFUSED[words])
    assert words in problem.message


@pytest.mark.parametrize("words", WRONG)
def test_refused_settings_give_other_bits(monkeypatch, words):
    target = find_target(WRONG[words].system.target)
    monkeypatch.setattr(type(target), "refuses", lambda self, scenario: ())
    assert run_case(WRONG[words]).findings[0].check in ("equality.norm", "equality.grad")


@pytest.mark.parametrize("name", ["torch-fsdp1", "torch-fsdp2", "torch-ddp"])
def test_unknown_order_is_refused_only_for_rules_without_a_bound(name):
    """Default options compute in fp32 only; FSDP1 divides in two halves."""
    stage = find_target(name).capabilities.stages[0]
    scenario = replace(
        CASE,
        world=WorldSpec(size=3, order_known=False),
        system=SystemSpec(target=name, stage=stage),
        optimizer=OptimizerSpec(),
    )
    found = [problem.path for problem in refusals(find_target(name), scenario)]
    assert found == (["world.order_known"] if name == "torch-fsdp1" else [])
