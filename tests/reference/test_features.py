"""Settings of a step by hand: one param, injected gradients, SGD with lr 1, so w = 1 - gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from zero_sim.errors import ScenarioError, UsageError
from zero_sim.reference import Reference, SumSite, SumSpan
from zero_sim.reference.placement import MemoryLayout
from zero_sim.scenario.spec import (
    DataSpec,
    FreezeSpec,
    LossScaleSpec,
    NanSpec,
    OptimizerSpec,
    ParamGroupSpec,
    SystemSpec,
    WorldSpec,
)
from zero_sim.workloads import build_workload

BF16 = torch.bfloat16


def sgd(**settings):
    return OptimizerSpec(name="sgd", lr=1.0, **settings)


def all_bits(result):
    """Return copies of masters, params and state."""
    groups = (result.masters, result.params, *result.state.values())
    return [tensor.clone() for group in groups for tensor in group.values()]


def span_of(elems, *, first, second):
    """Return a span whose two sums end on the given ranks."""
    return SumSpan(
        start=0,
        stop=elems,
        site=SumSite(kind="reduce", elems=elems, offset=0, ends_on=first),
        replica_site=SumSite(kind="reduce", elems=elems, offset=0, ends_on=second),
    )


class TestSync:
    """Time of the sum over ranks, in bf16: 256 and -256, then 1 and 1."""

    @pytest.mark.parametrize(("sync", "total"), [("last", 1.0), ("every", 2.0)])
    def test_order_of_the_two_sums(self, make_scenario, inject, sync, total):
        """256 + 1 rounds to 256 and -256 + 1 is -255; micro-batch sums are 0 and 2."""
        scenario = make_scenario(micros=2, system=SystemSpec(divide="none", sync=sync))
        workload = inject([[[256.0], [1.0]], [[-256.0], [1.0]]], dtype=BF16)
        assert Reference(scenario, workload=workload).step().grads["w"].item() == total

    @pytest.mark.parametrize(("sync", "total"), [("last", 85.5), ("every", 86.0)])
    def test_pre_divides_each_reduced_gradient(self, make_scenario, inject, sync, total):
        """256 + 1 is 256, a third of which is 85.5; 85.5 plus a third of 1 rounds to 86."""
        scenario = make_scenario(size=3, micros=2, system=SystemSpec(divide="pre", sync=sync))
        workload = inject([[[256.0], [1.0]], [[0.0], [0.0]], [[0.0], [0.0]]], dtype=BF16)
        assert Reference(scenario, workload=workload).step().grads["w"].item() == total


class TestDivideBy:
    """Divisors of the sum 12, of four micro-batches of 3 on two ranks."""

    @pytest.mark.parametrize(("by", "mean"), [("ranks", 6.0), ("micro-batches", 3.0)])
    @pytest.mark.parametrize("how", ["post", "pre", "premul"])
    def test_counts(self, make_scenario, inject, by, mean, how):
        """Dividing by 2 or by 4 is exact in every form."""
        scenario = make_scenario(micros=2, system=SystemSpec(divide=how, divide_by=by))
        result = Reference(scenario, workload=inject([[[3.0], [3.0]]] * 2)).step()
        assert result.masters["w"].item() == 1 - mean
        assert result.grads["w"].item() == (12.0 if how == "post" else mean)

    def test_tokens_are_rows(self, make_scenario, inject):
        """Inputs have one, two and five rows: 8 in total."""

        class Rows(inject):
            def batch(self, *, step, rank, micro):
                rows = (1, 2, 5)[rank]
                return replace(super().batch(step=step, rank=rank, micro=micro), row_count=rows)

        scenario = make_scenario(size=3, system=SystemSpec(divide="post", divide_by="tokens"))
        result = Reference(scenario, workload=Rows([[[4.0]]] * 3)).step()
        assert result.masters["w"].item() == 1 - 12 / 8

    def test_summed_loss_over_tokens_is_the_mean_over_all_rows(self, make_scenario):
        """With uneven rows, it equals one device with all rows, except for rounding."""
        data = DataSpec(rows=2, uneven_rows=True, loss="sum")
        system = SystemSpec(divide="post", divide_by="tokens")
        scenario = make_scenario("mlp", size=3, micros=2, data=data, system=system)
        workload = build_workload(scenario)
        batches = [workload.batch(step=0, rank=r, micro=m) for r in range(3) for m in range(2)]
        assert [batch.rows for batch in batches] == [2, 2, 3, 3, 4, 4]
        module = workload.build()
        before = [param.detach().clone() for param in module.parameters()]
        outputs = module(torch.cat([batch.inputs for batch in batches]))
        torch.nn.functional.mse_loss(
            outputs, torch.cat([batch.targets for batch in batches])
        ).backward()
        masters = Reference(scenario, workload=workload).step().masters.values()
        for old, param, new in zip(before, module.parameters(), masters, strict=True):
            torch.testing.assert_close(new, old - param.grad)


class TestRedundancy:
    """Sums within replicas, then over them, in bf16."""

    @pytest.mark.parametrize(
        ("replicas", "order", "total"),
        [
            (1, "linear", 256.0),
            (2, "linear", 258.0),
            (4, "linear", 256.0),
            (1, "linear-fp32", 260.0),
            (2, "linear-fp32", 258.0),
            (2, "tree", 258.0),
        ],
    )
    def test_order_of_sums_over_replicas(self, make_scenario, inject, replicas, order, total):
        """(256 + 1) + (1 + 1) is 256 + 2; fp32 is rounded between the two sums."""
        system = SystemSpec(divide="none", redundancy=replicas)
        workload = inject([[[256.0]], [[1.0]], [[1.0]], [[1.0]]], dtype=BF16)
        scenario = make_scenario(size=4, order=order, system=system)
        assert Reference(scenario, workload=workload).step().grads["w"].item() == total

    @pytest.mark.parametrize(("chunk", "total"), [(0, 258.0), (1, 256.0)])
    def test_ring_chunk_decides_the_order_of_the_second_sum(
        self, make_scenario, inject, chunk, total
    ):
        """Three replicas of one rank: 256 is added last, or before the last."""
        scenario = make_scenario(
            size=3, order="ring", system=SystemSpec(divide="none", redundancy=3)
        )
        workload = inject([[[256.0]], [[1.0]], [[1.0]]], dtype=BF16)
        result = Reference(scenario, workload=workload).step(
            {"w": [span_of(1, first=0, second=chunk)], "unused": [span_of(2, first=0, second=0)]}
        )
        assert result.grads["w"].item() == total

    @pytest.mark.parametrize(("chunk", "total"), [(0, 516.0), (1, 512.0)])
    def test_ring_chunk_decides_the_order_of_the_first_sum(
        self, make_scenario, inject, chunk, total
    ):
        """Two replicas of three ranks, each 256, 1, 1."""
        system = SystemSpec(divide="none", redundancy=2)
        scenario = make_scenario(size=6, order="ring", system=system)
        workload = inject([[[256.0]], [[1.0]], [[1.0]]] * 2, dtype=BF16)
        spans = {
            "w": [span_of(1, first=chunk, second=1)],
            "unused": [span_of(2, first=0, second=0)],
        }
        result = Reference(scenario, workload=workload).step(spans)
        assert result.grads["w"].item() == total


class TestNorm:
    """Norm of the gradient that the optimizer gets."""

    def test_after_the_division(self, make_scenario, inject):
        """(6, 8) / 2 has norm 5; `unused` has two zeros."""
        scenario = make_scenario(system=SystemSpec(divide="post"))
        result = Reference(scenario, workload=inject([[[6.0, 0.0]], [[0.0, 8.0]]])).step()
        assert (result.norm.item(), result.measured.zeros, result.measured.norm_certified) == (
            5.0,
            2,
            True,
        )
        assert (result.skipped, result.loss_scale, result.update.lr_factor) == (False, None, 1.0)

    def test_clip_by_norm(self, make_scenario, inject):
        """(3e4, 4e4) is halved; the reported norm and reduced gradient are not."""
        scenario = make_scenario(optim=sgd(clip_norm=2.5e4))
        result = Reference(scenario, workload=inject([[[3e4, 0.0]], [[0.0, 4e4]]])).step()
        assert result.norm.item() == 5e4
        assert result.grads["w"].tolist() == [3e4, 4e4]
        assert result.masters["w"].tolist() == [1 - 1.5e4, 1 - 2e4]

    def test_clip_by_value(self, make_scenario, inject):
        """Both signs are clipped; zeros are counted before clipping."""
        scenario = make_scenario(optim=sgd(clip_value=0.5))
        result = Reference(scenario, workload=inject([[[3.0, -3.0, 0.25]]] * 2)).step()
        assert result.masters["w"].tolist() == [0.5, 1.5, 0.5]
        assert result.measured.zeros == 2


class TestLossScale:
    """Loss scale of 4."""

    def test_reported_gradient_is_scaled_and_the_update_is_not(self, make_scenario, inject):
        """(1 + 2) * 4 is reported, and 3 is applied."""
        scenario = make_scenario(optim=sgd(loss_scale=LossScaleSpec(initial=4.0)))
        result = Reference(scenario, workload=inject([[[1.0]], [[2.0]]])).step()
        assert result.grads["w"].item() == 12.0
        assert result.masters["w"].item() == -2.0
        assert (result.norm.item(), result.loss_scale) == (3.0, 4.0)
        assert result.losses[1, 0].item() == 2.0

    def test_overflow_changes_nothing_but_the_scale(self, make_scenario, inject):
        """1e38 times 4 overflows, times 2 does not; the warm-up of lr continues."""
        spec = sgd(loss_scale=LossScaleSpec(initial=4.0), momentum=0.5, warmup_steps=4)
        reference = Reference(
            make_scenario(size=1, optim=spec), workload=inject([[[1e38]]], dtype=torch.float32)
        )
        result = reference.step()
        assert (result.skipped, result.loss_scale, result.update.lr_factor) == (True, 4.0, 0.25)
        assert result.masters["w"].item() == result.params["w"].item() == 1.0
        assert result.state["w"] == {}
        assert result.nonfinite is not None
        assert result.nonfinite.value == math.inf
        result = reference.step()
        assert (result.skipped, result.loss_scale, result.update.lr_factor) == (False, 2.0, 0.5)
        assert result.masters["w"].item() == torch.tensor(1e38).item() * -0.5

    def test_skipped_step_keeps_every_bit(self, make_scenario):
        """A planted infinity on one rank of a real workload with AdamW."""
        data = DataSpec(nan=NanSpec(step=1, rank=1, value="inf"))
        spec = OptimizerSpec(loss_scale=LossScaleSpec(growth_interval=1))
        scenario = make_scenario("mlp", dtype="bf16", data=data, optim=spec)
        reference = Reference(scenario, workload=build_workload(scenario))
        before = all_bits(reference.step())
        skipped = reference.step()
        assert skipped.skipped
        assert all(torch.equal(a, b) for a, b in zip(before, all_bits(skipped), strict=True))
        after = reference.step()
        assert (after.skipped, after.loss_scale) == (False, 1024.0)
        assert not torch.equal(before[0], after.masters["0.up.weight"])

    def test_a_sum_in_fp16_overflows_by_itself(self, make_scenario, inject):
        """Each rank's gradient is finite in fp16 and their sum is not; half of it is."""
        spec = OptimizerSpec(name="sgd", loss_scale=LossScaleSpec(initial=2.0**15))
        scenario = make_scenario(optim=spec)
        reference = Reference(scenario, workload=inject([[[1.0]]] * 2, dtype=torch.float16))
        overflowed, finite = reference.step(), reference.step()
        assert overflowed.skipped
        assert overflowed.grads["w"].item() == math.inf
        assert not finite.skipped
        assert finite.grads["w"].item() == 2.0**15

    def test_infinity_without_loss_scale_is_not_skipped(self, make_scenario, inject):
        """It reaches the masters, and is reported."""
        result = Reference(make_scenario(size=1), workload=inject([[[math.inf]]])).step()
        assert not result.skipped
        assert result.masters["w"].item() == -math.inf


