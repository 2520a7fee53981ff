"""A system broken by hand fails, and the first finding points at what was broken."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from zero_sim.layout import BucketPlan, Span
from zero_sim.scenario.spec import OptimizerSpec, RunSpec, SystemSpec, WorldSpec
from zero_sim.zero import buffer as buffer_module
from zero_sim.zero import unit as unit_module
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer


def first_finding(result, check):
    assert result.verdict == "fail", result
    assert result.findings[0].check == check, result.findings
    return result.findings[0]


def test_the_unbroken_system_passes(judged):
    result = judged()
    assert (result.verdict, result.findings) == ("pass", ())
    assert result.compared_elems > 1000


def test_an_off_by_one_in_a_shards_end(judged, monkeypatch):
    right = BucketPlan.shard_span

    def wrong(self, shard):
        span = right(self, shard)
        return Span(span.start, span.stop - 1) if shard == 1 else span

    monkeypatch.setattr(BucketPlan, "shard_span", wrong)
    result = judged()
    assert result.verdict in ("fail", "error")
    text = result.error + "".join(f"{f.check} {f.message} {f.detail}" for f in result.findings)
    assert "ownership" in text or "reduce_scatter" in text or "shard" in text


def test_a_fragment_one_element_short(judged, monkeypatch):
    right = BucketPlan.fragments

    def wrong(self, shard):
        for fragment in right(self, shard):
            if shard == 1 and fragment.in_param.numel > 1:
                short = {
                    name: Span(getattr(fragment, name).start, getattr(fragment, name).stop - 1)
                    for name in ("in_buffer", "in_param", "in_shard")
                }
                yield replace(fragment, **short)
            else:
                yield fragment

    monkeypatch.setattr(BucketPlan, "fragments", wrong)
    finding = first_finding(judged(), "invariant.ownership")
    assert "belong to no rank" in finding.message
    assert finding.param is not None


def test_a_missing_gather(judged, monkeypatch):
    monkeypatch.setattr(unit_module, "all_gather", lambda *args, **kwargs: None)
    finding = first_finding(judged(), "equality.params")
    assert finding.phase == "gather"
    assert finding.step == 0


def test_avg_for_sum(judged, monkeypatch):
    def averaged(output, source, *, group):
        dist.reduce_scatter_single(output, source, op=dist.ReduceOp.AVG, group=group)

    monkeypatch.setattr(unit_module, "reduce_scatter_sum", averaged)
    finding = first_finding(judged(), "equality.grad")
    assert finding.phase == "reduce"
    assert float.fromhex(finding.expected) == pytest.approx(
        3 * float.fromhex(finding.got), rel=0.05
    )


def test_a_wrong_divisor_is_seen_though_adam_hides_it_from_params(judged, monkeypatch):
    right = DistributedOptimizer.step

    def undivided(self):
        with torch.no_grad():
            self.ddp.divisor.fill_(1.0)
        return right(self)

    monkeypatch.setattr(DistributedOptimizer, "step", undivided)
    result = judged(optimizer=OptimizerSpec(eps=1e-30), run=RunSpec(steps=1))
    assert {finding.check for finding in result.findings} >= {"equality.norm", "equality.state"}
    assert result.findings[0].check == "equality.norm"


def test_a_dropped_hook(judged, monkeypatch):
    right = DistributedDataParallel._accumulate

    def forgetful(self, memory, param):
        if param is self.params["1.down.bias"]:
            param.grad = None
        else:
            right(self, memory, param)

    monkeypatch.setattr(DistributedDataParallel, "_accumulate", forgetful)
    finding = first_finding(judged(), "equality.grad")
    assert finding.param.endswith("down.bias")
    assert float.fromhex(finding.got) == 0.0


def test_one_flipped_bit_of_one_element_on_one_rank(judged, monkeypatch):
    right = DistributedOptimizer.step

    def flipped(self):
        result = right(self)
        if self.ddp.rank == 2:
            param = self.ddp.params["1.up.weight"]
            param.detach().view(-1)[7:8].view(torch.int16).bitwise_xor_(1)
        return result

    monkeypatch.setattr(DistributedOptimizer, "step", flipped)
    result = judged()
    finding = next(f for f in result.findings if f.check == "equality.params")
    assert (finding.rank, finding.param, finding.index) == (2, "1.up.weight", (1, 2))
    assert (finding.ulp, finding.differ_count) == (1, 1)


def test_gradients_left_over_from_the_step_before(judged, monkeypatch):
    def forget_to_zero(self):
        pass

    monkeypatch.setattr(buffer_module.Buffer, "zero_grads", forget_to_zero)
    finding = first_finding(judged(), "invariant.zero-gradients")
    assert finding.step == 1


def test_a_rank_that_skips_a_collective_is_named(judged, monkeypatch):
    right = DistributedDataParallel.end_micro_batch

    def skips(self, last):
        if self.rank != 1:
            right(self, last)
        else:
            self._grads_reduced = True

    monkeypatch.setattr(DistributedDataParallel, "end_micro_batch", skips)
    result = judged()
    assert result.verdict == "fail"
    assert result.findings[0].check == "world.contract"
    assert "rank 1: all_reduce" in result.findings[0].detail


def test_written_padding(judged, monkeypatch):
    right = DistributedDataParallel.end_micro_batch

    def dirty(self, last):
        right(self, last)
        for memory in self.buffers:
            for bucket in memory.plan.buckets:
                memory.grad_data[bucket.padding.start : bucket.padding.stop] = 1.0

    monkeypatch.setattr(DistributedDataParallel, "end_micro_batch", dirty)
    result = judged(system=SystemSpec(align_elems=8))
    assert "invariant.padding" in {finding.check for finding in result.findings}


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("params", "of params or masters was written: element 453 of param buffer 0, in bucket 0"),
        ("masters", "was written: element 453 of the masters of buffer 0, in bucket 0"),
        ("sums", "a gradient buffer was written: element 453 of the sums of gradient buffer 0"),
    ],
)
def test_written_padding_elsewhere(judged, monkeypatch, memory, message):
    right = DistributedOptimizer.step

    def dirty(self):
        result = right(self)
        buffer, last = self.ddp.buffers[0], self.ddp.rank == 2
        written = {
            "params": buffer.param_data,
            "masters": self.master_shards.get((0, 0)) if last else None,
            "sums": buffer.total_data if last else None,
        }[memory]
        if written is not None:
            padding = buffer.plan.buckets[0].padding
            written[written.numel() - padding.numel :][3] = 1.0
        return result

    monkeypatch.setattr(DistributedOptimizer, "step", dirty)
    result = judged(
        system=SystemSpec(align_elems=8, sync="every"), run=RunSpec(steps=2, micro_batches=2)
    )
    (finding,) = [found for found in result.findings if found.check == "invariant.padding"]
    assert message in finding.message
    assert finding.step == 0


def test_stage_0_with_a_forgotten_all_reduce(judged, monkeypatch):
    monkeypatch.setattr(unit_module, "all_reduce_sum", lambda *args, **kwargs: None)
    finding = first_finding(judged(system=SystemSpec(stage=0)), "equality.grad")
    assert "such differences" in finding.detail


def test_a_world_of_one_still_compares_everything(judged):
    assert judged(world=WorldSpec(size=1)).compared_elems > 500


def test_parts_that_are_no_longer_told(judged, monkeypatch):
    right = DistributedOptimizer.fragments

    def forgetful(self):
        told = list(right(self))
        yield from told if not self.ddp.grads_reduced else told[1:]

    monkeypatch.setattr(DistributedOptimizer, "fragments", forgetful)
    finding = first_finding(judged(), "invariant.ownership")
    assert "gone: 0.up.weight" in finding.message
