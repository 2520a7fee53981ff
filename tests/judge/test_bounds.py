"""Verdicts by bounds: if the order is unknown, right systems pass and wrong ones fail."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from zero_sim.judge import comparison as comparison
from zero_sim.reference.bounding import bound_sum
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import (
    DataSpec,
    FaultSpec,
    FreezeSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerName,
    OptimizerSpec,
    OrderName,
    ParamGroupSpec,
    RunSpec,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.sim import order_backends
from zero_sim.targets import Numerics, find_target
from zero_sim.targets.own import ZeroSimEngine
from zero_sim.zero import buffer as buffer_module
from zero_sim.zero import unit as unit_module
from zero_sim.zero.optimizer import DistributedOptimizer

BF16 = ModelSpec(name="mlp", dtype="bf16", hidden=5)
FP32 = replace(BF16, dtype="fp32")
SHAPES = ((3,), (0,), (4,), (), (2, 3))
UNKNOWN = WorldSpec(size=4, order="random-tree", order_known=False)


@pytest.fixture
def bounded(judged):
    """Run a small case of unknown order."""

    def run(target=None, **parts):
        return judged(target, **{"world": UNKNOWN, **parts})

    return run


def checks_of(result):
    assert result.verdict == "fail", result
    return [finding.check for finding in result.findings]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("model", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("order", get_args(OrderName))
def test_right_system_passes_in_any_order(bounded, order, model, stage):
    result = bounded(
        model=model,
        world=replace(UNKNOWN, order=order),
        system=SystemSpec(stage=stage, bucket_elems=50),
        run=RunSpec(steps=3, micro_batches=2, seed=5),
    )
    assert result.verdict == "pass", result.findings
    assert result.guarantees.keys() == {"bound", "order-free"}


@pytest.mark.parametrize("size", [3, 5, 8])
@pytest.mark.parametrize("seed", range(3))
def test_right_system_passes_in_many_trees(bounded, seed, size):
    world = replace(UNKNOWN, size=size)
    assert bounded(world=world, run=RunSpec(steps=2, seed=seed)).verdict == "pass"


@pytest.mark.parametrize(
    "model",
    [
        ModelSpec(name="params", shapes=SHAPES, dtype="bf16"),
        ModelSpec(name="params", shapes=SHAPES, dtype="fp16"),
        ModelSpec(name="ternary", dtype="bf16"),
        ModelSpec(name="unusual", dtype="bf16"),
        ModelSpec(name="transformer-260", dtype="bf16"),
        replace(BF16, freeze=(FreezeSpec(param="0.up.weight", start=1, stop=2),)),
    ],
    ids=["params", "fp16", "ternary", "unusual", "transformer-260", "freeze"],
)
def test_every_accepted_model_passes(bounded, model):
    assert bounded(model=model, run=RunSpec(steps=3)).verdict == "pass"


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("divide", ["none", "pre", "post", "premul"])
def test_every_division_passes(bounded, divide, sync):
    result = bounded(
        system=SystemSpec(divide=divide, divide_by="micro-batches", sync=sync),
        run=RunSpec(steps=2, micro_batches=3),
    )
    assert result.verdict == "pass", result.findings


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.01},
        {"clip_value": 0.001},
        {"loss_scale": LossScaleSpec(growth_interval=1), "clip_norm": 0.01},
        {"groups": (ParamGroupSpec(match="bias", lr=0.1),), "warmup_steps": 3},
    ],
    ids=["clip-norm", "clip-value", "loss-scale", "groups"],
)
def test_every_setting_of_a_step_passes(bounded, settings):
    assert bounded(optimizer=OptimizerSpec(**settings), run=RunSpec(steps=4)).verdict == "pass"


@pytest.mark.parametrize(
    "name", [n for n in get_args(OptimizerName) if n not in (*WHOLE_PARAM_OPTIMIZERS, "own")]
)
def test_every_elementwise_optimizer_passes(bounded, name):
    assert bounded(optimizer=OptimizerSpec(name=name, lr=0.01)).verdict == "pass"


@pytest.mark.parametrize("timing", ["lazy", "hostile"])
@pytest.mark.parametrize("redundancy", [1, 2, 3])
def test_replicas_and_overlap_pass(bounded, redundancy, timing):
    result = bounded(
        world=replace(UNKNOWN, size=6, timing=timing),
        system=SystemSpec(redundancy=redundancy, bucket_elems=40),
        run=RunSpec(steps=3),
    )
    assert result.verdict == "pass", result.findings


def test_planted_overflow_is_skipped_and_followed(bounded):
    result = bounded(
        data=DataSpec(nan=NanSpec(step=1, rank=2)),
        optimizer=OptimizerSpec(loss_scale=LossScaleSpec()),
        run=RunSpec(steps=3),
    )
    assert result.verdict == "pass", result.findings


def test_planted_overflow_without_loss_scale_is_an_error(bounded):
    result = bounded(data=DataSpec(nan=NanSpec(step=1, rank=2)), run=RunSpec(steps=3))
    assert (result.verdict, result.findings) == ("error", ())
    assert "of step 1 on rank 2. data.nan plants it" in result.error


def test_context_parallel_ranks_hold_the_same_params(bounded):
    assert bounded(topology=TopologySpec(cp=2, order="dp-cp-tp-pp")).verdict == "pass"


class TestNotes:
    def test_note_has_the_number_and_width_of_bounds(self, bounded):
        notes = "\n".join(bounded().notes)
        assert "bound, " in notes
        # (1 + 2^-8)^3 - 1, with four ranks.
        assert "by 0.012 x the sum of its terms' magnitudes" in notes
        assert "must have the right sign" in notes

    def test_sums_of_pairs_are_compared_exactly(self, bounded):
        result = bounded(system=SystemSpec(redundancy=2))
        assert result.guarantees.keys() == {"one-sum", "order-free"}
        assert not any(note.startswith("bounds:") for note in result.notes)

    def test_bounds_without_information_are_inconclusive(self, bounded):
        """A thousand numbers in bf16 may add up to anything, zero included."""
        result = bounded(
            model=ModelSpec(name="params", shapes=((3,),), dtype="bf16"),
            world=replace(UNKNOWN, size=200),
            run=RunSpec(steps=1),
        )
        assert result.verdict == "inconclusive"
        assert result.findings[0].check == "guard.wide-bounds"

    def test_target_without_parts_is_inconclusive(self, bounded):
        result = bounded(_TellsNoParts(), model=FP32)
        assert result.verdict == "inconclusive", result.findings
        assert result.findings[0].check == "guard.not-followed"
        assert "masters and optimizer state" in result.findings[0].message

    def test_possible_overflow_is_inconclusive(self, bounded, monkeypatch):
        opened = bound_sum([torch.full((1,), 3e38)] * 3)
        assert opened.open.all()
        assert not opened.nonfinite.any()
        monkeypatch.setattr("zero_sim.reference.bounded._overflow", lambda bounds: "possible")
        result = bounded()
        assert result.verdict == "inconclusive"
        assert result.findings[0].check == "guard.not-followed"


class _ScalesLosses:
    """zero_sim's own system, with losses multiplied by ranks / tokens of the step."""

    name, capabilities = "tokens", None
    numerics = Numerics(scale_loss="tokens")

    class Engine(ZeroSimEngine):
        def backward(self, loss, *, last_micro, rows):
            # Counted by hand, because this system declares no collective for it.
            step_rows = sum((1, 2, 3, 1))
            super().backward(loss * (4 / step_rows), last_micro=last_micro, rows=rows)

    def build(self, module, *, scenario, group):
        return self.Engine(module, scenario=scenario, group=group)


