"""Traffic and memory against closed forms, which a wrong system does not satisfy."""

from dataclasses import replace

import torch
from torch import nn

from zero_sim.cost.calls import calls_of_step
from zero_sim.cost.forms import ParamSize, bucket_forms, sizes_of
from zero_sim.cost.memory import bytes_held, check_memory
from zero_sim.mutants import find_mutants
from zero_sim.scenario.spec import (
    LossScaleSpec,
    ModelSpec,
    OptimizerSpec,
    ParamGroupSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.targets.own import ZeroSimTarget

THREE = [
    ParamSize(
        name=name, kind="dense", dtype="torch.float32", elems=elems, param_bytes=4, grad_bytes=4
    )
    for name, elems in (("a", 5), ("b", 0), ("c", 4))
]


def case(**parts):
    return Scenario(schema=1, model=ModelSpec(name="mlp"), **parts)


def checks(result):
    return [finding.check for finding in result.findings]


def broken_by(judged, id, **parts):
    (mutant,) = find_mutants([id])
    with mutant.apply() as patches:
        result = judged(**parts)
    assert patches.armed
    return result


def test_calls_of_a_step_at_stage_1():
    scenario = case(world=WorldSpec(size=4), system=SystemSpec(bucket_elems=5))
    assert calls_of_step(THREE, scenario=scenario, rank=0, skipped=False) == {
        ("all_reduce", 4, 3): 1,
        ("reduce_scatter", 4, 8): 1,
        ("reduce_scatter", 4, 4): 1,
        ("all_gather", 4, 2): 1,
        ("all_gather", 4, 1): 1,
    }


def test_skipped_step_gathers_nothing():
    scenario = case(world=WorldSpec(size=4), system=SystemSpec(bucket_elems=5))
    calls = calls_of_step(THREE, scenario=scenario, rank=0, skipped=True)
    assert not [kind for kind, *_ in calls if kind == "all_gather"]


def test_replicas_sum_shards():
    system = SystemSpec(redundancy=2, sync="every")
    scenario = case(world=WorldSpec(size=4), system=system, run=RunSpec(micro_batches=3))
    calls = calls_of_step(THREE, scenario=scenario, rank=3, skipped=False)
    assert calls["reduce_scatter", 2, 10] == calls["all_reduce", 2, 5] == 3


def test_uneven_shards_depend_on_the_rank():
    scenario = case(world=WorldSpec(size=2), system=SystemSpec(partition="uneven"))
    by_rank = [bucket_forms(THREE, scenario=scenario, rank=rank)[0] for rank in (0, 1)]
    assert [form.shard_elems for form in by_rank] == [5, 4]
    calls = calls_of_step(THREE, scenario=scenario, rank=1, skipped=False)
    assert calls["reduce_scatter_list", 2, 9] == calls["all_to_all", 2, 8] == 1


def test_rows_partition_skips_empty_params():
    empty = [replace(THREE[1], name=name) for name in "de"]
    scenario = case(
        system=SystemSpec(partition="rows", bucket_elems=1, buffers_by="param-group"),
        optimizer=OptimizerSpec(groups=(ParamGroupSpec(match="a"),)),
    )
    forms = bucket_forms([THREE[0], *empty], scenario=scenario, rank=0)
    assert [form.names for form in forms] == [("a",)]


def test_experts_are_reduced_over_their_group():
    expert = ParamSize(
        name="e", kind="expert", dtype="torch.float32", elems=6, param_bytes=4, grad_bytes=4
    )
    scenario = case(world=WorldSpec(size=4), topology=TopologySpec(ep=2))
    calls = calls_of_step([*THREE, expert], scenario=scenario, rank=1, skipped=False)
    assert calls["reduce_scatter", 2, 6] == calls["reduce_scatter", 4, 12] == 1


def test_bytes_of_each_category():
    scenario = case(world=WorldSpec(size=4), system=SystemSpec(sync="every"))
    held = bytes_held(THREE, scenario=scenario, rank=0, stored=6)
    assert held == {
        "gradients": 48, "sums": 12, "params": 48, "masters": 12, "state": 24, "other": 0,
        "arena": 0,
    }  # fmt: skip
    # The last rank's shard is only padding, which no rank steps.
    assert bytes_held(THREE, scenario=scenario, rank=3, stored=0)["masters"] == 0


def test_more_bytes_than_expected_are_a_finding():
    (found,) = check_memory({"params": 8, "other": 4}, {"params": 8, "other": 0}, step=1, rank=2)
    assert (found.check, found.rank) == ("invariant.memory", 2)
    assert "4 bytes of other" in found.message


def test_frozen_params_have_no_size():
    module = nn.Linear(3, 2, dtype=torch.bfloat16)
    module.bias.requires_grad_(False)
    (size,) = sizes_of(module)
    assert (size.elems, size.param_bytes, size.kind) == (6, 2, "dense")


def test_all_reduce_instead_of_reduce_scatter_is_found(judged):
    assert checks(broken_by(judged, "M111")) == ["invariant.volume"]


def test_retained_gradient_copies_are_found(judged):
    assert set(checks(broken_by(judged, "M113"))) == {"invariant.memory"}


def test_gather_after_a_skipped_step_is_found(judged):
    from zero_sim.scenario.spec import DataSpec, NanSpec

    overflow = {
        "data": DataSpec(nan=NanSpec(step=0, rank=0)),
        "optimizer": OptimizerSpec(loss_scale=LossScaleSpec()),
    }
    assert judged(**overflow).verdict == "pass"
    assert checks(broken_by(judged, "V04", **overflow)) == ["invariant.volume"]


OVERLAP = {
    "system": SystemSpec(bucket_elems=1, overlap_grads=True, overlap_params=True),
}


def test_overlapped_pipeline_passes(judged):
    assert judged(**OVERLAP).verdict == "pass"


def test_target_without_declared_costs_is_not_checked(judged):
    class Silent:
        name = "silent"
        capabilities = None

        def build(self, module, *, scenario, group):
            engine = ZeroSimTarget().build(module, scenario=scenario, group=group)
            kept = (
                "zero_grad", "backward", "step", "settle", "params", "parts",
                "stray_gradients", "save", "load",
            )  # fmt: skip
            return type("Bare", (), {"module": module} | {n: getattr(engine, n) for n in kept})

    (mutant,) = find_mutants(["M111"])
    with mutant.apply():
        assert judged(Silent()).verdict == "pass"
