"""FSDP2 as it can be set: each setting equals the reference by the rules declared for it."""

from dataclasses import replace

import pytest
import torch

from zero_sim.run import run_case
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import find_target, refusals, with_options
from zero_sim.targets.torch.fsdp2_knobs_engine import FSDP2KnobsEngine
from zero_sim.testing import conformance

CASE = Scenario(
    schema=1,
    name="set",
    model=ModelSpec(name="mlp", hidden=5),
    world=WorldSpec(size=3),
    system=SystemSpec(target="torch-fsdp2-knobs", stage=3),
    optimizer=OptimizerSpec(clip_norm=1e-3),
    run=RunSpec(steps=2, micro_batches=2),
)
BLOCKS = {"world": WorldSpec(size=6)}


def case(options=None, *, dtype="fp32", system=None, **fields):
    model = replace(CASE.model, dtype=dtype)
    changed = replace(CASE, model=model, system=replace(CASE.system, **(system or {})), **fields)
    return with_options(changed, options or {})


SET = {
    "force_sum": case({"force_sum": "true"}),
    "divide_factor": case({"divide_factor": "0.7"}),
    "divide_factor as AVG": case({"divide_factor": "3.0"}),
    "divide_factor, summed": case({"divide_factor": "0.7", "force_sum": "true"}, dtype="bf16"),
    "reduced in bf16": case({"reduce_dtype": "bf16"}, run=RunSpec(steps=2)),
    "reduced in fp16": case({"reduce_dtype": "fp16"}, run=RunSpec(steps=2)),
    "reduced in fp32": case({"reduce_dtype": "fp32", "fp32_output": "true"}, dtype="bf16"),
    "every, in bf16": case({"waits_at_last": "true"}, dtype="bf16", system={"sync": "every"}),
    "kept": case(
        {"kept_after_backward": "true", "unshard_in_backward": "false"},
        system={"reshard_after_forward": False, "prefetch": 1},
    ),
    "offloaded": case({"cpu_offload": "true"}),
    "blocks": case({"force_sum": "true"}, system={"redundancy": 2}, **BLOCKS),
    "blocks of two": case(system={"redundancy": 3}, **BLOCKS),
    "blocks, every": case(
        {"all_reduce_last": "true"}, system={"redundancy": 3, "sync": "every"}, **BLOCKS
    ),
    "kept by few": case({"reshard_ranks": "3"}, **BLOCKS),
}


@pytest.mark.parametrize("name", SET)
def test_what_it_is_set_to_equals_the_reference(name):
    assert not refusals(find_target("torch-fsdp2-knobs"), SET[name])
    result = run_case(SET[name])
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def test_drawn_cases_equal_the_reference():
    conformance("torch-fsdp2-knobs", cases=15)()


def test_a_divide_factor_that_is_not_set_shows(monkeypatch):
    monkeypatch.setattr(FSDP2KnobsEngine, "_set", lambda self, unit: None)
    assert run_case(SET["divide_factor"]).findings[0].check == "equality.grad"


def test_blocks_that_are_never_added_show(monkeypatch):
    def never(self, *, last):
        self._sharded.set_requires_all_reduce(False)

    monkeypatch.setattr(FSDP2KnobsEngine, "start_micro_batch", never)
    assert run_case(SET["blocks, every"]).verdict == "fail"


def test_params_gathered_as_fp32_show(monkeypatch):
    right = FSDP2KnobsEngine._shard

    def wide(self, module, mesh):
        self._dtype, dtype = torch.float32, self._dtype
        sharded = right(self, module, mesh)
        self._dtype = dtype
        return sharded

    monkeypatch.setattr(FSDP2KnobsEngine, "_shard", wide)
    assert run_case(SET["reduced in fp32"]).verdict in ("fail", "error")


REFUSED = {
    "is by no rule that can be declared, got blocks of 3 ranks": case(
        system={"redundancy": 2}, **BLOCKS
    ),
    "adds fp32 gradients, not rounded to bf16": case({"reduce_dtype": "bf16"}),
    "divides twice": case({"force_sum": "true", "divide_factor": "2.0"}, world=WorldSpec(size=1)),
    "which backward needs": case({"unshard_in_backward": "false"}),
    "expected reshard_ranks to divide the 6 ranks": case({"reshard_ranks": "4"}, **BLOCKS),
    "that every rank keeps after forward": case(
        {"reshard_ranks": "3"}, system={"reshard_after_forward": False}, **BLOCKS
    ),
    "no copies": case({"all_reduce_last": "true"}),
    "expected one of bf16, fp16, fp32, param, got 'half'": case({"reduce_dtype": "half"}),
    "larger than what fp16 can be": replace(
        SET["reduced in fp16"], model=ModelSpec(name="bit-hash", shapes=((3,),))
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_by_no_rule_is_refused_with_the_reason(words):
    (problem,) = refusals(find_target("torch-fsdp2-knobs"), REFUSED[words])
    assert words in problem.message


@pytest.mark.parametrize("words", list(REFUSED)[:2])
def test_what_is_refused_has_other_bits(monkeypatch, words):
    monkeypatch.setattr(
        type(find_target("torch-fsdp2-knobs")), "refuses", lambda self, scenario: ()
    )
    assert run_case(REFUSED[words]).findings[0].check in ("equality.norm", "equality.grad")
