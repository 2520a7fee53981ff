"""Mistakes in the features, made by hand: each fails, and the first finding points at it."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.scenario.spec import (
    DataSpec,
    FreezeSpec,
    GroupSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.targets import own
from zero_sim.zero import optimizer as optimizer_module
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.groups import KindGroups
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.scaler import LossScaler
from zero_sim.zero.unit import Unit


def checks(result):
    assert result.verdict == "fail", result
    return [finding.check for finding in result.findings]


def test_replicas_that_are_not_summed(judged, monkeypatch):
    right = own.build_redundancy_groups

    def alone(group, *, redundancy):
        shard_group, _ = right(group, redundancy=redundancy)
        # A group of this rank alone in place of the ranks that hold copies of its shard.
        mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        return shard_group, mine[dist.get_rank()]

    monkeypatch.setattr(own, "build_redundancy_groups", alone)
    monkeypatch.setattr(
        DistributedDataParallel,
        "_check_groups",
        lambda self, group, *, shard_group, replica_group: (shard_group, replica_group),
    )
    result = judged(world=WorldSpec(size=4), system=SystemSpec(redundancy=2))
    assert checks(result)[0] == "equality.grad"


def test_a_norm_over_the_whole_group_counts_replicas_twice(judged, monkeypatch):
    monkeypatch.setattr(DistributedDataParallel, "is_first_copy", lambda self, kind: True)
    result = judged(world=WorldSpec(size=4), system=SystemSpec(redundancy=2))
    assert checks(result)[0] == "equality.norm"


def test_clipping_that_is_forgotten(judged, monkeypatch):
    monkeypatch.setattr(DistributedOptimizer, "_clip", lambda self, grads, *, norm: None)
    result = judged(optimizer=OptimizerSpec(clip_norm=1e-4))
    assert checks(result)[0] in ("equality.master", "equality.state")


def test_a_rank_that_does_not_see_the_others_overflow(judged, monkeypatch):
    right = optimizer_module.DistributedOptimizer._measure

    def own_view(self, trained, grads):
        norm, zeros, _ = right(self, trained, grads)
        return norm, zeros, any(not bool(grad.isfinite().all()) for grad in grads)

    monkeypatch.setattr(DistributedOptimizer, "_measure", own_view)

    # A gradient that overflows in one param alone: only its owners see it.
    def planted(self, last):
        if self.rank == 0 and last:
            self.params["0.up.weight"].main_grad.view(-1)[0] = torch.inf
        right_end(self, last)

    right_end = DistributedDataParallel.end_micro_batch
    monkeypatch.setattr(DistributedDataParallel, "end_micro_batch", planted)
    result = judged(optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0)))
    assert result.verdict == "fail"


def test_a_scale_that_never_shrinks(judged, monkeypatch):
    monkeypatch.setattr(LossScaler, "update", lambda self, *, found_inf: None)
    result = judged(
        data=DataSpec(nan=NanSpec(step=0, rank=1, value="inf")),
        optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0)),
    )
    assert "equality.loss-scale" in checks(result)


def test_a_step_that_is_not_skipped(judged, monkeypatch):
    right = DistributedOptimizer._measure
    monkeypatch.setattr(
        DistributedOptimizer,
        "_measure",
        lambda self, trained, grads: (*right(self, trained, grads)[:2], False),
    )
    result = judged(
        data=DataSpec(nan=NanSpec(step=0, rank=1, value="inf")),
        optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0)),
    )
    assert "equality.skipped" in checks(result)


def test_a_frozen_param_that_moves(judged, monkeypatch):
    right = DistributedOptimizer.step

    def thaws(self):
        for param in self.ddp.params.values():
            param.requires_grad_(True)
        return right(self)

    monkeypatch.setattr(DistributedOptimizer, "step", thaws)
    model = ModelSpec(
        name="mlp", hidden=4, freeze=(FreezeSpec(param="0.up.bias", start=1, stop=2),)
    )
    result = judged(model=model, optimizer=OptimizerSpec(weight_decay=0.1))
    assert {finding.param for finding in result.findings if finding.param} == {"0.up.bias"}


def test_groups_whose_settings_are_swapped(judged, monkeypatch):
    monkeypatch.setattr(own, "group_index", lambda spec, name: int(not name.endswith("bias")) * 0)
    spec = OptimizerSpec(groups=(GroupSpec(match="bias", lr=0.1),))
    result = judged(optimizer=spec)
    assert checks(result)[0] == "equality.master"
    assert not result.findings[0].param.endswith("bias")


def test_accumulating_after_every_sum_by_copying(judged, monkeypatch):
    right = Unit.accumulate_sum
    monkeypatch.setattr(
        Unit, "accumulate_sum", lambda self, *, is_first: right(self, is_first=True)
    )
    result = judged(system=SystemSpec(sync="every"), run=RunSpec(micro_batches=2))
    assert checks(result)[0] == "equality.grad"


def test_a_reloaded_counter_that_starts_again(judged, monkeypatch):
    right = own.checkpoint.load

    def forgetful(path, *, ddp, optimizer, weights_only):
        right(path, ddp=ddp, optimizer=optimizer)
        for state in optimizer.inner.state.values():
            state["step"].zero_()

    monkeypatch.setattr(own.checkpoint, "load", forgetful)
    result = judged(reload=ReloadSpec(step=1), run=RunSpec(steps=3))
    steps = {finding.step for finding in result.findings}
    assert "equality.state" in checks(result)
    assert steps == {1}


def test_a_group_across_cells(judged, monkeypatch):
    from zero_sim.run import program

    right = program._train

    def strays(*args, **named):
        right(*args, **named)
        strangers = dist.new_group([0, 3])
        if dist.get_rank() in (0, 3):
            dist.all_reduce(torch.ones(1), group=strangers)

    monkeypatch.setattr(program, "_train", strays)
    result = judged(world=WorldSpec(size=4), topology=TopologySpec(tp=2))
    assert checks(result) == ["invariant.crossing"]


@pytest.mark.parametrize("tp", [1, 2])
def test_unbroken_cells_pass(judged, tp):
    assert judged(world=WorldSpec(size=4), topology=TopologySpec(tp=tp)).verdict == "pass"


def test_an_update_that_never_happens_is_not_passed_because_all_steps_were_skipped(
    judged, monkeypatch
):
    monkeypatch.setattr(DistributedOptimizer, "_step_masters", lambda self, trained, grads: None)
    result = judged(
        data=DataSpec(nan=NanSpec(step=0, rank=1)),
        optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0)),
        run=RunSpec(steps=1),
    )
    assert result.verdict == "inconclusive"
    assert [finding.check for finding in result.findings] == ["guard.nothing-stepped"]


def test_an_engine_that_tells_of_its_steps_but_not_the_norm_it_clips_by(judged, monkeypatch):
    from zero_sim.targets import StepResult

    right = own.ZeroSimEngine.step

    def silent(self, *, lr_factor):
        right(self, lr_factor=lr_factor)
        return StepResult(skipped=False)

    monkeypatch.setattr(own.ZeroSimEngine, "step", silent)
    assert "equality.norm" in checks(judged(optimizer=OptimizerSpec(clip_norm=0.1)))


def test_a_checkpoint_that_its_own_system_cannot_load_is_a_failure(judged, monkeypatch):
    from zero_sim.errors import CheckpointError

    def broken(path, *, ddp, optimizer, weights_only):
        raise CheckpointError("expected 12 pieces, got 11")

    monkeypatch.setattr(own.checkpoint, "load", broken)
    result = judged(reload=ReloadSpec(step=1), run=RunSpec(steps=3))
    assert checks(result) == ["world.rank-failed"]
    assert "12 pieces" in result.findings[0].message


EXPERTS = {
    "model": ModelSpec(name="moe", dtype="bf16", hidden=4),
    "world": WorldSpec(size=4),
    "topology": TopologySpec(ep=2),
}


def test_unbroken_experts_pass(judged):
    assert judged(**EXPERTS).verdict == "pass"


def test_experts_that_are_reduced_over_the_dense_group(judged, monkeypatch):
    right = DistributedDataParallel._build_buffer

    def everywhere(self, plan):
        buffer = right(self, plan)
        for unit in buffer.units:
            unit.replica_group = self.group
        return buffer

    monkeypatch.setattr(DistributedDataParallel, "_build_buffer", everywhere)
    # Names differ between ranks but shapes do not, so that no collective is refused.
    result = judged(**EXPERTS, system=SystemSpec(stage=0))
    assert checks(result)[0] == "equality.grad"
    assert result.findings[0].param.startswith("experts.")


def test_experts_that_are_sharded_over_the_dense_group(judged, monkeypatch):
    def all_ranks(group, *, expert_parallel, redundancy):
        return KindGroups(group=group, shard_group=group)

    monkeypatch.setattr(own, "build_expert_groups", all_ranks)
    assert checks(judged(**EXPERTS))[0] == "invariant.ownership"


def test_experts_that_are_divided_by_their_own_group(judged, monkeypatch):
    right = Unit.reduce

    def scaled(self):
        if self.group.size() == 2:
            self.grads.mul_(2)
        right(self)

    monkeypatch.setattr(Unit, "reduce", scaled)
    result = judged(**EXPERTS)
    assert checks(result)[0] == "equality.grad"
    assert result.findings[0].param.startswith("experts.")


@pytest.mark.parametrize("system", [SystemSpec(stage=0), SystemSpec(redundancy=2)])
def test_an_expert_norm_that_counts_each_holder(judged, monkeypatch, system):
    right = DistributedDataParallel.is_first_copy
    monkeypatch.setattr(
        DistributedDataParallel,
        "is_first_copy",
        lambda self, kind: kind == "expert" or right(self, kind),
    )
    result = judged(**EXPERTS, system=system)
    assert checks(result) == ["equality.norm", "equality.zeros"]


def test_a_norm_that_leaves_out_experts_of_other_ranks(judged, monkeypatch):
    right = DistributedDataParallel.is_first_copy
    monkeypatch.setattr(
        DistributedDataParallel,
        "is_first_copy",
        lambda self, kind: right(self, kind) and (kind == "dense" or self.rank % 2 == 0),
    )
    assert "equality.norm" in checks(judged(**EXPERTS))


def test_experts_that_start_out_different_on_their_holders(judged, monkeypatch):
    right = own.ZeroSimEngine.__init__

    def spoiled(self, module, *, scenario, group):
        if dist.get_rank() == 3:
            with torch.no_grad():
                module.experts["2"].linear.weight.add_(1)
        right(self, module, scenario=scenario, group=group)

    monkeypatch.setattr(own.ZeroSimEngine, "__init__", spoiled)
    assert judged(**EXPERTS).verdict == "pass"
    # Without the broadcast over their own holders nobody puts that right.
    monkeypatch.setattr(
        "zero_sim.zero.data_parallel.broadcast_from_first", lambda tensors, *, group: None
    )
    assert judged(**EXPERTS).verdict == "fail"


def test_an_engine_that_holds_experts_of_others(judged, monkeypatch):
    right = own.ZeroSimEngine.params

    def boastful(self):
        return {**right(self), "experts.3.linear.bias": torch.zeros(4)}

    monkeypatch.setattr(own.ZeroSimEngine, "params", boastful)
    assert "invariant.ownership" in checks(judged(**EXPERTS))


def test_an_engine_that_lacks_one_of_its_own_experts(judged, monkeypatch):
    right = own.ZeroSimEngine.params

    def lacking(self):
        held = dict(right(self))
        if self._ddp.rank == 3:
            held.pop("experts.3.linear.bias")
        return held

    monkeypatch.setattr(own.ZeroSimEngine, "params", lacking)
    result = judged(**EXPERTS)
    assert ("equality.params", 3) in [(found.check, found.rank) for found in result.findings]


PARTS = {
    "world": WorldSpec(size=4),
    "topology": TopologySpec(tp=2, shared=("bias",)),
    "optimizer": OptimizerSpec(clip_norm=1e-3, loss_scale=LossScaleSpec(initial=8.0)),
}
OVERFLOW = DataSpec(nan=NanSpec(step=0, rank=1, value="inf"))


def test_unbroken_parts_of_a_model_pass(judged):
    assert judged(**PARTS).verdict == "pass"
    assert judged(**PARTS, data=OVERFLOW).verdict == "pass"


def test_copies_of_a_param_that_count_in_each_part(judged, monkeypatch):
    monkeypatch.setattr(own, "is_counted", lambda spec, name, *, place: True)
    assert checks(judged(**PARTS))[0] == "equality.norm"


def test_tied_params_that_count_in_each_part(judged, monkeypatch):
    monkeypatch.setattr(own, "is_counted", lambda spec, name, *, place: True)
    topology = TopologySpec(pp=2, tied=("0.up.weight",))
    assert checks(judged(**PARTS | {"topology": topology}))[0] == "equality.norm"


def test_a_norm_of_one_part_alone(judged, monkeypatch):
    def alone(places):
        return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    monkeypatch.setattr(own, "build_model_parallel_group", alone)
    assert checks(judged(**PARTS))[0] == "equality.norm"


def test_clipping_that_leaves_out_what_the_norm_does(judged, monkeypatch):
    right = DistributedOptimizer._clip

    def filtered(self, grads, *, norm):
        trained = [master for master in self.masters if master.param.requires_grad]
        counted = [
            grad
            for master, grad in zip(trained, grads, strict=True)
            if self._is_counted(master.fragment.param)
        ]
        right(self, counted, norm=norm)

    monkeypatch.setattr(DistributedOptimizer, "_clip", filtered)
    result = judged(**PARTS)
    assert checks(result)[0] in ("equality.master", "equality.state")
    assert result.findings[0].param.endswith("bias")
    assert result.findings[0].rank in (1, 3)


def test_an_overflow_that_other_parts_do_not_hear_of(judged, monkeypatch):
    right = optimizer_module.all_reduce_sum

    def squares_only(flat, *, group):
        # Ranks 0 1 and 2 3 are at one place of both parts, 0 2 and 1 3 train one together.
        ranks = dist.get_process_group_ranks(group)
        right(flat[:2] if ranks[1] - ranks[0] == 1 else flat, group=group)

    monkeypatch.setattr(optimizer_module, "all_reduce_sum", squares_only)
    result = judged(**PARTS, data=OVERFLOW)
    assert "equality.skipped" in checks(result)
    assert next(f for f in result.findings if f.check == "equality.skipped").rank in (0, 2)


def test_parts_that_load_each_others_checkpoint(judged, monkeypatch):
    right = own.ZeroSimEngine.load

    def swapped(self, path, *, weights_only):
        self._part = {"tp-0-pp-0": "tp-1-pp-0", "tp-1-pp-0": "tp-0-pp-0"}[self._part]
        right(self, path)

    monkeypatch.setattr(own.ZeroSimEngine, "load", swapped)
    case = {**PARTS, "reload": ReloadSpec(step=1), "run": RunSpec(steps=3)}
    assert "equality.master" in checks(judged(**case))


@pytest.mark.parametrize("asked", [False, True])
def test_a_load_that_takes_all_or_only_the_weights_against_what_was_asked(
    judged, monkeypatch, asked
):
    right = own.checkpoint.load

    def contrary(path, *, ddp, optimizer, weights_only):
        right(path, ddp=ddp, optimizer=optimizer, weights_only=not weights_only)

    monkeypatch.setattr(own.checkpoint, "load", contrary)
    result = judged(reload=ReloadSpec(step=1, weights_only=asked), run=RunSpec(steps=3))
    assert "equality.state" in checks(result)


def test_a_loss_scale_that_is_not_fresh_after_loading_weights(judged, monkeypatch):
    right = own.checkpoint.load

    def scaled(path, *, ddp, optimizer, weights_only):
        right(path, ddp=ddp, optimizer=optimizer, weights_only=weights_only)
        optimizer.loss_scaler.scale = 16.0

    monkeypatch.setattr(own.checkpoint, "load", scaled)
    result = judged(
        reload=ReloadSpec(step=2, weights_only=True),
        run=RunSpec(steps=4),
        optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0)),
    )
    assert "equality.loss-scale" in checks(result)


def test_masters_that_are_rebuilt_from_the_working_params(judged, monkeypatch):
    right = own.checkpoint.load

    def rounded(path, *, ddp, optimizer, weights_only):
        right(path, ddp=ddp, optimizer=optimizer, weights_only=weights_only)
        for shard in optimizer.master_shards.values():
            shard.copy_(shard.bfloat16())

    monkeypatch.setattr(own.checkpoint, "load", rounded)
    result = judged(reload=ReloadSpec(step=1, weights_only=True), run=RunSpec(steps=3))
    assert "equality.master" in checks(result)