def test_declared_loss_scale_is_applied_in_unknown_order(bounded):
    data = DataSpec(rows=1, uneven_rows=True, loss="sum")
    assert bounded(_ScalesLosses(), model=FP32, data=data).verdict == "pass"
    undeclared = _ScalesLosses()
    undeclared.numerics = Numerics()
    assert "equality.grad" in checks_of(bounded(undeclared, model=FP32, data=data))


class _Target:
    """zero_sim's own system, built with changed optimizer settings."""

    name = "test"
    capabilities = None

    def __init__(self, **optimizer):
        self._optimizer = optimizer

    def build(self, module, *, scenario, group):
        asked = replace(scenario, optimizer=replace(scenario.optimizer, **self._optimizer))
        return ZeroSimEngine(module, scenario=asked, group=group)


class _TellsNoParts(_Target):
    def build(self, module, *, scenario, group):
        engine = super().build(module, scenario=scenario, group=group)

        class Bare:
            zero_grad, backward = engine.zero_grad, engine.backward
            step, params = engine.step, engine.params

            def __init__(self):
                self.module = engine.module

        return Bare()


@pytest.mark.parametrize(
    ("name", "stage"), [("torch-ddp", 0), ("torch-zero-redundancy", 1), ("torch-fsdp2", 1)]
)
def test_systems_of_torch_pass(bounded, name, stage):
    result = bounded(find_target(name), model=FP32, system=SystemSpec(stage=stage))
    assert result.verdict == "pass", result
    assert result.guarantees["bound"] > 800


