"""Each declarable rule passes if it is declared, and fails if another one is."""

import dataclasses
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.judge.ruled import Engine, Target, fp32
from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.targets import Numerics, find_target

BF16, FP32 = torch.bfloat16, torch.float32
CASE = Scenario(
    schema=1,
    name="ruled",
    model=ModelSpec(name="mlp", hidden=3, blocks=1),
    world=WorldSpec(size=3),
    system=SystemSpec(stage=0),
    run=RunSpec(steps=2, micro_batches=3),
)
NARROW = replace(CASE, model=replace(CASE.model, dtype="bf16"))
CLIPPED = replace(CASE, optimizer=OptimizerSpec(clip_norm=0.01))
UNUSED = replace(CASE, model=ModelSpec(name="unusual"), optimizer=OptimizerSpec(weight_decay=0.1))
UNEVEN = replace(NARROW, data=DataSpec(rows=2, uneven_rows=True, loss="sum"))
OVERFLOW = replace(CASE, data=DataSpec(nan=NanSpec(step=0, rank=1)))
BLOCKS = replace(CASE, world=WorldSpec(size=4), system=SystemSpec(stage=1, redundancy=2))
SECOND = replace(
    CASE,
    model=ModelSpec(name="multi-token", hidden=2),
    topology=TopologySpec(cp=3),
    run=RunSpec(steps=2),
)
NARROW_BLOCKS = replace(BLOCKS, model=NARROW.model)


def norm_of_own(engine, wide):
    """Norm of this rank's norms, as in fairscale's OSS."""
    own = [torch.linalg.vector_norm(wide[name]) for name in engine.owned()]
    squares = torch.linalg.vector_norm(torch.stack(own)) ** 2 if own else fp32(0.0)
    dist.all_reduce(squares, group=engine.group)
    return squares.sqrt()


def norm_of_shard(engine, wide):
    """Norm of the unsharded shard in fp32."""
    own = torch.cat([wide[name].reshape(-1) for name in engine.owned()])
    squares = torch.linalg.vector_norm(own).square()
    dist.all_reduce(squares, group=engine.group)
    return squares.sqrt()


def norm_of_squares(engine, wide):
    """Root of the squares of all shards, added without a norm."""
    own = torch.cat([wide[name].reshape(-1) for name in engine.owned()])
    squares = own.square().sum()
    dist.all_reduce(squares, group=engine.group)
    return squares.sqrt()


def norm_of_nobody(engine, wide):
    """Norm by a rule of its own."""
    return fp32(sum(float(grad.abs().sum()) for grad in wide.values()))


def own_clip(norm, bound):
    return 1.0 / (1.0 + norm / bound)


def a_quarter(at):
    return 1 / 4


def half_of_cp(at):
    return at.cp / 2


def by_own_rows(at):
    """1 / rows, which has no named rule."""
    return 1 / at.rows


