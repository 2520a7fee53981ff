"""Engines that docs/targets.md shows for single declarations: they pass, and faults are found."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.scenario.spec import (
    DataSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import StepResult, WholeParamEngine

PAGE = Path(__file__).parent.parent / "docs/target-examples.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
SGD = OptimizerSpec(name="sgd", lr=0.1)
SMALL = Scenario(
    schema=1, name="case", model=ModelSpec(name="params", shapes=((3,), (2, 2))),
    world=WorldSpec(size=3), run=RunSpec(steps=3), system=SystemSpec(stage=0), optimizer=SGD,
    data=DataSpec(nan=NanSpec(step=1, rank=1)),
)  # fmt: skip
LARGE = Scenario(
    schema=1, name="case", model=ModelSpec(name="params", shapes=((40, 20), (60, 10), (50, 10))),
    world=WorldSpec(size=3), run=RunSpec(steps=2),
    system=SystemSpec(stage=0, bucket_elems=1200), optimizer=OptimizerSpec(name="adamw"),
)  # fmt: skip
SHARDED = replace(LARGE, system=SystemSpec(stage=1))


@pytest.fixture(scope="module")
def pool():
    with WorldPool() as worlds:
        yield worlds


@pytest.fixture
def judged(pool):
    """Judge a target of the page, optionally with other engine methods or numerics."""

    def judge(name, case, *, numerics=None, **methods):
        base, code = ([e for e in BLOCKS if f"class {cls}(" in e] for cls in ("Dealt", name))
        names = {}
        exec(base[0] + code[0], names)  # the code that readers copy
        target = names[name]()
        engine = target.Engine
        wrapped = {key: _around(getattr(engine, key, None), new) for key, new in methods.items()}
        target.Engine = type("Changed", (engine,), wrapped)
        target.numerics = replace(target.numerics, **(numerics or {}))
        return run_case(case, pool=pool, target=target)

    return judge


def _around(old, new):
    """Return a method that receives the engine and the page's original method."""
    return lambda self, *args, **named: new(self, old and partial(old, self), *args, **named)


def passes(result):
    assert (result.verdict, result.findings) == ("pass", ())
    missing = {"reduced gradients", "calls of told buckets"}
    return not missing & set(result.unobserved)


def first(result):
    assert result.findings
    return result.findings[0]


class TestUnscaled:
    """Gradients reported after unscaling and before clipping."""

    NAME = "ScaledTarget"
    CASE = replace(
        SMALL, optimizer=replace(SGD, clip_norm=0.01, loss_scale=LossScaleSpec())
    )  # fmt: skip

    def test_documented_engine_passes(self, judged):
        assert passes(judged(self.NAME, self.CASE))

    @pytest.mark.parametrize("point", ["before-division", "after-division", "after-clip"])
    def test_wrong_grads_told_is_found(self, judged, point):
        found = first(judged(self.NAME, self.CASE, numerics={"reported_grads": point}))
        assert found.check == "equality.grad"
        assert "Numerics(reported_grads='after-unscale')" in found.detail

    @pytest.mark.parametrize("wrong", [False, True])
    def test_param_gradients_are_compared_under_a_loss_scale(self, judged, wrong):
        def parts(self, own):
            return [replace(part, grad=None) for part in own()]

        def share(self, own):
            for param in self.named.values():
                param.grad *= 2 if wrong else 1

        shows = {"reported_grads": "after-clip", "grads_in_params": True}
        result = judged(self.NAME, self.CASE, numerics=shows, parts=parts, share=share)
        assert [found.check for found in result.findings[:1]] == ["equality.grad"] * wrong

    def test_gradient_reported_scaled_is_found(self, judged):
        def parts(self, own):
            for part in own():
                yield part if part.grad is None else replace(part, grad=part.grad * 1024)

        assert first(judged(self.NAME, self.CASE, parts=parts)).check == "equality.grad"


class TestSkipping:
    """Steps skipped without a loss scale, under an unknown order."""

    NAME, CASE = "SkippingTarget", replace(SMALL, world=WorldSpec(size=3, order_known=False))

    def test_documented_engine_passes(self, judged):
        assert passes(judged(self.NAME, self.CASE))

    def test_missing_skip_is_found(self, judged):
        def update(self, own):
            return WholeParamEngine.update(self)

        assert judged(self.NAME, self.CASE, update=update).verdict == "fail"

    def test_skipped_finite_step_is_found(self, judged):
        result = judged(self.NAME, self.CASE, update=lambda self, own: StepResult(skipped=True))
        assert first(result).check == "equality.skipped"