class TestFreeze:
    """`w`, frozen in step 1; momentum 1/2, gradient 1."""

    def test_neither_param_nor_state_moves(self, make_scenario, inject):
        """w: 0, 0, -1.5; buffer: 1, 1, 1.5. A frozen param is excluded from norm and zeros."""
        freeze = (FreezeSpec(param="w", start=1, stop=2),)
        scenario = make_scenario(size=1, optim=sgd(momentum=0.5), freeze=freeze)
        reference = Reference(scenario, workload=inject([[[1.0]]]))
        seen = []
        for _ in range(3):
            result = reference.step()
            buffer = result.state["w"]["momentum_buffer"].item()
            seen.append(
                (result.masters["w"].item(), buffer, result.norm.item(), result.measured.zeros)
            )
            assert result.grads["w"].item() == (0.0 if result.step == 1 else 1.0)
        assert seen == [(0.0, 1.0, 1.0, 2), (0.0, 1.0, 0.0, 2), (-1.5, 1.5, 1.0, 2)]

    def test_overflow_of_a_frozen_param_does_not_skip(self, make_scenario, inject):
        freeze = (FreezeSpec(param="w", start=0, stop=1),)
        spec = sgd(loss_scale=LossScaleSpec())
        scenario = make_scenario(size=1, optim=spec, freeze=freeze)
        reference = Reference(scenario, workload=inject([[[math.inf]]]))
        assert not reference.step().skipped
        assert reference.step().skipped

    def test_all_params_may_be_frozen(self, make_scenario, inject):
        """The step does nothing; a loss without any gradient is not an error."""
        freeze = tuple(FreezeSpec(param=name, start=0, stop=1) for name in ("w", "unused"))
        result = Reference(make_scenario(freeze=freeze), workload=inject([[[1.0]]] * 2)).step()
        assert (result.masters["w"].item(), result.norm.item(), result.measured.zeros) == (
            1.0,
            0.0,
            0,
        )

    def test_frozen_layer_passes_gradients_on(self, make_scenario):
        """A frozen layer of an mlp passes the same gradients down."""
        free = make_scenario("mlp")
        frozen = make_scenario("mlp", freeze=(FreezeSpec(param="1.up.weight", start=0, stop=9),))
        one, two = (Reference(s, workload=build_workload(s)).step() for s in (free, frozen))
        for name, grad in one.grads.items():
            assert torch.equal(grad, two.grads[name]) == (name != "1.up.weight")

    def test_unknown_param_is_refused(self, make_scenario, inject):
        """The message lists the params."""
        freeze = (FreezeSpec(param="v", start=0, stop=1),)
        with pytest.raises(ScenarioError, match=r"got 'v' .*w, unused"):
            Reference(make_scenario(freeze=freeze), workload=inject([[[1.0]]] * 2))


