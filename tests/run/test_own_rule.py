"""Targets with their own update rule: right ones pass, and mistakes are found."""

import re
import warnings
from dataclasses import replace

import pytest
import torch

from tests.targets.own_adamw import ByOptimizer, ByStep, LostUpdate
from tests.targets.own_muon import LowBitAdam, OwnMuon, StackedMuon
from zero_sim import run_case
from zero_sim.judge.coverage import UNMOVED
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import Numerics

CASE = Scenario(
    schema=1,
    name="own",
    model=ModelSpec(name="mlp", hidden=4),
    optimizer=OptimizerSpec(name="own", lr=0.01, weight_decay=0.1, warmup_steps=2),
    system=SystemSpec(stage=1),
    run=RunSpec(micro_batches=2),
    world=WorldSpec(size=3),
)
UNKNOWN = replace(CASE, world=WorldSpec(size=3, order="tree", order_known=False))


@pytest.fixture(autouse=True)
def _deprecated():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.mark.parametrize("case", [CASE, UNKNOWN], ids=["known", "unknown"])
@pytest.mark.parametrize("target", [ByStep(), ByOptimizer()], ids=["step", "optimizer"])
def test_right_rule_passes_with_all_its_state(target, case):
    result = run_case(case, target=target)
    assert result.verdict == "pass"
    assert result.scope == "full"
    (note,) = [note for note in result.notes if "trusted, not judged" in note]
    assert re.search(r"of target 'own-adamw'. Nearest is 'adamw', up to [1-3] ulp of", note)


@pytest.mark.parametrize("case", [CASE, UNKNOWN], ids=["known", "unknown"])
def test_lost_update_is_found(case):
    result = run_case(case, target=LostUpdate())
    assert result.verdict == "fail"
    assert result.findings[0].check == "equality.master"
    assert "the target's own rule lr 0.005" in result.findings[0].detail


def test_adamw_of_torch_differs_from_the_rule():
    """The arithmetic decides: otherwise equal rules differ by a few ulp."""

    class ByTorch(ByStep):
        reference_step = None

        def reference_optimizer(self, named, scenario):
            spec = scenario.optimizer
            return torch.optim.AdamW(
                named.values(), lr=spec.lr, weight_decay=spec.weight_decay, foreach=False
            )

    assert run_case(CASE, target=ByTorch()).verdict == "fail"


def test_random_rule_is_an_error():
    class Noisy(ByStep):
        @staticmethod
        def reference_step(param, grad, state, settings):
            param.bernoulli_()

    result = run_case(CASE, target=Noisy())
    assert result.verdict == "error"
    assert "reference_step of target 'own-adamw' to use no random numbers" in result.error


class WithSigmoid(ByStep):
    """Rule whose vectorised loops give other bits at the end of a tensor."""

    @staticmethod
    def rule(param, grad, state, settings):
        average = state.setdefault("average", torch.zeros_like(param))
        average.mul_(0.9).add_(torch.sigmoid(grad) ** 0.37)
        param.sub_(average, alpha=settings["lr"])

    reference_step = rule


class OneUlp(WithSigmoid):
    """Changes an element of the last shard by one ulp, in the third step."""

    def __init__(self, elem):
        super().__init__()
        self.elem, self.steps = elem, 0

    def rule(self, param, grad, state, settings):
        WithSigmoid.rule(param, grad, state, settings)
        self.steps += 1
        if self.steps == 9:
            param[self.elem] = torch.nextafter(param[self.elem], torch.tensor(torch.inf))


ENDS = replace(CASE, model=ModelSpec(name="mlp", hidden=8), run=RunSpec(steps=4))


class WithoutMasters(WithSigmoid):
    capabilities = replace(ByStep.capabilities, dtypes=("bf16",))
    numerics = Numerics(
        divide="post-rounded", grad_dtype="param", masters="param", elementwise=True
    )


