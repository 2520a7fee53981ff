"""DeepSpeed's rules by case and dtype, and its refusals, without the library."""

from dataclasses import replace
from itertools import product

import pytest

from zero_sim.scenario.spec import (
    DataSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    ParamGroupSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import Numerics, find_target, numerics_of, refusals, with_options

STAGES = (0, 1, 2, 3)


def case(stage, dtype="fp32", *, said=None, system=None, **tables):
    usual = {
        "model": ModelSpec(name="mlp", dtype=dtype),
        "optimizer": OptimizerSpec(name="sgd"),
        "world": WorldSpec(size=3),
    }
    scenario = Scenario(
        schema=1,
        **{**usual, **tables},
        system=SystemSpec(target=f"deepspeed-zero-{stage}", stage=stage, **(system or {})),
    )
    return with_options(scenario, said or {})


def refused(stage, dtype="fp32", **asked):
    return refusals(find_target(f"deepspeed-zero-{stage}"), case(stage, dtype, **asked))


def rules(stage, dtype="fp32", **asked):
    assert not refused(stage, dtype, **asked)
    return numerics_of(find_target(f"deepspeed-zero-{stage}"), case(stage, dtype, **asked))


@pytest.mark.parametrize(
    ("stage", "dtype"), [(s, d) for s in STAGES for d in ("fp32", "bf16", "fp16")]
)
def test_every_stage_reduces_in_every_dtype(stage, dtype):
    found = rules(stage, dtype)
    assert (found.grad_dtype, found.reduce_dtype, found.accumulate_dtype) == ("param", None, None)


@pytest.mark.parametrize("stage", STAGES)
def test_stages_above_0_skip_non_finite_steps(stage):
    assert rules(stage).nonfinite == ("skipped" if stage else "stepped")


ALL_REDUCE = {"sum_by": "all-reduce"}


@pytest.mark.parametrize("stage", [1, 2])
def test_predivide_divides_before_and_after_the_all_reduce(stage):
    found = rules(stage, said={"predivide": "2.0"}, system=ALL_REDUCE)
    assert (found.divide, found.predivide_by) == ("postmul-rounded", 2.0)


@pytest.mark.parametrize(("stage", "rule"), [(0, "premul-fp32"), (1, "pre"), (2, "pre")])
def test_prescaled_gradients_are_divided_before_the_sum(stage, rule):
    system = ALL_REDUCE if stage else None
    assert rules(stage, said={"prescale": "true"}, system=system).divide == rule


def test_cast_before_the_sum_has_a_rule():
    found = rules(2, "bf16", said={"communication": "fp32"}, system=ALL_REDUCE)
    assert (found.reduce_dtype, found.accumulate_dtype) == ("fp32", "bf16")


def test_fp32_accumulation_of_stage_2_has_a_rule():
    assert rules(2, "bf16", said={"accumulation": "fp32"}).accumulate_dtype == "fp32"


SCALE = LossScaleSpec(initial=1024.0, growth_interval=100)


def scaled(**fields):
    return {"optimizer": OptimizerSpec(loss_scale=replace(SCALE, **fields))}


CLIPS = {"optimizer": OptimizerSpec(clip_norm=0.1)}
FP16 = {"said": {"communication": "fp16"}}
NAN = DataSpec(nan=NanSpec(step=0, rank=0))
REFUSED = [
    # A reduce-scatter uses neither option.
    (2, "fp32", {"said": {"predivide": "2.0"}}, "a sum that ignores it"),
    (2, "fp32", {"said": {"prescale": "true"}}, "a sum that ignores it"),
    (
        1, "fp32", {"said": {"prescale": "true", "predivide": "2.0"}, "system": ALL_REDUCE},
        "ignores the factor",
    ),
    (
        2, "bf16", {"said": {"communication": "fp32"}},
        "divided in another dtype and then cast to fp32",
    ),
    (0, "bf16", {"said": {"communication": "fp32"}}, "then rounded to bf16"),
    (1, "bf16", {"said": {"accumulation": "fp32"}}, "BF16_Optimizer"),
    (
        0, "fp32", {**FP16, "model": ModelSpec(name="bit-hash", shapes=((1,),))},
        "exceed the range of fp16",
    ),
    (1, "fp16", scaled(initial=2.0), "raises if a gradient overflows at 1"),
    (1, "fp16", scaled(growth_interval=2), "next step's scale"),
    # A norm is compared at stage 3.
    (3, "fp32", {**CLIPS, "data": NAN}, "reports an infinite norm for each step that it skips"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "dtype", "asked", "words"), REFUSED)
def test_case_without_a_rule_is_refused_with_the_reason(stage, dtype, asked, words):
    (problem,) = refused(stage, dtype, **asked)
    assert words in problem.message


@pytest.mark.parametrize(("stage", "asked"), [(0, FP16), (3, CLIPS)])
def test_options_refused_in_combination_are_accepted_alone(stage, asked):
    assert not refused(stage, **asked)


def test_every_combination_of_options_has_rules_or_a_reason():
    for stage, dtype, by in product(
        STAGES, ("fp32", "bf16", "fp16"), ("reduce-scatter", "all-reduce")
    ):
        target = find_target(f"deepspeed-zero-{stage}")
        names = list(target.options)
        drawn = [(o.default, *o.values) for o in target.options.values()]
        for values in product(*drawn):
            said = {n: str(v).lower() for n, v in zip(names, values, strict=True)}
            asked = case(stage, dtype, said=said, system={"sum_by": by})
            assert refusals(target, asked) or isinstance(numerics_of(target, asked), Numerics)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_scaled_in_fp16_only(stage):
    optimizer = OptimizerSpec(loss_scale=SCALE)
    assert not refused(stage, "fp16", optimizer=optimizer)
    (problem,) = refused(stage, "bf16", optimizer=optimizer)
    assert problem.path == "optimizer.loss_scale"


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSpec(),
        OptimizerSpec(name="sgd", weight_decay=0.1),
        OptimizerSpec(name="sgd", groups=(ParamGroupSpec(match="bias", weight_decay=0.1),)),
    ],
)
def test_stage_0_in_bf16_accepts_only_sgd_without_decay(optimizer):
    (problem,) = refused(0, "bf16", optimizer=optimizer)
    assert "starts with a step on zero gradients" in problem.message
    assert not refused(0, "fp32", optimizer=optimizer)