class TestGroups:
    """Learning rates and weight decays by name."""

    def test_first_suffix_that_matches_wins(self, make_scenario, inject):
        """`unused`, without a gradient, decays by lr * decay: 1 - 1/4; `w` has lr 1/8."""
        groups = (
            ParamGroupSpec(match="sed", lr=0.5, weight_decay=0.5),
            ParamGroupSpec(match="", lr=0.125),
        )
        result = Reference(
            make_scenario(size=1, optim=sgd(groups=groups)), workload=inject([[[2.0]]])
        ).step()
        assert result.masters["w"].item() == 0.75
        assert result.masters["unused"].tolist() == [0.75, 0.75]

    def test_zero_is_a_setting(self, make_scenario, inject):
        """lr 0 and decay 0 of a group override the optimizer's."""
        groups = (
            ParamGroupSpec(match="w", lr=0.0),
            ParamGroupSpec(match="unused", weight_decay=0.0),
        )
        result = Reference(
            make_scenario(size=1, optim=sgd(groups=groups, weight_decay=0.5)),
            workload=inject([[[2.0]]]),
        ).step()
        assert result.masters["w"].item() == 1.0
        assert result.masters["unused"].tolist() == [1.0, 1.0]

    def test_warmup_scales_every_group(self, make_scenario, inject):
        """Factors 1/2, 1, 1 scale both the rate 1 of `unused` and the rate 1/4 of `w`."""
        spec = sgd(warmup_steps=2, groups=(ParamGroupSpec(match="w", lr=0.25),), weight_decay=1.0)
        reference = Reference(make_scenario(size=1, optim=spec), workload=inject([[[0.0]]]))
        seen = []
        for _ in range(3):
            result = reference.step()
            seen.append((result.update.lr_factor, result.masters["w"].item()))
        assert seen == [(0.5, 0.875), (1.0, 0.65625), (1.0, 0.4921875)]
        assert result.masters["unused"].tolist() == [0.0, 0.0]


