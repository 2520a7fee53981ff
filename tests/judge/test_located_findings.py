"""First findings of mutants of the system."""

import pytest

from tests.judge.pointing import WrongAnswers, first_finding
from zero_sim.scenario.spec import (
    DataSpec,
    FreezeSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    ParamGroupSpec,
    ReloadSpec,
    RunSpec,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import StepResult

PADDED = SystemSpec(align_elems=8)
SCALED = OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0))
GROWING = OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0, growth_interval=1))
OVERFLOW = DataSpec(nan=NanSpec(step=0, rank=1, value="inf"))
LATER_STEPS = RunSpec(steps=3)


def test_right_system_passes(judged):
    result = judged()
    assert (result.verdict, result.findings) == ("pass", ())
    assert result.compared_elems > 1000


def test_world_of_one_compares_everything(judged):
    assert judged(world=WorldSpec(size=1)).compared_elems > 500


class TestSteps:
    """Faults of a step, in the order of its phases."""

    def test_elements_without_an_owner(self, judged, broken):
        broken("L01")
        finding = first_finding(judged(), "invariant.ownership")
        assert "belong to no rank" in finding.message
        assert finding.param == "1.up.weight"

    def test_gradients_kept_from_the_step_before(self, judged, broken):
        broken("A07")
        assert first_finding(judged(), "invariant.zero-gradients").step == 1

    def test_dropped_gradient(self, judged, broken):
        broken("E05")
        finding = first_finding(judged(world=WorldSpec(size=6)), "equality.grad")
        assert finding.param.endswith("down.bias")
        assert float.fromhex(finding.got) == 0.0

    def test_mean_instead_of_a_sum(self, judged, broken):
        broken("S07")
        finding = first_finding(judged(), "equality.grad")
        assert finding.phase == "reduce"
        assert "is 1/3 of the sum" in finding.message

    def test_missing_sum(self, judged, broken):
        broken("G07")
        finding = first_finding(judged(system=SystemSpec(stage=0)), "equality.grad")
        assert "the value is the gradient of this rank alone" in finding.message
        assert "such differences" in finding.detail

    def test_missing_division(self, judged, broken):
        """Adam hides the factor from params."""
        broken("S08")
        result = judged(optimizer=OptimizerSpec(eps=1e-30), run=RunSpec(steps=1))
        finding = first_finding(result, "equality.norm")
        assert "is 3 x that of the mean" in finding.message
        assert "the sum over 3 ranks was not divided" in finding.message

    def test_clipping_without_effect(self, judged, broken):
        broken("M73")
        finding = first_finding(judged(optimizer=OptimizerSpec(clip_norm=1e-4)), "equality.state")
        assert finding.phase == "optimizer"

    def test_missing_gather(self, judged, broken):
        broken("B01")
        finding = first_finding(
            judged(system=SystemSpec(bucket_elems=64, overlap_params=False)), "equality.params"
        )
        assert (finding.phase, finding.step) == ("gather", 0)
        assert "that from before the step" in finding.message

    def test_one_bit_of_one_element_on_one_rank(self, judged, broken):
        broken("Z05")
        finding = first_finding(judged(), "equality.params")
        assert (finding.rank, finding.param, finding.index) == (2, "0.up.weight", (0, 0))
        assert (finding.ulp, finding.differ_count) == (1, 1)

    def test_rank_that_skips_a_collective(self, judged, broken):
        broken("E03")
        result = judged(model=ModelSpec(name="mlp", hidden=1), world=WorldSpec(size=8))
        finding = next(found for found in result.findings if found.check == "world.contract")
        assert "rank 7: reduce_scatter" in finding.detail


class TestPadding:
    """The memory and the written element are named."""

    @pytest.mark.parametrize(
        ("id", "rank", "message"),
        [
            ("L07", 0, "params or masters was written: element 450 of param buffer 0, in bucket 0"),
            ("L08", 2, "was written: element 450 of the masters of buffer 0, in bucket 0"),
            ("L09", 2, "buffer was written: element 450 of the sums of gradient buffer 0"),
        ],
    )
    def test_padding_of_params_masters_and_sums(self, judged, broken, id, rank, message):
        broken(id)
        finding = first_finding(
            judged(
                system=SystemSpec(align_elems=8, sync="every"),
                run=RunSpec(steps=2, micro_batches=2),
            ),
            "invariant.padding",
        )
        assert message in finding.message
        assert (finding.rank, finding.step) == (rank, 0)

    def test_padding_of_gradients(self, judged, broken):
        broken("M07")
        finding = first_finding(judged(system=PADDED), "invariant.zero-gradients")
        assert "element 450 of gradient buffer 0" in finding.message