def reloaded(stage, dtype="fp32", **said):
    asked = replace(case(stage, dtype), run=RunSpec(steps=3), reload=ReloadSpec(step=1, **said))
    return refusals(find_target(f"deepspeed-zero-{stage}"), asked)


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoint_is_loaded_only_by_the_same_number_of_ranks(stage):
    assert not reloaded(stage)
    assert not reloaded(stage, world_size=3)
    (problem,) = reloaded(stage, world_size=2)
    assert problem.path == "reload.world_size"
    assert "elastic" in problem.message


def test_consolidated_checkpoints_are_refused():
    assert [problem.path for problem in reloaded(1, form="consolidated")] == ["reload.form"]


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (2, "fp16"), (3, "fp32")])
def test_weights_only_load_is_accepted_if_params_are_masters(stage, dtype):
    assert not reloaded(2, "fp32", weights_only=True)
    (problem,) = reloaded(stage, dtype, weights_only=True)
    assert problem.path == "reload.weights_only"


def test_one_row_on_one_rank_is_refused_at_stage_3():
    """The bits of an fp32 product of one row depend on addresses. Other dtypes and several rows do
    not.
    """
    alone = {"world": WorldSpec(size=1), "data": DataSpec(rows=1)}
    (problem,) = refused(3, **alone)
    assert problem.path == "data.rows"
    assert not refused(3, "bf16", **alone)
    assert not refused(2, **alone)
    assert not refused(3, **alone | {"world": WorldSpec(size=2)})
    assert not refused(3, **alone | {"data": DataSpec(rows=2)})


ADAM, SMALL = OptimizerSpec(), ModelSpec(name="params", shapes=((4,), (4,)))
GROUPS = OptimizerSpec(groups=(ParamGroupSpec(match="p0", weight_decay=0.5),))
UNIVERSAL = {"universal": "true"}
GROWS = {"reload": ReloadSpec(step=1, world_size=4), "run": RunSpec(steps=2)}


def asked_universal(stage, dtype="fp32", **asked):
    return [p.path for p in refused(stage, dtype, said=UNIVERSAL, **{**GROWS, **asked})]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_universal_checkpoints_change_the_number_of_ranks(stage):
    (problem,) = refused(stage, optimizer=ADAM, **GROWS)
    assert problem.path == "reload.world_size"
    assert "option universal" in problem.suggestion
    assert not asked_universal(stage, optimizer=ADAM)


def test_stage_0_has_no_universal_checkpoints():
    assert "universal" not in find_target("deepspeed-zero-0").options


@pytest.mark.parametrize(
    ("optimizer", "paths"),
    [
        (OptimizerSpec(name="radam"), []),
        (OptimizerSpec(name="sgd", momentum=0.5), ["optimizer.name"]),
        (OptimizerSpec(name="nadam"), ["optimizer.name"]),
        (OptimizerSpec(amsgrad=True), ["optimizer.amsgrad"]),
    ],
)
def test_universal_checkpoints_need_two_moments(optimizer, paths):
    assert asked_universal(1, optimizer=optimizer) == paths
    assert not refused(1, said=UNIVERSAL, optimizer=optimizer)


def test_universal_checkpoints_are_not_loaded_weights_only():
    weights = ReloadSpec(step=1, weights_only=True)
    assert asked_universal(2, optimizer=ADAM, reload=weights) == ["reload.weights_only"]


@pytest.mark.parametrize(
    ("elems", "ranks", "fits"), [(6, 4, False), (7, 4, True), (4, 2, True), (2, 2, False)]
)
def test_universal_checkpoint_needs_a_part_of_each_group_on_each_rank(elems, ranks, fits):
    asked = {
        "model": ModelSpec(name="params", shapes=((elems,), (40,))),
        "optimizer": GROUPS,
        "reload": ReloadSpec(step=1, world_size=ranks),
    }
    assert asked_universal(2, **asked) == ([] if fits else ["reload.world_size"])


def test_stage_3_loads_a_universal_checkpoint_of_one_group_only():
    assert asked_universal(3, model=SMALL, optimizer=GROUPS) == ["optimizer.groups"]
    assert not asked_universal(3, model=SMALL, optimizer=ADAM)


@pytest.mark.parametrize(
    ("stage", "dtype", "asked", "fits"),
    [
        (3, "fp16", {}, False),
        (3, "bf16", {}, True),
        (3, "bf16", {"data": NAN}, False),
        (3, "bf16", {"data": NAN, "reload": ReloadSpec(step=2), "run": RunSpec(steps=3)}, True),
        (2, "fp16", {"data": NAN}, True),
    ],
)
def test_stage_3_saves_universal_checkpoints_only_after_a_step(stage, dtype, asked, fits):
    assert asked_universal(stage, dtype, optimizer=ADAM, **asked) == (
        [] if fits else ["reload.step"]
    )