# Name: (case, deviation of the system, declaration, further capabilities).
RULES = {
    "losses over micro-batches": (
        CASE,
        {"scale": lambda engine, rows: 1 / 3},
        Numerics(scale_loss="micro-batches"),
        {},
    ),
    "losses over tokens": (
        UNEVEN,
        {"scale": lambda engine, rows: engine.size / engine.step_rows},
        Numerics(scale_loss="tokens"),
        {},
    ),
    "losses by a function": (
        UNEVEN,
        {"scale": lambda engine, rows: 1 / rows},
        Numerics(scale_loss=by_own_rows),
        {},
    ),
    "losses over context-parallel ranks": (
        SECOND,
        {"scale": lambda engine, rows: 1 / 3},
        Numerics(scale_loss="1/cp"),
        {},
    ),
    "a second loss over context-parallel ranks": (
        SECOND,
        {"second": lambda engine: 1 / engine.cp},
        Numerics(scale_second="1/cp"),
        {},
    ),
    "a second loss times context-parallel ranks": (
        replace(SECOND, run=RunSpec(steps=2, micro_batches=2)),
        {"second": lambda engine: engine.cp},
        Numerics(scale_second="cp"),
        {},
    ),
    "each loss by a function": (
        SECOND,
        {"scale": lambda engine, rows: 1 / 4, "second": lambda engine: 6.0},
        Numerics(scale_loss=a_quarter, scale_second=half_of_cp),
        {},
    ),
    "pre": (NARROW, {"divide": "pre"}, Numerics(divide="pre"), {}),
    "premul": (NARROW, {"divide": "premul"}, Numerics(divide="premul"), {}),
    "premul by an fp32 scalar": (
        NARROW,
        {"divide": "premul-fp32"},
        Numerics(divide="premul-fp32"),
        {},
    ),
    "in the sum's dtype": (
        NARROW,
        {"divide": "post-rounded"},
        Numerics(divide="post-rounded"),
        {},
    ),
    "avg": (NARROW, {"divide": "post-rounded"}, Numerics(divide="avg"), {}),
    "times the reciprocal": (CASE, {"divide": "postmul"}, Numerics(divide="postmul"), {}),
    "times the reciprocal, rounded": (
        NARROW,
        {"divide": "postmul-rounded"},
        Numerics(divide="postmul-rounded"),
        {},
    ),
    "a free factor": (CASE, {"by": 7.0}, Numerics(divide_by=7.0), {}),
    "before and after": (
        NARROW,
        {"divide": "post-rounded", "predivide": 1.5},
        Numerics(divide="post-rounded", predivide_by=1.5),
        {},
    ),
    "before and after, as products": (
        NARROW,
        {"divide": "postmul-rounded", "predivide": 1.7},
        Numerics(divide="postmul-rounded", predivide_by=1.7),
        {},
    ),
    "every micro-batch": (NARROW, {"sync": "every"}, Numerics(sync="every"), {}),
    "every micro-batch divided": (
        NARROW,
        {"sync": "every", "divide": "post-rounded", "each": "round"},
        Numerics(sync="every", divide="post-rounded", divide_each="round"),
        {},
    ),
    "accumulated in fp32": (
        NARROW,
        {"accumulate": FP32, "reduce": BF16},
        Numerics(accumulate_dtype="fp32"),
        {},
    ),
    "reduced in fp32": (
        NARROW,
        {"reduce": FP32},
        Numerics(reduce_dtype="fp32"),
        {},
    ),
    "a narrow wire": (CASE, {"reduce": BF16}, Numerics(reduce_dtype="bf16"), {}),
    "narrow sums added in fp32": (
        NARROW,
        {"sync": "every", "sum": FP32},
        Numerics(sync="every", accumulate_dtype="fp32"),
        {},
    ),
    "told after the division": (
        NARROW,
        {"told": "after-division"},
        Numerics(reported_grads="after-division"),
        {},
    ),
    "told after it in fp32": (
        NARROW,
        {"told": "after-division", "told in": FP32},
        Numerics(reported_grads="after-division", reported_dtype="fp32"),
        {},
    ),
    "told in fp32": (NARROW, {"told in": FP32}, Numerics(reported_dtype="fp32"), {}),
    "told after the clip": (
        CLIPPED,
        {"told": "after-clip"},
        Numerics(reported_grads="after-clip"),
        {},
    ),
    "norm of own params": (
        CLIPPED,
        {"norm": norm_of_own, "shards": True},
        Numerics(norm="of-own-params"),
        {"stages": (1,)},
    ),
    "norm of shards": (
        CLIPPED,
        {"norm": norm_of_shard, "shards": True},
        Numerics(norm="of-shards"),
        {"stages": (1,)},
    ),
    "norm of squares": (
        CLIPPED,
        {"norm": norm_of_squares, "shards": True},
        Numerics(norm="of-squares"),
        {"stages": (1,)},
    ),
    "a norm of nobody's": (CLIPPED, {"norm": norm_of_nobody}, Numerics(norm="reported"), {}),
    "a clip of its own": (CLIPPED, {"clip": own_clip}, Numerics(clip=own_clip), {}),
    "unused params left alone": (
        UNUSED,
        {"leaves unused": True},
        Numerics(unused="left-alone"),
        {},
    ),
    "over copies in fp32": (
        NARROW_BLOCKS,
        {"copies": FP32},
        Numerics(replica_dtype="fp32"),
        {"stages": (1,)},
    ),
    "over copies in fp32, every micro-batch": (
        NARROW_BLOCKS,
        {"copies": FP32, "sum": FP32, "sync": "every"},
        Numerics(replica_dtype="fp32", accumulate_dtype="fp32", sync="every"),
        {"stages": (1,)},
    ),
    "over copies in fp32 at last": (
        NARROW_BLOCKS,
        {"copies": FP32, "sync": "every-in-block"},
        Numerics(replica_dtype="fp32", sync="every-in-block"),
        {"stages": (1,)},
    ),
    "a narrow wire between copies": (
        BLOCKS,
        {"copies": BF16},
        Numerics(replica_dtype="bf16"),
        {"stages": (1,)},
    ),
    "scatters every round": (
        BLOCKS,
        {"sync": "every-in-block"},
        Numerics(sync="every-in-block"),
        {"stages": (1,)},
    ),
}


