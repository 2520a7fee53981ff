"""FSDP1 as it can be set: each setting equals the reference by the rules declared for it."""

from dataclasses import replace

import pytest

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
from zero_sim.targets.torch.fsdp1_knobs_engine import FSDP1KnobsEngine
from zero_sim.testing import conformance

CASE = Scenario(
    schema=1,
    name="set",
    model=ModelSpec(name="mlp", hidden=5),
    world=WorldSpec(size=3),
    system=SystemSpec(target="torch-fsdp1-knobs", stage=3),
    optimizer=OptimizerSpec(clip_norm=1e-3),
    run=RunSpec(steps=2, micro_batches=2),
)


def case(options=None, *, dtype="fp32", world_size=3, **system):
    changed = replace(
        CASE,
        model=replace(CASE.model, dtype=dtype),
        world=WorldSpec(size=world_size),
        system=replace(CASE.system, **system),
    )
    return with_options(changed, options or {})


SET = {
    "blocks": case(world_size=6, redundancy=2),
    "blocks, every, in bf16": case(world_size=6, redundancy=3, stage=2, sync="every", dtype="bf16"),
    "reduced in bf16": case({"reduce_dtype": "bf16"}),
    "reduced in fp32": case({"reduce_dtype": "fp32"}, dtype="bf16"),
    "whole, in bf16": case({"reduce_dtype": "bf16"}, stage=0),
    "prefetch": case({"forward_prefetch": "true", "backward_prefetch": "post"}),
    "no prefetch": case({"limit_all_gathers": "false", "backward_prefetch": "none"}, stage=2),
}


@pytest.mark.parametrize("name", SET)
def test_what_it_is_set_to_equals_the_reference(name):
    assert not refusals(find_target("torch-fsdp1-knobs"), SET[name])
    result = run_case(SET[name])
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def test_drawn_cases_equal_the_reference():
    conformance("torch-fsdp1-knobs", cases=10)()


def test_summing_at_the_last_micro_batch_alone_shows(monkeypatch):
    start = FSDP1KnobsEngine.start_micro_batch

    def late(self, *, last):
        self._syncs_every = False
        start(self, last=last)

    monkeypatch.setattr(FSDP1KnobsEngine, "start_micro_batch", late)
    assert run_case(SET["blocks, every, in bf16"]).findings[0].check == "equality.grad"


REFUSED = {
    "sums again over the ranks": case(stage=0, sync="every"),
    "reduces nothing with HYBRID_SHARD": case(redundancy=3),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_by_no_rule_is_refused_with_the_reason(words):
    (problem,) = refusals(find_target("torch-fsdp1-knobs"), REFUSED[words])
    assert words in problem.message


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_has_other_bits(monkeypatch, words):
    target = find_target("torch-fsdp1-knobs")
    monkeypatch.setattr(type(target), "refuses", lambda self, scenario: ())
    assert run_case(REFUSED[words]).findings[0].check in ("equality.norm", "equality.grad")