class TestContinueAs:
    """A run continued in another world."""

    def test_ranks_change_and_state_stays(self, make_scenario, inject):
        """Two ranks of gradient 1, then three: buffer 2, then 1 + 3; the step count continues."""
        spec = sgd(momentum=0.5, loss_scale=LossScaleSpec(initial=4.0, growth_interval=1))
        scenario = make_scenario(optim=spec)
        reference = Reference(scenario, workload=inject([[[1.0]]] * 2, dtype=BF16))
        reference.step()
        after = replace(scenario, world=WorldSpec(size=3))
        reference.continue_as(after, workload=inject([[[1.0]]] * 3, dtype=BF16))
        result = reference.step()
        assert (result.step, result.loss_scale) == (1, 8.0)
        assert result.state["w"]["momentum_buffer"].item() == 4.0
        assert result.masters["w"].item() == 1 - 2 - 4
        assert list(result.data_digests) == [0, 1, 2]

    @pytest.mark.parametrize("name", ["mlp", "unusual"])
    def test_the_same_world_changes_no_bit(self, make_scenario, name):
        """The bits equal those of an uninterrupted run, even with new addresses."""
        scenario = make_scenario(name, dtype="bf16", optim=OptimizerSpec(lr=0.1))
        one, two = (Reference(scenario, workload=build_workload(scenario)) for _ in range(2))
        places = [{"0.up.weight": MemoryLayout(address, (8, 1))} for address in (4, 20)]
        for reference in (one, two):
            reference.set_addresses(places)
            reference.step()
        two.continue_as(scenario)
        two.set_addresses(places)
        one.step()
        left, right = all_bits(one.step()), all_bits((two.step(), two.step())[1])
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

    def test_another_optimizer_is_refused(self, make_scenario, inject):
        """Its state would not fit."""
        reference = Reference(make_scenario(), workload=inject([[[1.0]]] * 2))
        with pytest.raises(UsageError, match="continues with optimizer"):
            reference.continue_as(make_scenario(optim=OptimizerSpec()))


