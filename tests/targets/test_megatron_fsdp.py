"""Megatron-FSDP: rules by case and dtype, refusals, and a run if it is installed."""

import sys
from dataclasses import replace
from itertools import product
from types import ModuleType

import pytest

from zero_sim import run_case
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    ParamGroupSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import Numerics, find_target, numerics_of, refusals, why_missing, with_options
from zero_sim.targets.megatron.fsdp_engine import import_megatron_fsdp

TARGET = find_target("megatron-fsdp")
STAGES = (0, 1, 2, 3)
missing = why_missing(TARGET)
installed = pytest.mark.skipif(bool(missing), reason=missing or "installed")


def case(stage, dtype="fp32", *, said=None, ranks=3, redundancy=1, micro_batches=1, **tables):
    model = ModelSpec(name="mlp", hidden=5, dtype=dtype)
    scenario = Scenario(
        schema=1,
        name="set",
        **{"model": model, "optimizer": OptimizerSpec(lr=0.01), **tables},
        world=WorldSpec(size=ranks),
        run=RunSpec(steps=2, micro_batches=micro_batches),
        system=SystemSpec(target=TARGET.name, stage=stage, redundancy=redundancy),
    )
    return with_options(scenario, said or {})


def refused(stage, dtype="fp32", *, by=TARGET, **asked):
    return refusals(by, case(stage, dtype, **asked))


def rules(stage, dtype="fp32", **asked):
    assert not refused(stage, dtype, **asked)
    return numerics_of(TARGET, case(stage, dtype, **asked))


@pytest.mark.parametrize(("stage", "sync"), [(0, "last"), (1, "last"), (2, "every"), (3, "every")])
def test_sharded_gradients_are_reduced_every_micro_batch(stage, sync):
    assert rules(stage, micro_batches=2).sync == sync


@pytest.mark.parametrize(("stage", "sync"), [(1, "last"), (2, "every-in-block")])
def test_replicas_are_reduced_at_the_last_micro_batch(stage, sync):
    assert rules(stage, ranks=4, redundancy=2, micro_batches=2).sync == sync


def test_average_is_taken_per_round_if_rounds_are_summed():
    said = {"average": "true"}
    assert [rules(stage, said=said).divide_each for stage in STAGES] == ["step"] * 2 + ["round"] * 2
    assert {rules(stage, said=said).divide for stage in STAGES} == {"avg"}


def test_accumulation_and_reduction_may_have_different_dtypes():
    found = rules(3, "bf16", said={"main_grads": "fp32", "communication": "bf16"}, micro_batches=2)
    assert (found.accumulate_dtype, found.reduce_dtype) == ("fp32", "param")
    found = rules(1, "bf16", said={"main_grads": "fp32"})
    assert (found.accumulate_dtype, found.reduce_dtype) == ("fp32", "fp32")


ADDED = {"said": {"main_grads": "bf16"}, "micro_batches": 2}
MASTERS = {"said": {"main_params": "param"}}


@pytest.mark.parametrize(
    ("stage", "dtype", "asked", "words"),
    [
        (1, "fp32", ADDED, "not rounded to bf16"),
        # On one rank, gradients are added as if not sharded.
        (2, "fp32", {**ADDED, "ranks": 1}, "not rounded to bf16"),
        (3, "fp32", {**ADDED, "ranks": 1}, "not rounded to bf16"),
        (3, "bf16", {"said": {"communication": "fp32"}}, "rounds a sum in fp32 to bf16"),
        (1, "bf16", MASTERS, "masters would not be fp32"),
    ],
)
def test_case_without_a_rule_is_refused_with_the_reason(stage, dtype, asked, words):
    (problem,) = refused(stage, dtype, **asked)
    assert words in problem.message


@pytest.mark.parametrize(
    ("stage", "asked"),
    [
        (1, {**ADDED, "micro_batches": 1}),
        (2, {**ADDED, "ranks": 2}),
        (3, {**ADDED, "ranks": 2}),
        (1, MASTERS),
    ],
)
def test_case_without_rounding_is_accepted(stage, asked):
    assert not refused(stage, **asked)


@pytest.mark.parametrize(
    ("stage", "asked", "says"),
    [
        (0, {"said": {"overlap_grads": "false"}}, "twice"),
        (1, {"said": {"overlap_grads": "false"}}, "twice"),
        (2, {"said": {"shard_optimizer": "true"}}, "steps once with zero gradients"),
        (2, {"said": {"communication": "bf16"}, "ranks": 1}, "to themselves"),
        (3, {"ranks": 2, "redundancy": 2, "micro_batches": 2}, "again at every micro-batch"),
        (1, {"model": ModelSpec(name="params", shapes=((1, 3), (2, 2)))}, "cuts a row in two"),
    ],
)
def test_known_fault_is_refused_except_by_the_as_is_target(stage, asked, says):
    (problem,) = refused(stage, **asked)
    assert says in problem.message
    assert not refused(stage, by=find_target("megatron-fsdp-as-is"), **asked)


def test_sharded_optimizer_is_accepted_if_it_changes_no_update():
    said, sgd = {"shard_optimizer": "true"}, OptimizerSpec(name="sgd")
    decays = replace(sgd, groups=(ParamGroupSpec(match="bias", weight_decay=0.1),))
    assert not refused(3, said=said, optimizer=sgd)
    assert refused(3, said=said, optimizer=decays)


def test_every_combination_of_options_has_rules_or_a_reason():
    drawn = [(option.default, *option.values) for option in TARGET.options.values()]
    for stage, dtype, values in product(STAGES, ("fp32", "bf16"), product(*drawn)):
        said = {
            name: str(value).lower() for name, value in zip(TARGET.options, values, strict=True)
        }
        asked = case(stage, dtype, said=said)
        assert refusals(TARGET, asked) or isinstance(numerics_of(TARGET, asked), Numerics)


def test_import_hides_megatron_core(monkeypatch, tmp_path):
    (tmp_path / "megatron_fsdp.py").write_text(
        "try:\n    import megatron.core\nexcept ImportError:\n    alone = True\n"
    )
    core = ModuleType("megatron.core")
    for name, module in (("megatron", ModuleType("megatron")), ("megatron.core", core)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "megatron_fsdp", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert import_megatron_fsdp().alone
    finally:
        sys.modules.pop("megatron_fsdp", None)
    assert sys.modules["megatron.core"] is core


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_every_strategy_equals_the_reference(stage):
    result = run_case(case(stage, "bf16", micro_batches=2))
    assert (result.verdict, result.findings) == ("pass", ())