@pytest.mark.parametrize("order_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("timing", ["eager", "hostile"])
@pytest.mark.parametrize("size", [1, 3])
def test_bits_at_ends_of_loops_pass_in_any_cut(order_known, timing, size):
    world = WorldSpec(size=size, order="tree", order_known=order_known, timing=timing)
    result = run_case(replace(ENDS, world=world), target=WithSigmoid())
    assert (result.verdict, result.findings) == ("pass", ())


def test_bits_at_ends_of_loops_pass_without_masters():
    case = replace(ENDS, model=replace(ENDS.model, dtype="bf16"))
    result = run_case(case, target=WithoutMasters())
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize("elem", [0, 20, -1])
@pytest.mark.parametrize("order_known", [True, False], ids=["known", "unknown"])
def test_one_ulp_elsewhere_is_found(order_known, elem):
    world = WorldSpec(size=3, order="tree", order_known=order_known)
    result = run_case(replace(ENDS, world=world), target=OneUlp(elem))
    assert result.verdict == "fail"
    found = result.findings[0]
    assert (found.check, found.step, found.differ_count) == ("equality.master", 2, 1)


class Untold:
    """Engine without parts()."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        if name == "parts":
            raise AttributeError(name)
        return getattr(self.engine, name)


def test_unreported_ends_of_loops_are_inconclusive():
    class Untelling(WithSigmoid):
        def build(self, module, *, scenario, group):
            return Untold(super().build(module, scenario=scenario, group=group))

    result = run_case(CASE, target=Untelling())
    assert result.verdict == "inconclusive"
    (doubt,) = result.findings
    assert doubt.check == "guard.not-followed"
    assert "this case's cuts are not known" in doubt.message


@pytest.mark.parametrize("case", [CASE, UNKNOWN], ids=["known", "unknown"])
def test_rule_declared_elementwise_wrongly_is_inconclusive(case):
    class Normed(ByStep):
        @staticmethod
        def rule(param, grad, state, settings):
            param.sub_(grad / grad.norm().add(1), alpha=settings["lr"])

        reference_step = rule

    result = run_case(case, target=Normed())
    assert result.verdict == "inconclusive"
    (doubt,) = result.findings
    assert doubt.check == "guard.not-followed"
    assert "reference_step of target 'own-adamw' depend on where a tensor is cut" in doubt.message


MUON = replace(
    CASE,
    model=ModelSpec(name="params", shapes=((3, 4), (4,), (3, 4), (2, 5)), dtype="bf16"),
    optimizer=OptimizerSpec(name="own", lr=0.1, momentum=0.9),
    run=RunSpec(steps=3),
)


@pytest.mark.parametrize(
    "target", [OwnMuon(), StackedMuon(), LowBitAdam()], ids=["by-param", "stacked", "low-bit"]
)
def test_unsharded_bf16_matrices_with_other_state_shapes_pass(target):
    result = run_case(MUON, target=target)
    assert (result.verdict, result.findings) == ("pass", ())
    assert UNMOVED not in result.unobserved


def test_owner_that_skips_its_param_is_found():
    result = run_case(MUON, target=OwnMuon("last"))
    assert result.verdict == "fail"
    assert result.findings[0].param == "p3"


def test_step_rounded_away_in_bf16_is_not_observed():
    small = replace(MUON, optimizer=replace(MUON.optimizer, lr=1e-9))
    result = run_case(small, target=OwnMuon())
    assert UNMOVED in result.unobserved


@pytest.mark.parametrize("mistake", ["code", "dtype"])
def test_8_bit_state_is_compared_in_its_own_dtype(mistake):
    result = run_case(MUON, target=LowBitAdam(mistake))
    assert result.verdict == "fail"
    assert {found.check for found in result.findings} == {"equality.state"}
    assert "'mean'" in result.findings[0].message


class InFp8(ByStep):
    """Elementwise rule with fp8 state; `flips` is the index of an element with a flipped bit."""

    flips = None

    @staticmethod
    def reference_step(param, grad, state, settings):
        held = state.get("average", torch.zeros_like(param, dtype=torch.float8_e4m3fn))
        average = held.float() * 0.5 + torch.sigmoid(grad) ** 0.37
        state["average"] = average.to(held.dtype)
        param.sub_(average, alpha=settings["lr"])

    def rule(self, param, grad, state, settings):
        self.reference_step(param, grad, state, settings)
        if self.flips is not None:
            state["average"].view(torch.uint8)[self.flips] ^= 1


@pytest.mark.parametrize("case", [CASE, UNKNOWN], ids=["known", "unknown"])
def test_fp8_state_is_compared_bit_for_bit(case):
    assert run_case(case, target=InFp8()).verdict == "pass"
    broken = InFp8()
    broken.flips = -1
    found = run_case(case, target=broken).findings
    assert {each.check for each in found} == {"equality.state"}


def in_bf16(norm, bound):
    """Factor of torch.nn.utils.clip_grad_norm_ for bf16 gradients: norm and factor are bf16."""
    return torch.clamp(bound / (norm.bfloat16() + 1e-6), max=1.0)


class Clipped(OwnMuon):
    """Clips bf16 gradients with torch's function; `slip` is an erroneous factor of the bound."""

    capabilities = replace(
        OwnMuon.capabilities, follows=(*OwnMuon.capabilities.follows, "optimizer.clip_norm")
    )
    numerics = replace(
        OwnMuon.numerics,
        norm="reported",
        clip=in_bf16,
        reported_grads="after-clip",
        reported_dtype="param",
    )
    slip = 1.0

    def clip(self, params, norm_max):
        norm = torch.nn.utils.clip_grad_norm_(params, norm_max * self.slip, foreach=False)
        return norm.float()


class ClippedByFp32(Clipped):
    """Computes norms in fp32, with a named form of clipping."""

    numerics = replace(Clipped.numerics, norm="of-params", clip="fp32-reciprocal")

    def clip(self, params, norm_max):
        grads = [param.grad for param in params]
        norm = torch.stack([grad.float().norm() for grad in grads]).norm()
        factor = torch.clamp(norm_max / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor * self.slip)
        return norm


CLIPPED = replace(MUON, optimizer=replace(MUON.optimizer, clip_norm=0.01))


@pytest.mark.parametrize("target", [Clipped, ClippedByFp32])
def test_clipping_without_masters_is_judged_as_declared(target):
    result = run_case(CLIPPED, target=target())
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")
    slipping = type("Slipping", (target,), {"slip": 1 + 2**-6})()
    assert run_case(CLIPPED, target=slipping).findings[0].check == "equality.grad"