NOT_KNOWN = {
    "a free factor", "before and after", "before and after, as products", "a norm of nobody's",
    "a clip of its own", "losses by a function", "each loss by a function",
    "over copies in fp32, every micro-batch",
}  # fmt: skip
"""Rules without a name: the finding proposes no declaration."""
SAID = {
    "avg": ["divide='post-rounded'"],
    # With three ranks, both round alike.
    "premul by an fp32 scalar": ["divide='pre' or 'premul-fp32'"],
    # The division of each round rounds to the sum's dtype anyway.
    "every micro-batch divided": ["sync='every'", "divide_each='round'"],
}


def said_by(declared):
    """Non-default fields of a declaration, as written in code."""
    plain = Numerics()
    fields = [field.name for field in dataclasses.fields(plain)]
    return [
        f"{name}={getattr(declared, name)!r}"
        for name in fields
        if getattr(declared, name) != getattr(plain, name)
    ]


def hint_of(result):
    return result.findings[0].detail.replace(" = ", "=")


@pytest.fixture(scope="module")
def pool():
    with WorldPool() as worlds:
        yield worlds


def staged(case, able):
    return replace(case, system=replace(case.system, stage=able.get("stages", (0,))[0]))


@pytest.mark.parametrize("rule", RULES)
def test_rule_passes_if_declared_and_fails_otherwise(pool, rule):
    case, does, declared, able = RULES[rule]
    case = staged(case, able)
    right = run_case(case, pool=pool, target=Target(does, declared, **able))
    assert right.verdict == "pass", right.findings or right
    # If `reported_grads` is not declared, the judge would infer it.
    plain = Numerics(reported_grads="before-division")
    # Two roundings of one norm may agree, depending on the machine, so try several seeds.
    for seed in range(8):
        case = replace(case, run=replace(case.run, seed=seed))
        wrong = run_case(case, pool=pool, target=Target(does, plain, **able))
        if wrong.verdict != "pass":
            break
    assert wrong.verdict == "fail", wrong
    named = hint_of(wrong)
    if rule in NOT_KNOWN:
        assert "declare" not in named
    else:
        assert all(each in named for each in SAID.get(rule, said_by(declared))), named


def test_skipped_step_needs_no_loss_scale(pool):
    skips, declared = {"skips": True}, Numerics(nonfinite="skipped")
    result = run_case(OVERFLOW, pool=pool, target=Target(skips, declared))
    assert result.verdict == "pass", result.findings or result
    never = run_case(OVERFLOW, pool=pool, target=Target({}, declared))
    assert never.findings[0].check == "equality.skipped"


@pytest.mark.parametrize("declared", ["tokens", "micro-batches"])
def test_losses_divided_by_micro_batch_rows_are_a_wrong_mean(pool, declared):
    """Micro-batches with few rows would weigh as much as those with many."""
    target = Target({"scale": lambda engine, rows: 1 / rows / 3}, Numerics(scale_loss=declared))
    wrong = run_case(UNEVEN, pool=pool, target=target)
    assert wrong.findings[0].check == "equality.grad"


def raises_if_nonfinite(rank, *, finite):
    return not finite


RAISES = Numerics(nonfinite="raises")


@pytest.mark.parametrize("case", [OVERFLOW, CASE, replace(CLIPPED, data=OVERFLOW.data)])
def test_declared_raise_on_a_nonfinite_step_passes(pool, case):
    does = {"raises": raises_if_nonfinite, "tells no norm": True}
    result = run_case(case, pool=pool, target=Target(does, RAISES))
    assert (result.verdict, result.findings) == ("pass", ())
    assert "skipped" not in result.unobserved


@pytest.mark.parametrize(
    ("case", "raises", "rank", "said"),
    [
        (OVERFLOW, lambda rank, *, finite: False, 0, "expected step() to raise on a gradient"),
        (
            OVERFLOW,
            lambda rank, *, finite: not finite and rank != 1,
            1,
            "expected step() to raise on",
        ),
        (CASE, lambda rank, *, finite: rank == 2, 2, "expected step() to return, because every"),
    ],
)
def test_rank_that_raises_or_returns_wrongly_is_named(pool, case, raises, rank, said):
    found = run_case(case, pool=pool, target=Target({"raises": raises}, RAISES)).findings[0]
    assert (found.check, found.rank) == ("equality.skipped", rank)
    assert found.message.startswith(said)


def test_rank_that_raises_alone_before_a_collective_fails(pool):
    """The other ranks wait in it for a call of the next step."""

    class Early(Engine):
        def step(self, *, lr_factor):
            if not bool(self.loss.isfinite()):
                raise RuntimeError("not finite")
            dist.all_reduce(torch.zeros(1))
            return super().step(lr_factor=lr_factor)

        def backward(self, loss, *, last_micro, rows):
            self.loss = loss.detach()
            super().backward(loss, last_micro=last_micro, rows=rows)

    target = Target({"raises": raises_if_nonfinite}, RAISES)
    target.build = lambda module, *, scenario, group: Early(module, scenario, group, target.does)
    case = replace(OVERFLOW, run=RunSpec(steps=2))
    result = run_case(case, pool=pool, target=target)
    assert result.verdict == "fail"
    assert result.findings[0].check.startswith("world.")