class TestWrongSystems:
    @pytest.mark.parametrize("kind", ["drop", "duplicate"])
    @pytest.mark.parametrize("model", [BF16, FP32], ids=["bf16", "fp32"])
    def test_lost_or_repeated_contribution_fails(self, bounded, kind, model):
        fault = FaultSpec(kind=kind, rank=1, collective="reduce_scatter")
        result = bounded(model=model, faults=(fault,))
        assert checks_of(result)[0] == "equality.grad"
        assert "some order of addition gives" in result.findings[0].message
        assert " to " in result.findings[0].expected_value

    def test_certified_element_is_exact(self, bounded):
        fault = FaultSpec(kind="corrupt", rank=1, collective="reduce_scatter", element=0, bit=9)
        result = bounded(
            model=ModelSpec(name="bit-hash", shapes=((40,),), dtype="bf16"), faults=(fault,)
        )
        assert checks_of(result)[0] == "equality.grad"
        assert "any order of addition gives" in result.findings[0].message

    def test_wrong_divisor_fails(self, bounded, monkeypatch):
        right = DistributedOptimizer.step

        def undivided(self):
            with torch.no_grad():
                self.ddp.divisor.fill_(1.0)
            return right(self)

        monkeypatch.setattr(DistributedOptimizer, "step", undivided)
        assert {"equality.norm", "equality.state"} <= set(checks_of(bounded()))

    @pytest.mark.parametrize(
        ("wrong", "check"),
        [
            ({"lr": 0.002}, "equality.master"),
            ({"betas": (0.9, 0.99)}, "equality.state"),
            ({"clip_norm": 0.02}, "equality.state"),
        ],
        ids=["lr", "betas", "clip"],
    )
    def test_wrong_hyper_parameter_fails(self, bounded, wrong, check):
        result = bounded(_Target(**wrong), optimizer=OptimizerSpec(clip_norm=0.01))
        assert check in checks_of(result)
        assert "equality.grad" not in checks_of(result)

    @pytest.mark.parametrize("stale", [0, 2])
    def test_stale_params_on_one_rank_fail(self, bounded, monkeypatch, stale):
        right = DistributedOptimizer.step

        def forgetful(self):
            kept = [param.detach().clone() for param in self.ddp.params.values()]
            result = right(self)
            if self.ddp.rank == stale:
                for param, old in zip(self.ddp.params.values(), kept, strict=True):
                    param.detach().copy_(old)
            return result

        monkeypatch.setattr(DistributedOptimizer, "step", forgetful)
        result = bounded(optimizer=OptimizerSpec(lr=0.1))
        assert "invariant.replicas" in checks_of(result)
        assert result.findings[0].step == 0

    def test_missing_gather_fails(self, bounded, monkeypatch):
        monkeypatch.setattr(unit_module, "all_gather", lambda *args, **kwargs: None)
        result = bounded()
        assert checks_of(result)[0] == "invariant.replicas"
        assert result.findings[0].phase == "gather"

    def test_replicas_of_a_sum_that_differ_fail(self, bounded, monkeypatch):
        right = DistributedOptimizer.step

        def nudged(self):
            if self.ddp.rank == 5:
                part = next(iter(self.fragments())).grad
                part[0] = torch.nextafter(part[0].float(), torch.tensor(9.0)).to(part.dtype)
            return right(self)

        monkeypatch.setattr(DistributedOptimizer, "step", nudged)
        world, system = replace(UNKNOWN, size=6), SystemSpec(redundancy=2)
        result = bounded(model=FP32, world=world, system=system)
        assert checks_of(result)[0] == "invariant.replicas"
        assert (result.findings[0].rank, result.findings[0].ulp) == (5, 1)

    def test_other_norm_on_one_rank_fails(self, bounded, monkeypatch):
        right = DistributedOptimizer.step

        def otherwise(self):
            result = right(self)
            if self.ddp.rank != 3:
                return result
            return replace(result, norm=torch.nextafter(result.norm, torch.tensor(0.0)))

        monkeypatch.setattr(DistributedOptimizer, "step", otherwise)
        result = bounded()
        assert set(checks_of(result)) == {"invariant.replicas", "equality.norm"}
        assert {(finding.phase, finding.rank) for finding in result.findings} == {("norm", 3)}

    def test_norm_of_other_gradients_fails(self, bounded, monkeypatch):
        right = DistributedOptimizer.step

        def otherwise(self):
            result = right(self)
            return replace(result, norm=torch.nextafter(result.norm, torch.tensor(0.0)))

        monkeypatch.setattr(DistributedOptimizer, "step", otherwise)
        result = bounded()
        assert checks_of(result) == ["equality.norm"]
        assert "from that of the reported gradients" in result.findings[0].message
        assert result.findings[0].ulp == 1

    def test_wrong_number_of_zeros_fails(self, bounded, monkeypatch):
        right = DistributedOptimizer.step

        def otherwise(self):
            result = right(self)
            return replace(result, zeros=result.zeros + 1)

        monkeypatch.setattr(DistributedOptimizer, "step", otherwise)
        assert checks_of(bounded()) == ["equality.zeros"]

    def test_norm_outside_the_bounds_fails(self, bounded, monkeypatch):
        right = DistributedOptimizer.step

        def doubled(self):
            result = right(self)
            return replace(result, norm=result.norm * 2)

        monkeypatch.setattr(DistributedOptimizer, "step", doubled)
        result = bounded()
        assert checks_of(result)[0] == "equality.norm"
        assert "for any order of addition" in result.findings[0].message

    def test_gradients_kept_from_the_step_before_fail(self, bounded, monkeypatch):
        monkeypatch.setattr(buffer_module.Buffer, "zero_grads", lambda self: None)
        assert checks_of(bounded())[0] == "invariant.zero-gradients"


def test_assumed_order_would_fail_where_bounds_pass(judged, monkeypatch):
    """Other trees than assumed, which only bounds forgive."""
    trees = order_backends.ORDERS["random-tree"]
    monkeypatch.setitem(order_backends.ORDERS, "linear", trees)
    world = WorldSpec(size=5)
    assert judged(world=world).verdict == "fail"
    assert judged(world=replace(world, order_known=False)).verdict == "pass"


def test_known_order_uses_no_bounds(judged, monkeypatch):
    monkeypatch.setattr(comparison, "BoundedComparison", None)
    assert judged().verdict == "pass"