class TestUnusual:
    """Each awkward kind of param."""

    @pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
    def test_reduced_gradients_are_plain_sums(self, make_scenario, dtype):
        """Gradients are zero if a rank or micro-batch has none; `frozen` is excluded."""
        scenario = make_scenario("unusual", size=3, micros=2, dtype=dtype)
        workload = build_workload(scenario)
        totals = {}
        for rank in range(3):
            module = workload.build()
            for micro in range(2):
                batch = workload.batch(step=0, rank=rank, micro=micro)
                workload.loss(module, batch).backward()
            for name, param in module.named_parameters():
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                totals[name] = totals[name] + grad if name in totals else grad
        del totals["frozen"]
        result = Reference(scenario, workload=workload).step()
        assert list(result.grads) == list(totals)
        for name, total in totals.items():
            assert result.grads[name].dtype == total.dtype
            assert torch.equal(result.grads[name], total)


class TestGoingOn:
    """Continuing from a checkpoint, with everything or only the weights."""

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_state_and_scale_are_kept_unless_weights_only(
        self, make_scenario, inject, weights_only
    ):
        """Momentum of two steps, or of one; a scale that has grown, or the initial one."""
        optim = OptimizerSpec(
            name="sgd",
            lr=1.0,
            momentum=1.0,
            loss_scale=LossScaleSpec(initial=8.0, growth_interval=1),
        )
        scenario = make_scenario(size=1, optim=optim)
        reference = Reference(scenario, workload=inject([[[3.0]]]))
        assert reference.step().masters["w"].item() == 1 - 3
        reference.continue_as(scenario, workload=inject([[[3.0]]]), weights_only=weights_only)
        taken = reference.step()
        assert taken.step == 1
        assert taken.loss_scale == (8.0 if weights_only else 16.0)
        assert taken.masters["w"].item() == 1 - 3 - (3 if weights_only else 6)