class TestBuckets:
    """Buckets of limited size, in flight together, without control messages."""

    NAME = "BucketsTarget"

    def test_documented_engine_passes(self, judged):
        assert passes(judged(self.NAME, LARGE))

    def test_bucket_above_bucket_elems_is_found(self, judged):
        def buckets(self, own):
            return [list(self.named.values())[:2], list(self.named.values())[2:]]

        found = first(judged(self.NAME, LARGE, buckets=buckets))
        assert found.check == "invariant.volume"
        assert "got 1400 elements" in found.message
        assert "expected at most bucket_elems = 1200" in found.message

    def test_bucket_reduced_twice_is_found(self, judged):
        def reduce(self, own):
            dist.all_reduce(torch.zeros(800), group=self.group)
            own()

        said = first(judged(self.NAME, LARGE, reduce=reduce)).message
        assert "1 x all_reduce of 800 elements too many" in said

    def test_buckets_reduced_one_by_one_are_found(self, judged):
        def reduce(self, own):
            for bucket in self.buckets():
                self.buckets = lambda bucket=bucket: [bucket]
                own()
                del self.buckets

        found = first(judged(self.NAME, LARGE, reduce=reduce))
        assert found.check == "invariant.overlap"
        assert "at most 1 calls in flight" in found.message

    def test_control_message_above_maximum_is_found(self, judged):
        def share(self, own):
            dist.all_reduce(torch.zeros(1), group=self.group)

        found = first(judged(self.NAME, LARGE, share=share))
        assert found.check == "invariant.volume"
        assert "1 control messages in the step, expected at most 0" in found.message


class TestPerOwner:
    """Buckets with one owner each, reduced and gathered in one call."""

    NAME = "PerOwnerTarget"

    def test_documented_engine_passes(self, judged):
        assert passes(judged(self.NAME, SHARDED))

    @pytest.mark.parametrize(("hook", "kind"), [("reduce", "reduce"), ("share", "broadcast")])
    def test_repeated_call_is_found(self, judged, hook, kind):
        def twice(self, own):
            getattr(dist, kind)(torch.zeros(600), 1, group=self.group)
            own()

        found = first(judged(self.NAME, SHARDED, **{hook: twice}))
        assert found.check == "invariant.volume"
        assert f"1 x {kind} of 600 elements too many" in found.message


class TestCopies:
    """Sums over replicas of a shard, in a separate dtype and tensor."""

    NAME = "CopiesTarget"

    def case(self, order, size=6):
        return replace(
            LARGE, world=WorldSpec(size=size, order=order),
            system=SystemSpec(stage=1, redundancy=size // 2),
            model=ModelSpec(name="params", shapes=((7, 5), (13,), (3, 11))),
        )  # fmt: skip

    @pytest.mark.parametrize("order", ["linear", "ring"])
    @pytest.mark.parametrize("size", [4, 6])
    def test_documented_engine_passes(self, judged, order, size):
        assert passes(judged(self.NAME, self.case(order, size)))

    def test_wrong_copies_dtype_is_found(self, judged):
        result = judged(self.NAME, self.case("linear"), numerics={"replica_dtype": None})
        assert first(result).check == "equality.grad"

    def test_wrong_position_in_the_copies_sum_is_found(self, judged):
        def parts(self, own):
            for part in own():
                elems, _ = part.place.replica_sum_at
                yield replace(part, place=replace(part.place, replica_sum_at=(2 * elems, elems)))

        assert first(judged(self.NAME, self.case("ring"), parts=parts)).check == "equality.grad"


class TestUnsettled:
    """Steps that begin while params of the previous step are in flight."""

    NAME = "LateTarget"
    CASE = replace(SHARDED, run=RunSpec(steps=4, micro_batches=2), optimizer=OptimizerSpec(lr=0.1))

    @pytest.mark.parametrize("world", [{}, {"timing": "hostile"}, {"order_known": False}], ids=str)
    def test_documented_engine_passes(self, judged, world):
        assert passes(judged(self.NAME, replace(self.CASE, world=WorldSpec(size=3, **world))))

    def test_forward_without_wait_is_found(self, judged, monkeypatch):
        monkeypatch.setattr(torch.nn.Module, "register_forward_pre_hook", lambda *_: None)
        case = replace(self.CASE, world=WorldSpec(size=3, timing="hostile"))
        assert judged(self.NAME, case).verdict == "fail"


class TestWhole:
    """Unsharded memory within a step, declared by the target's own function."""

    NAME, CASE = "FreeingTarget", replace(SHARDED, system=SystemSpec(stage=2))

    def test_documented_engine_passes(self, judged):
        assert passes(judged(self.NAME, self.CASE))

    def test_gradients_resident_until_update_are_found(self, judged):
        def reduce(self, own):
            while self.in_flight:
                name, work = self.in_flight.pop()
                work.wait()
                self.named[name].grad /= self.group.size()

        result = judged(self.NAME, self.CASE, reduce=reduce)
        assert {found.check for found in result.findings} == {"invariant.memory"}
        assert "bytes of whole gradients as the gradient of" in first(result).message

    def test_engine_without_whole_bytes_is_an_error(self, judged, monkeypatch):
        bare = PAGE.read_text().replace("def whole_bytes", "def other_bytes")
        blocks = re.findall(r"```python\n(.*?)```", bare, flags=re.DOTALL)
        monkeypatch.setitem(globals(), "BLOCKS", blocks)
        result = judged(self.NAME, self.CASE)
        assert result.verdict == "error"
        assert "expected an engine with whole_bytes()" in result.error
