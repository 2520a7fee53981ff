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
from zero_sim.zero.buffer import Bucket
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.scaler import LossScaler


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
        DistributedDataParallel, "_check_groups", lambda self, shard, replica: (shard, replica)
    )
    result = judged(world=WorldSpec(size=4), system=SystemSpec(redundancy=2))
    assert checks(result)[0] == "equality.grad"


def test_a_norm_over_the_whole_group_counts_replicas_twice(judged, monkeypatch):
    right = DistributedOptimizer._measure

    def everywhere(self, grads):
        shard_group, self.ddp.shard_group = self.ddp.shard_group, self.ddp.group
        try:
            return right(self, grads)
        finally:
            self.ddp.shard_group = shard_group

    monkeypatch.setattr(DistributedOptimizer, "_measure", everywhere)
    result = judged(world=WorldSpec(size=4), system=SystemSpec(redundancy=2))
    assert checks(result)[0] == "equality.norm"


def test_clipping_that_is_forgotten(judged, monkeypatch):
    monkeypatch.setattr(DistributedOptimizer, "_clip", lambda self, grads, *, norm: None)
    result = judged(optimizer=OptimizerSpec(clip_norm=1e-4))
    assert checks(result)[0] in ("equality.master", "equality.state")


def test_a_rank_that_does_not_see_the_others_overflow(judged, monkeypatch):
    right = optimizer_module.DistributedOptimizer._measure

    def own_view(self, grads):
        norm, zeros, _ = right(self, grads)
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
        DistributedOptimizer, "_measure", lambda self, grads: (*right(self, grads)[:2], False)
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
    right = Bucket.accumulate_sum
    monkeypatch.setattr(
        Bucket, "accumulate_sum", lambda self, *, is_first: right(self, is_first=True)
    )
    result = judged(system=SystemSpec(sync="every"), run=RunSpec(micro_batches=2))
    assert checks(result)[0] == "equality.grad"


def test_a_reloaded_counter_that_starts_again(judged, monkeypatch):
    right = own.checkpoint.load

    def forgetful(path, *, ddp, optimizer):
        right(path, ddp=ddp, optimizer=optimizer)
        for state in optimizer.inner.state.values():
            state["step"].zero_()

    monkeypatch.setattr(own.checkpoint, "load", forgetful)
    result = judged(reload=ReloadSpec(step=1), run=RunSpec(steps=3))
    steps = {finding.step for finding in result.findings}
    assert "equality.state" in checks(result)
    assert steps == {1}


def test_a_group_across_cells(judged, monkeypatch):
    from zero_sim.verify import program

    right = program._train

    def strays(*args, **named):
        right(*args, **named)
        dist.barrier(dist.new_group([0, 1])) if dist.get_rank() < 2 else dist.new_group([0, 1])

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


def test_an_engine_that_does_not_tell_a_norm_it_clips_by(judged, monkeypatch):
    from zero_sim.targets import StepResult

    right = own.ZeroSimEngine.step

    def silent(self, *, lr_factor):
        right(self, lr_factor=lr_factor)
        return StepResult()

    monkeypatch.setattr(own.ZeroSimEngine, "step", silent)
    assert "equality.norm" in checks(judged(optimizer=OptimizerSpec(clip_norm=0.1)))


def test_a_checkpoint_that_its_own_system_cannot_load_is_a_failure(judged, monkeypatch):
    from zero_sim.errors import CheckpointError

    def broken(path, *, ddp, optimizer):
        raise CheckpointError("expected 12 pieces, got 11")

    monkeypatch.setattr(own.checkpoint, "load", broken)
    result = judged(reload=ReloadSpec(step=1), run=RunSpec(steps=3))
    assert checks(result) == ["world.rank-failed"]
    assert "12 pieces" in result.findings[0].message