class TestOptimizer:
    """Settings of the step."""

    def test_loss_scale_that_never_shrinks(self, judged, broken):
        broken("I03")
        result = judged(data=OVERFLOW, optimizer=SCALED)
        finding = first_finding(result, "equality.grad")
        assert finding.step == 1
        assert "equality.loss-scale" in {found.check for found in result.findings}

    def test_step_that_is_not_skipped(self, judged, broken):
        broken("I06")
        finding = first_finding(judged(data=OVERFLOW, optimizer=SCALED), "equality.skipped")
        assert "expected True, got False" in finding.message

    def test_frozen_param_that_moves(self, judged, broken):
        broken("E02")
        freeze = (FreezeSpec(param="0.up.bias", start=1, stop=2),)
        result = judged(
            model=ModelSpec(name="mlp", hidden=4, freeze=freeze),
            optimizer=OptimizerSpec(weight_decay=0.1),
        )
        assert {finding.param for finding in result.findings if finding.param} == {"0.up.bias"}

    def test_merged_groups(self, judged, broken):
        broken("P01")
        groups = (ParamGroupSpec(match="bias", lr=0.1),)
        finding = first_finding(judged(optimizer=OptimizerSpec(groups=groups)), "equality.master")
        assert not finding.param.endswith("bias")

    def test_skipped_only_case_is_inconclusive(self, judged, broken):
        broken("P06")
        data = DataSpec(nan=NanSpec(step=0, rank=1))
        result = judged(data=data, optimizer=SCALED, run=RunSpec(steps=1))
        assert result.verdict == "inconclusive"
        assert [finding.check for finding in result.findings] == ["guard.nothing-stepped"]


class TestCheckpoints:
    """Loaded values are checked before the next step."""

    @pytest.mark.parametrize(
        ("id", "asked", "message"),
        [
            ("C01", False, "optimizer state 'step' differs from the checkpoint: the value is zero"),
            ("C14", False, "optimizer state 'exp_avg' is missing in the system after the load"),
            ("C05", True, "the loss scale differs from the checkpoint: expected 8.0, got 16.0"),
            ("M97", True, "master differs from the checkpoint: the value is the working param"),
        ],
    )
    def test_wrong_loaded_value(self, judged, broken, id, asked, message):
        broken(id)
        result = judged(
            reload=ReloadSpec(step=1, weights_only=asked), run=LATER_STEPS, optimizer=GROWING
        )
        finding = first_finding(result, "equality.load")
        assert message in finding.message
        assert (finding.phase, finding.step) == ("load", 1)

    def test_checkpoint_that_its_own_system_cannot_load(self, judged, broken):
        broken("C07")
        result = judged(
            world=WorldSpec(size=4),
            system=SystemSpec(redundancy=2),
            reload=ReloadSpec(step=1),
            run=LATER_STEPS,
        )
        finding = first_finding(result, "world.rank-failed")
        assert "to contain every element once" in finding.message


class TestAnswers:
    """Engines that compute right and report wrong."""

    def test_parts_no_longer_reported(self, judged):
        def forgetful(engine, right):
            reported = list(right())
            yield from reported[1:] if engine._ddp.grads_reduced else reported

        finding = first_finding(judged(WrongAnswers(parts=forgetful)), "invariant.ownership")
        assert "gone: 0.up.weight" in finding.message

    def test_clipped_step_without_a_norm(self, judged):
        def silent(engine, right, *, lr_factor):
            right(lr_factor=lr_factor)
            return StepResult(skipped=False)

        target = WrongAnswers(step=silent)
        first_finding(judged(target, optimizer=OptimizerSpec(clip_norm=0.1)), "equality.norm")
