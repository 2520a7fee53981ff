"""First findings of mutants of replicas, experts, model parts and fp8."""

import pytest
import torch

from tests.judge.pointing import WrongAnswers, first_finding
from zero_sim.mutants.records import mutant
from zero_sim.scenario.spec import (
    DataSpec,
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
from zero_sim.zero.variants.fp8 import quantize_

TWO_COPIES = {"world": WorldSpec(size=4), "system": SystemSpec(redundancy=2)}
EXPERTS = {
    "model": ModelSpec(name="moe", dtype="bf16", hidden=4),
    "world": WorldSpec(size=4),
    "topology": TopologySpec(ep=2),
}
PARTS = {
    "world": WorldSpec(size=4),
    "topology": TopologySpec(tp=2, shared=("bias",)),
    "optimizer": OptimizerSpec(clip_norm=1e-3, loss_scale=LossScaleSpec(initial=8.0)),
}
OVERFLOW = DataSpec(nan=NanSpec(step=0, rank=1, value="inf"))
# With steps this large, the scale of 400 weight elements changes in every step.
FP8 = {
    "model": ModelSpec(name="fp8", hidden=5),
    "optimizer": OptimizerSpec(name="sgd", lr=0.3),
    "run": RunSpec(steps=3),
}


class TestReplicas:
    """Shards on several ranks."""

    def test_norm_that_counts_each_replica(self, judged, broken):
        broken("N01")
        result = judged(**TWO_COPIES)
        assert [found.check for found in result.findings] == ["equality.norm", "equality.zeros"]


class TestExperts:
    """Params that only some ranks hold."""

    def test_right_experts_pass(self, judged):
        assert judged(**EXPERTS).verdict == "pass"

    def test_experts_summed_over_all_ranks(self, judged, broken):
        broken("M67")
        finding = first_finding(judged(**EXPERTS, system=SystemSpec(stage=0)), "equality.grad")
        assert finding.param.startswith("experts.")

    def test_experts_sharded_over_all_ranks(self, judged, broken):
        broken("G08")
        finding = first_finding(judged(**EXPERTS), "invariant.ownership")
        assert finding.param.startswith("experts.")

    def test_experts_divided_by_their_own_group_size(self, judged, broken):
        broken("S06")
        finding = first_finding(judged(**EXPERTS), "equality.grad")
        assert finding.param.startswith("experts.")
        assert "every element is 2 x the expected one" in finding.message

    @pytest.mark.parametrize("system", [SystemSpec(stage=0), SystemSpec(redundancy=2)])
    def test_norm_that_counts_each_holder(self, judged, broken, system):
        broken("N01")
        result = judged(**EXPERTS, system=system)
        assert [found.check for found in result.findings] == ["equality.norm", "equality.zeros"]

    def test_engine_that_reports_experts_of_others(self, judged):
        def boastful(engine, right):
            return {**right(), "experts.3.linear.bias": torch.zeros(4)}

        result = judged(WrongAnswers(params=boastful), **EXPERTS)
        assert "invariant.ownership" in {found.check for found in result.findings}

    def test_engine_that_lacks_an_own_expert(self, judged):
        def lacking(engine, right):
            held = dict(right())
            if engine._ddp.rank == 3:
                held.pop("experts.3.linear.bias")
            return held

        result = judged(WrongAnswers(params=lacking), **EXPERTS)
        assert ("equality.params", 3) in [(found.check, found.rank) for found in result.findings]


class TestParts:
    """Tensor-parallel and pipeline-parallel models."""

    @pytest.mark.parametrize("data", [DataSpec(), OVERFLOW])
    def test_right_parts_pass(self, judged, data):
        assert judged(**PARTS, data=data).verdict == "pass"

    @pytest.mark.parametrize(
        "topology", [PARTS["topology"], TopologySpec(pp=2, tied=("0.up.weight",))]
    )
    def test_shared_params_counted_in_each_part(self, judged, broken, topology):
        broken("N07")
        finding = first_finding(judged(**PARTS | {"topology": topology}), "equality.norm")
        assert float.fromhex(finding.got) > float.fromhex(finding.expected)

    def test_norm_of_one_part_alone(self, judged, broken):
        broken("N05")
        finding = first_finding(judged(**PARTS), "equality.norm")
        assert float.fromhex(finding.got) < float.fromhex(finding.expected)

    def test_clipping_that_skips_params_outside_the_norm(self, judged, broken):
        broken("M75")
        finding = first_finding(judged(**PARTS), "equality.state")
        assert (finding.rank, finding.param) == (1, "0.up.bias")

    def test_overflow_not_shared_with_other_parts(self, judged, broken):
        broken("I07")
        result = judged(**PARTS, data=OVERFLOW)
        assert first_finding(result, "equality.skipped").rank in (0, 2)

    def test_load_of_the_checkpoint_of_another_part(self, judged, broken):
        broken("C10")
        result = judged(**PARTS, reload=ReloadSpec(step=1), run=RunSpec(steps=3))
        finding = first_finding(result, "equality.load")
        assert (finding.rank, finding.step) == (1, 1)

    def test_group_of_ranks_at_different_group_ranks(self, judged, broken):
        broken("G09")
        result = judged(world=WorldSpec(size=4), topology=TopologySpec(tp=2))
        finding = first_finding(result, "invariant.crossing")
        assert "have different group ranks" in finding.message


class TestFp8:
    """fp8 values and their scales."""

    @pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2", "mixed"])
    def test_right_fp8_passes(self, judged, fp8_format):
        model = ModelSpec(name="fp8", hidden=5, fp8_format=fp8_format)
        assert judged(**FP8 | {"model": model}).verdict == "pass"

    def test_largest_value_of_the_own_shard_only(self, judged, broken):
        broken("D04")
        finding = first_finding(judged(**FP8), "equality.scale")
        assert (finding.rank, finding.param) == (0, "1.up.weight")

    def test_largest_value_of_the_replicas_only(self, judged, broken):
        broken("D08")
        finding = first_finding(judged(**FP8, **TWO_COPIES), "equality.scale")
        assert (finding.rank, finding.param) == (0, "1.up.weight")

    def test_swapped_fp8_formats(self, judged, broken):
        broken("D10")
        finding = first_finding(judged(**FP8), "equality.scale")
        assert finding.param.endswith("down.weight")

    def test_stale_scale_on_one_rank(self, judged, broken):
        broken("D11")
        assert first_finding(judged(**FP8), "equality.scale").rank == 1

    def test_values_of_another_scale(self, judged, broken):
        broken("D12")
        finding = first_finding(judged(**FP8), "invariant.cast")
        assert "every element is 1/2 x the expected one" in finding.message

    def test_values_without_clamping(self, judged):
        """A local mutant, because only an absurd learning rate exceeds the range of a scale."""

        @mutant("X", "DTYPE", seen_in="nothing")
        def overflows(patch):
            """Values that are out of range are not clamped."""

            patch[quantize_, ".clamp_(-bound, bound)"] = ""

        with overflows.apply():
            result = judged(
                model=ModelSpec(name="fp8", hidden=4, fp8_format="e5m2"),
                system=SystemSpec(divide="none"),
                optimizer=OptimizerSpec(name="sgd", lr=3e38),
                run=RunSpec(steps=1),
            )
        assert first_finding(result, "invariant.cast").got_value in ("inf", "-inf")

    def test_scale_that_a_load_forgets(self, judged, broken):
        broken("C11")
        result = judged(**FP8 | {"reload": ReloadSpec(step=1)})
        finding = first_finding(result, "equality.load")
        assert (finding.param, finding.step) == ("0.up.weight", 1)
