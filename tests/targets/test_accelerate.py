"""accelerate's rules by case and what is refused, without the library."""

import os

import pytest
import torch

from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import find_target, numerics_of, refusals, with_options
from zero_sim.targets.accelerate.accelerator import rank_environment

DDP, FSDP2 = find_target("accelerate-ddp"), find_target("accelerate-fsdp2")
MEAN = {"mean_loss": "true"}


def case(target, *, said=None, model=None, ranks=3, micro_batches=2, **asked):
    tables = {name: asked.pop(name) for name in ("optimizer", "reload") if name in asked}
    stage = 0 if target is DDP else 3
    scenario = Scenario(
        schema=1,
        model=model or ModelSpec(name="mlp"),
        world=WorldSpec(size=ranks),
        run=RunSpec(micro_batches=micro_batches, steps=2),
        **tables,
        system=SystemSpec(target=target.name, stage=stage, **asked),
    )
    return with_options(scenario, said or {})


def refused(target, **asked):
    return refusals(target, case(target, **asked))


def rules(target, **asked):
    assert not refused(target, **asked)
    return numerics_of(target, case(target, **asked))


def test_ddp_multiplies_before_the_sum_and_fsdp2_divides_after_it():
    assert (rules(DDP).divide, rules(FSDP2).divide) == ("premul", "avg")


@pytest.mark.parametrize("target", [DDP, FSDP2], ids=lambda target: target.name)
def test_divided_losses_are_sums_over_micro_batches_divided_by_all_of_them(target):
    assert rules(target, said=MEAN, micro_batches=4).divide_by == "micro-batches"


@pytest.mark.parametrize("target", [DDP, FSDP2], ids=lambda target: target.name)
def test_losses_divided_by_no_power_of_two_have_no_rule(target):
    (problem,) = refused(target, said=MEAN, micro_batches=3)
    assert "no power of two of micro-batches" in problem.message


@pytest.mark.parametrize("count", range(1, 41))
def test_a_loss_that_is_multiplied_and_divided_leaves_gradients_as_they_are(count):
    weight = torch.ones((), requires_grad=True)
    (weight * count / count).backward()
    assert weight.grad == 1


def test_the_fp16_hook_sums_in_fp16():
    assert rules(DDP, said={"hook": "fp16"}).reduce_dtype == "fp16"


HALF = {"hook": "fp16"}
WEIGHTS = {"reload": ReloadSpec(step=1, form="consolidated", weights_only=True)}
CAST = ModelSpec(name="bit-hash", shapes=((2,),), dtype="bf16")
REFUSED = [
    (DDP, {"micro_batches": 41}, "in fp32 up to 40, got 41"),
    # Half of a gradient is below what fp16 holds with all its bits sooner than the whole.
    (DDP, {"said": {**HALF, **MEAN}, "micro_batches": 2}, "got both"),
    (DDP, {"said": HALF, "ranks": 1}, "at every micro-batch"),
    (DDP, WEIGHTS, "this target supports false, got true"),
    (FSDP2, WEIGHTS, "this target supports false, got true"),
    (FSDP2, {"ranks": 4, "redundancy": 4}, "expected fewer copies than ranks"),
    (FSDP2, {"model": CAST}, "cast to the dtype of its params"),
]


@pytest.mark.parametrize(("target", "asked", "words"), REFUSED)
def test_what_has_no_rule_is_refused_with_the_reason(target, asked, words):
    (problem,) = refused(target, **asked)
    assert words in problem.message


def test_what_is_refused_together_is_taken_alone():
    assert not refused(DDP, said={**HALF, **MEAN}, micro_batches=1)
    assert not refused(FSDP2, ranks=4, redundancy=2)


def test_fsdp2_by_itself_reduces_once_whatever_is_asked():
    said = {"model": ModelSpec(name="mlp", dtype="bf16"), "sync": "every"}
    alone, together = rules(FSDP2, ranks=1, **said), rules(FSDP2, **said)
    assert (alone.sync, alone.accumulate_dtype) == ("last", "param")
    assert (together.sync, together.accumulate_dtype) == (None, "fp32")


def test_only_weights_that_the_first_rank_sends_may_differ_at_the_start():
    model = ModelSpec(name="mlp", distinct_start=True)
    assert not refused(DDP, model=model)
    assert not refused(FSDP2, model=model, said={"loaded_by_first": "true"})
    (problem,) = refused(FSDP2, model=model)
    assert problem.path == "model.distinct_start"


FORMS = {DDP: {"consolidated"}, FSDP2: {"consolidated", "sharded"}}


@pytest.mark.parametrize("form", ["sharded", "consolidated"])
@pytest.mark.parametrize("target", FORMS, ids=lambda target: target.name)
def test_only_what_is_sharded_is_saved_in_shards(target, form):
    asked = ReloadSpec(step=1, form=form, world_size=2)
    assert (not refused(target, reload=asked)) == (form in FORMS[target])


@pytest.mark.parametrize(
    ("empty", "as_is", "fits"), [(1, False, True), (2, False, False), (2, True, True)]
)
def test_one_param_without_elements_can_be_saved(empty, as_is, fits):
    target = find_target("accelerate-ddp-as-is") if as_is else DDP
    model = ModelSpec(name="params", shapes=((0,),) * empty + ((1,),))
    asked = ReloadSpec(step=1, form="consolidated")
    assert (not refusals(target, case(DDP, model=model, reload=asked))) == fits


KNOWN = {
    "root params": {
        "said": {"loaded_by_first": "true"},
        "model": ModelSpec(name="params", shapes=((2,),)),
    },
    "checkpointing": {"said": {"checkpointing": "true"}},
    "stale state": {"optimizer": OptimizerSpec(name="adagrad"), "reload": ReloadSpec(step=1)},
    "containers": {"said": {"wrap": "size"}, "model": ModelSpec(name="moe")},
}


@pytest.mark.parametrize("asked", KNOWN.values(), ids=KNOWN)
def test_what_is_known_to_raise_is_refused_by_all_but_the_target_for_it(asked):
    as_is = find_target("accelerate-fsdp2-as-is")
    assert refused(FSDP2, **asked)
    assert not refused(as_is, **asked)


def test_the_variables_of_a_process_are_left_as_they_were():
    before = dict(os.environ)
    with rank_environment(rank=2, ranks=3):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "3")
        os.environ["MASTER_PORT"] = "as accelerate sets it"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("optimizer", "form", "fits"),
    [
        (OptimizerSpec(name="sgd"), "consolidated", False),
        (OptimizerSpec(name="sgd"), "sharded", True),
        (OptimizerSpec(name="sgd", momentum=0.5), "consolidated", True),
        (OptimizerSpec(name="adamw"), "consolidated", True),
    ],
)
def test_whole_states_without_tensors_cannot_be_loaded_under_fsdp2(optimizer, form, fits):
    asked = ReloadSpec(step=1, form=form)
    assert (not refused(FSDP2, optimizer=optimizer, reload=asked)) == fits
