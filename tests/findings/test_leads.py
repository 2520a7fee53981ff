"""Leads of a finding: the value that came instead, the factor, and the time."""

import pytest
import torch.distributed as dist

from zero_sim.run import program
from zero_sim.scenario.spec import ModelSpec, ReloadSpec, RunSpec, SystemSpec, WorldSpec
from zero_sim.targets.own import ZeroSimEngine
from zero_sim.zero import unit as unit_module
from zero_sim.zero.states import ParamState
from zero_sim.zero.unit import Unit


def first_of(result, check):
    assert result.verdict == "fail", result
    return next(finding for finding in result.findings if finding.check == check)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_average_over_three_ranks_is_a_third_of_the_sum(judged, monkeypatch, dtype):
    def averaged(output, source, *, group):
        dist.reduce_scatter_single(output, source, op=dist.ReduceOp.AVG, group=group)

    monkeypatch.setattr(unit_module, "reduce_scatter_sum", averaged)
    finding = first_of(judged(model=ModelSpec(name="mlp", dtype=dtype, hidden=5)), "equality.grad")
    assert finding.message.startswith("the reduced gradient is 1/3 of the sum")
    assert finding.message.endswith("it was divided by the 3 ranks already")


def test_gradient_that_was_not_reduced_is_recognized(judged, monkeypatch):
    def kept(output, source, *, group):
        output.copy_(source.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    monkeypatch.setattr(unit_module, "reduce_scatter_sum", kept)
    finding = first_of(judged(), "equality.grad")
    assert finding.message.endswith("the value is the gradient of this rank alone, not reduced")


def test_param_that_was_not_gathered_is_recognized(judged, monkeypatch):
    monkeypatch.setattr(unit_module, "all_gather", lambda *args, **kwargs: None)
    finding = first_of(judged(), "equality.params")
    assert finding.message.endswith("the value is that from before the step")


def test_shard_at_the_position_of_another_is_recognized(judged, monkeypatch):
    def rotated(output, shard, *, group):
        dist.all_gather_single(output, shard.clone(), group=group)
        output.copy_(output.roll(shard.numel()))

    monkeypatch.setattr(unit_module, "all_gather", rotated)
    model = ModelSpec(name="params", shapes=((12,),))
    finding = first_of(judged(model=model), "equality.params")
    assert finding.message.endswith(
        "the value begins with the expected elements [8, 12) of param 'p0'"
    )


def test_memory_in_flight_is_recognized(judged, monkeypatch):
    def finish_gather(self):
        self._gathering, self.param_state = None, ParamState.WHOLE

    monkeypatch.setattr(Unit, "finish_gather", finish_gather)
    result = judged(system=SystemSpec(overlap_params=True), world=WorldSpec(size=3, timing="lazy"))
    found = [each.message for each in result.findings]
    assert any("poison of memory in flight, so it was read before its wait" in m for m in found), (
        found
    )


def test_loss_of_another_micro_batch_is_recognized(judged, monkeypatch):
    right = program._micro_batch
    kept = []

    def late(*arguments, **named):
        loss = right(*arguments, **named)
        if dist.get_rank() == 1:
            kept.append(loss)
            return kept[0]
        return loss

    monkeypatch.setattr(program, "_micro_batch", late)
    finding = first_of(judged(run=RunSpec(steps=1, micro_batches=2)), "equality.loss")
    assert finding.message == (
        "the loss of micro-batch 1 differs: the value is the loss of rank 1, micro-batch 0"
    )


def test_first_step_after_a_load_is_reported(judged, monkeypatch):
    right, load, loaded = unit_module.all_gather, ZeroSimEngine.load, []

    def noted(self, path, **settings):
        load(self, path, **settings)
        loaded.append(self)

    def gather(*args, **settings):
        if len(loaded) < 3:
            right(*args, **settings)

    monkeypatch.setattr(ZeroSimEngine, "load", noted)
    monkeypatch.setattr(unit_module, "all_gather", gather)
    finding = first_of(judged(run=RunSpec(steps=3), reload=ReloadSpec(step=1)), "equality.params")
    assert finding.step == 1
    assert finding.message.endswith(", in the first step after the checkpoint was loaded")