def test_error_of_another_kind_fails(pool):
    def broken(rank, *, finite):
        raise KeyError("a bug")

    result = run_case(OVERFLOW, pool=pool, target=Target({"raises": broken}, RAISES))
    assert result.verdict == "fail"
    assert "KeyError" in result.findings[0].message


def test_factor_that_is_not_a_number_is_refused(pool):
    declared = Numerics(scale_loss=lambda at: None)
    result = run_case(CASE, pool=pool, target=Target({}, declared))
    assert result.verdict == "error"
    assert "Numerics.scale_loss to return a finite number, got None" in result.error


def test_masters_are_compared_without_gradients(pool):
    silent = Target({"told": "not"})
    result = run_case(CASE, pool=pool, target=silent)
    assert result.verdict == "pass"
    assert "reduced gradients" in result.unobserved
    off = Target({"told": "not", "by": 2, "tells no norm": True})
    wrong = run_case(CASE, pool=pool, target=off)
    assert wrong.findings[0].check in ("equality.master", "equality.state")
    assert "declare" not in hint_of(wrong)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ({"divide": "premul"}, "divide='premul'"),
        ({"by": 9.0}, "divide_by='micro-batches'"),
        ({"sync": "every"}, "sync='every'"),
    ],
)
def test_gradient_rules_explain_updates_without_gradients(pool, does, said):
    silent = {**does, "told": "not", "tells no norm": True}
    result = run_case(NARROW, pool=pool, target=Target(silent))
    assert result.findings[0].check in ("equality.master", "equality.state")
    assert said in hint_of(result)


def test_two_rules_at_once_are_named(pool):
    result = run_case(NARROW, pool=pool, target=Target({"divide": "premul", "by": 9.0}))
    assert "declare Numerics(divide='premul', divide_by='micro-batches')" in hint_of(result)


def test_gradient_without_a_fitting_rule_has_no_proposal(pool):
    result = run_case(CASE, pool=pool, target=Target({"divide": "pre", "by": 7.5}))
    assert result.findings[0].check == "equality.grad"
    assert "known rule" not in hint_of(result)


def test_single_unreported_gradient_is_missing(pool, monkeypatch):
    told = Target()
    build = told.build

    def forgetful(module, *, scenario, group):
        engine = build(module, scenario=scenario, group=group)
        parts = engine.parts

        def without_first():
            for index, part in enumerate(parts()):
                yield part if index else replace(part, grad=None)

        engine.parts = without_first
        return engine

    monkeypatch.setattr(told, "build", forgetful)
    found = run_case(CASE, pool=pool, target=told).findings[0]
    assert (found.check, "no gradient" in found.message) == ("equality.grad", True)


def test_numerics_may_be_a_function_of_the_case(pool):
    does = {"divide": "premul-fp32"}

    class ByDtype(Target):
        def __init__(self):
            super().__init__(does)
            self.numerics = self.rules

        def rules(self, scenario):
            narrow = scenario.model.dtype == "bf16"
            return Numerics(divide="premul-fp32" if narrow else "premul")

    for case in (CASE, NARROW):
        assert run_case(case, pool=pool, target=ByDtype()).verdict == "pass"


@pytest.mark.parametrize("order", ["ring", "random-tree"])
def test_wrong_norm_is_explained_in_position_dependent_orders(pool, order):
    """Positions are reported here; norms of shards could then not be computed."""

    class Declared:
        name, capabilities = "zero_sim", None
        numerics = Numerics(norm="of-params")

        def build(self, module, *, scenario, group):
            return find_target("zero_sim").build(module, scenario=scenario, group=group)

    case = replace(CLIPPED, world=WorldSpec(size=3, order=order), system=SystemSpec())
    found = [
        run_case(replace(case, run=RunSpec(steps=1, seed=seed)), pool=pool, target=Declared())
        for seed in range(4)
    ]
    assert {result.verdict for result in found} <= {"pass", "fail"}
    hints = [hint_of(result) for result in found if result.verdict == "fail"]
    assert any("declare Numerics(norm='of-elements')" in hint for hint in hints)


def test_norms_of_shards_need_an_order_without_positions():
    case = replace(CASE, world=WorldSpec(size=3, order="ring"))
    problems = list(Numerics(norm="of-shards").problems(case))
    assert [problem.path for problem in problems] == ["world.order"]
    assert list(Numerics(norm="of-shards").problems(CASE)) == []
