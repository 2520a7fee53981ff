"""Engines that pages show for one word of a declaration are right; faults in them are found."""

import re
from dataclasses import replace
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
from zero_sim.targets import Capabilities, StepResult, WholeParamEngine

DOCS = Path(__file__).parent.parent / "docs"


def shown(page, name):
    """What the example of a page that defines a class defines."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    (code,) = [each for each in blocks if f"class {name}" in each]
    names = {}
    exec(code, names)  # What a reader copies.
    return names


@pytest.fixture(scope="module")
def pool():
    with WorldPool() as worlds:
        yield worlds


def checks(result):
    return [finding.check for finding in result.findings]


class TestUnscaled:
    """Gradients told without the loss scale, before they are clipped."""

    NAMES = shown("targets.md", "ScaledTarget")
    CASE = Scenario(
        schema=1, name="case", model=ModelSpec(name="params", shapes=((3,), (2, 2))),
        world=WorldSpec(size=3), run=RunSpec(steps=3), system=SystemSpec(stage=0),
        optimizer=OptimizerSpec(name="sgd", lr=0.1, clip_norm=0.01, loss_scale=LossScaleSpec()),
        data=DataSpec(nan=NanSpec(step=1, rank=1)),
    )  # fmt: skip

    def target(self, **methods):
        names = self.NAMES
        engine = type("Engine", (names["ScaledEngine"],), methods)

        class Target(names["ScaledTarget"]):
            def build(self, module, *, scenario, group):
                optimizer = names["plain_optimizer"](
                    scenario.optimizer, dict(module.named_parameters())
                )
                return engine(module, optimizer, spec=scenario.optimizer, group=group)

        return Target()

    def test_the_engine_is_right(self, pool):
        result = run_case(self.CASE, pool=pool, target=self.target())
        assert (result.verdict, result.findings) == ("pass", ())
        assert "reduced gradients" not in result.unobserved

    @pytest.mark.parametrize("point", ["before-division", "after-division", "after-clip"])
    def test_no_other_word_says_where_it_reports(self, pool, point):
        target = self.target()
        target.numerics = replace(target.numerics, grads_told=point)
        result = run_case(self.CASE, pool=pool, target=target)
        assert checks(result)[0] == "equality.grad"
        assert "Numerics(grads_told='after-unscale')" in result.findings[0].detail

    @pytest.mark.parametrize("wrong", [False, True])
    def test_gradients_of_params_are_compared_in_spite_of_a_loss_scale(self, pool, wrong):
        engine = self.NAMES["ScaledEngine"]

        def parts(self):
            yield from (replace(part, grad=None) for part in engine.parts(self))

        def share(self):
            for param in self.named.values():
                param.grad *= 2 if wrong else 1

        target = self.target(parts=parts, share=share)
        target.numerics = replace(target.numerics, grads_told="after-clip", grads_in_params=True)
        result = run_case(self.CASE, pool=pool, target=target)
        assert checks(result)[:1] == (["equality.grad"] if wrong else [])

    def test_a_gradient_that_is_told_scaled_is_found(self, pool):
        engine = self.NAMES["ScaledEngine"]

        def parts(self):
            for part in engine.parts(self):
                scaled = part.grad is not None and part.place.start == 0 and self.scaler._scale
                yield replace(part, grad=part.grad * scaled) if scaled else part

        result = run_case(self.CASE, pool=pool, target=self.target(parts=parts))
        assert checks(result)[0] == "equality.grad"


class TestSkipping:
    """Steps that are skipped without a loss scale, in an order that is not known."""

    CASE = Scenario(
        schema=1, name="case", model=ModelSpec(name="params", shapes=((3,), (2, 2))),
        world=WorldSpec(size=3, order_known=False), run=RunSpec(steps=3),
        system=SystemSpec(stage=0), optimizer=OptimizerSpec(name="sgd", lr=0.1),
        data=DataSpec(nan=NanSpec(step=1, rank=1)),
    )  # fmt: skip
    NAMES = shown("targets.md", "SkippingTarget")

    def test_the_engine_is_right(self, pool):
        result = run_case(self.CASE, pool=pool, target=self.NAMES["SkippingTarget"]())
        assert (result.verdict, result.findings) == ("pass", ())

    def test_a_step_that_is_not_skipped_is_found(self, pool, monkeypatch):
        update = WholeParamEngine.update
        monkeypatch.setattr(self.NAMES["SkippingEngine"], "update", update)
        result = run_case(self.CASE, pool=pool, target=self.NAMES["SkippingTarget"]())
        assert result.verdict == "fail"

    def test_a_finite_step_that_is_skipped_is_found(self, pool, monkeypatch):
        monkeypatch.setattr(
            self.NAMES["SkippingEngine"], "update", lambda self: StepResult(skipped=True)
        )
        result = run_case(self.CASE, pool=pool, target=self.NAMES["SkippingTarget"]())
        assert checks(result)[0] == "equality.skipped"


LARGE = Scenario(
    schema=1, name="case", model=ModelSpec(name="params", shapes=((40, 20), (60, 10), (50, 10))),
    world=WorldSpec(size=3), run=RunSpec(steps=2),
    system=SystemSpec(stage=0, bucket_elems=1200), optimizer=OptimizerSpec(name="adamw"),
)  # fmt: skip


class TestBuckets:
    """Buckets of a size at most, in flight together, without control messages."""

    NAMES = shown("costs.md", "BucketsTarget")

    def judged(self, pool, *, most=None, **methods):
        names = self.NAMES
        engine = type("Engine", (names["BucketsEngine"],), methods)

        class Target(names["BucketsTarget"]):
            def build(self, module, *, scenario, group):
                optimizer = names["plain_optimizer"](
                    scenario.optimizer, dict(module.named_parameters())
                )
                bound = most or scenario.system.bucket_elems
                return engine(module, optimizer, group=group, most=bound)

        return run_case(LARGE, pool=pool, target=Target())

    def test_the_engine_is_right(self, pool):
        result = self.judged(pool)
        assert (result.verdict, result.findings) == ("pass", ())
        assert "calls of told buckets" not in result.unobserved

    def test_a_bucket_that_is_larger_is_found(self, pool):
        result = self.judged(pool, most=1450)
        assert checks(result) == ["invariant.volume"]
        assert "expected at most bucket_elems = 1200" in result.findings[0].message

    def test_a_bucket_that_is_reduced_twice_is_found(self, pool):
        engine = self.NAMES["BucketsEngine"]

        def reduce(self):
            dist.all_reduce(torch.zeros(800), group=self.group)
            engine.reduce(self)

        result = self.judged(pool, reduce=reduce)
        assert "1 x all_reduce of 800 elements too many" in result.findings[0].message

    def test_buckets_that_wait_for_each_other_are_found(self, pool):
        engine = self.NAMES["BucketsEngine"]

        def reduce(self):
            whole = self.buckets
            for self.buckets in [[each] for each in whole]:
                engine.reduce(self)
            self.buckets = whole

        result = self.judged(pool, reduce=reduce)
        assert checks(result) == ["invariant.overlap"]
        assert "at most 1 calls in flight" in result.findings[0].message

    def test_a_control_message_beyond_the_most_is_found(self, pool):
        def share(self):
            dist.all_reduce(torch.zeros(1), group=self.group)

        result = self.judged(pool, share=share)
        assert checks(result) == ["invariant.volume"]
        assert "1 control messages in the step, expected at most 0" in result.findings[0].message


class TestPerOwner:
    """Buckets of one owner each, which are reduced and gathered in one call."""

    NAMES = shown("costs.md", "PerOwnerTarget")
    CASE = replace(LARGE, system=SystemSpec(stage=1))

    def test_the_engine_is_right(self, pool):
        result = run_case(self.CASE, pool=pool, target=self.NAMES["PerOwnerTarget"]())
        assert (result.verdict, result.findings) == ("pass", ())
        assert "calls of told buckets" not in result.unobserved

    @pytest.mark.parametrize(("hook", "kind"), [("reduce", "reduce"), ("share", "broadcast")])
    def test_a_call_that_is_made_twice_is_found(self, pool, monkeypatch, hook, kind):
        engine = self.NAMES["PerOwnerEngine"]
        once = getattr(engine, hook)

        def twice(self):
            flat = torch.zeros(600)
            made = {"reduce": dist.reduce, "broadcast": dist.broadcast}[kind]
            made(flat, 1, group=self.group)
            once(self)

        monkeypatch.setattr(engine, hook, twice)
        result = run_case(self.CASE, pool=pool, target=self.NAMES["PerOwnerTarget"]())
        assert checks(result) == ["invariant.volume"]
        assert f"1 x {kind} of 600 elements too many" in result.findings[0].message


class TestCopies:
    """Sums over copies of a shard, in a dtype and in a tensor of their own."""

    NAMES = shown("targets.md", "CopiesTarget")

    def judged(self, pool, order, size=6, **numerics):
        case = replace(
            LARGE, world=WorldSpec(size=size, order=order),
            system=SystemSpec(stage=1, redundancy=size // 2),
            model=ModelSpec(name="params", shapes=((7, 5), (13,), (3, 11))),
        )  # fmt: skip
        target = self.NAMES["CopiesTarget"]()
        target.numerics = replace(target.numerics, **numerics)
        return run_case(case, pool=pool, target=target)

    @pytest.mark.parametrize("order", ["linear", "ring"])
    @pytest.mark.parametrize("size", [4, 6])
    def test_the_engine_is_right(self, pool, order, size):
        result = self.judged(pool, order, size)
        assert (result.verdict, result.findings) == ("pass", ())
        assert "reduced gradients" not in result.unobserved

    def test_another_dtype_is_found(self, pool):
        assert checks(self.judged(pool, "linear", copies_dtype=None))[0] == "equality.grad"

    def test_another_place_in_the_sum_is_found(self, pool, monkeypatch):
        engine = self.NAMES["CopiesEngine"]
        parts = engine.parts

        def shifted(self):
            for part in parts(self):
                elems, _ = part.place.copies_at
                place = replace(part.place, copies_at=(2 * elems, elems))
                yield replace(part, place=place)

        monkeypatch.setattr(engine, "parts", shifted)
        assert checks(self.judged(pool, "ring"))[0] == "equality.grad"


class TestUnsettled:
    """Steps that begin while params of the step before are in flight."""

    NAMES = shown("targets.md", "LateTarget")
    CASE = replace(
        LARGE, system=SystemSpec(stage=1), run=RunSpec(steps=4, micro_batches=2),
        optimizer=OptimizerSpec(lr=0.1),
    )  # fmt: skip

    def judged(self, pool, **world):
        case = replace(self.CASE, world=replace(self.CASE.world, **world))
        return run_case(case, pool=pool, target=self.NAMES["LateTarget"]())

    @pytest.mark.parametrize("world", [{}, {"timing": "hostile"}, {"order_known": False}], ids=str)
    def test_the_engine_is_right(self, pool, world):
        result = self.judged(pool, **world)
        assert (result.verdict, result.findings) == ("pass", ())

    @pytest.mark.parametrize("unsettled", [False, True])
    def test_a_forward_that_does_not_wait_is_found_where_nobody_settles(
        self, pool, monkeypatch, unsettled
    ):
        monkeypatch.setattr(
            self.NAMES["LateTarget"], "capabilities", Capabilities(
                stages=(1,), unsettled=unsettled, follows=("run.micro_batches",)
            )
        )  # fmt: skip
        monkeypatch.setattr(torch.nn.Module, "register_forward_pre_hook", lambda *_: None)
        result = self.judged(pool, timing="hostile")
        assert (result.verdict == "fail") == unsettled


class TestWhole:
    """Memory that is whole within a step, by a form of the target's own."""

    NAMES = shown("costs.md", "FreeingTarget")
    CASE = replace(LARGE, system=SystemSpec(stage=2))

    def test_the_engine_is_right(self, pool):
        result = run_case(self.CASE, pool=pool, target=self.NAMES["FreeingTarget"]())
        assert (result.verdict, result.findings) == ("pass", ())

    def test_gradients_that_stay_until_the_update_are_found(self, pool, monkeypatch):
        def finish(self):
            (_, param, work), self.in_flight = self.in_flight or (0, 0, 0), None
            if work:
                work.wait()
                param.grad /= self.group.size()

        monkeypatch.setattr(self.NAMES["FreeingEngine"], "finish", finish)
        result = run_case(self.CASE, pool=pool, target=self.NAMES["FreeingTarget"]())
        assert set(checks(result)) == {"invariant.memory"}
        assert "bytes of whole gradients as the gradient of" in result.findings[0].message

    def test_an_engine_that_does_not_tell_is_an_error(self, pool, monkeypatch):
        held = {"held_bytes": lambda self: {}}
        monkeypatch.setitem(self.NAMES, "FreeingEngine", type("Held", (WholeParamEngine,), held))
        result = run_case(self.CASE, pool=pool, target=self.NAMES["FreeingTarget"]())
        assert result.verdict == "error"
        assert "expected whole_bytes() of the engine" in result.error
