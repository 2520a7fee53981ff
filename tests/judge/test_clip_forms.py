"""Known forms of clipping pass if declared, and are named in the finding otherwise."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from zero_sim import run_case
from zero_sim.judge.rules_tried import RulesTried, rules_together
from zero_sim.reference import CLIP_FORMS
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import Capabilities, Numerics, StepResult
from zero_sim.zero import optimizer


def min_1(number):
    return min(1.0, number)


def fp32(number):
    return torch.tensor(number, dtype=torch.float32)


# Code of each form, from the 0-D fp32 norm, the fp64 root and the bound.
ENGINES = {
    "fp32-division": lambda norm, root, c: (fp32(c) / (norm + 1e-6)).clamp(max=1),
    "fp32-reciprocal": lambda norm, root, c: torch.clamp(c / (norm + 1e-6), max=1.0),
    "fp32-inverse": lambda norm, root, c: 1.0 / torch.clamp((norm + 1e-6) / c, min=1),
    "fp64-division": lambda norm, root, c: min_1(c / (norm.item() + 1e-6)),
    "fp64-inverse": lambda norm, root, c: min_1(1.0 / ((norm.item() + 1e-6) / c)),
    "fp64-root-division": lambda norm, root, c: min_1(c / (root + 1e-6)),
    "fp64-root-inverse": lambda norm, root, c: min_1(1.0 / ((root + 1e-6) / c)),
    "fp32-division-without-eps": lambda norm, root, c: (fp32(c) / norm).clamp(max=1),
    "fp32-reciprocal-without-eps": lambda norm, root, c: torch.clamp(c / norm, max=1.0),
    "fp32-inverse-without-eps": lambda norm, root, c: 1.0 / torch.clamp(norm / c, min=1),
    "fp64-division-without-eps": lambda norm, root, c: min_1(c / norm.item()),
    "fp64-inverse-without-eps": lambda norm, root, c: min_1(1.0 / (norm.item() / c)),
    "fp64-root-division-without-eps": lambda norm, root, c: min_1(c / root),
    "fp64-root-inverse-without-eps": lambda norm, root, c: min_1(1.0 / (root / c)),
}
QUOTIENTS = {
    "fp32-quotient": lambda norm, root, c: torch.clamp((norm + 1e-6) / c, min=1),
    "fp32-quotient-without-eps": lambda norm, root, c: torch.clamp(norm / c, min=1),
    "of no library": lambda norm, root, c: torch.clamp((norm + 1e-3) / c, min=1),
}


class Engine:
    """All-reduce, divide, clip, Adam on whole params."""

    def __init__(self, module, scenario, group, form):
        self.module, self.group, self.form = module, group, form
        self.norm_max = scenario.optimizer.clip_norm
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=scenario.optimizer.lr, weight_decay=0.0, foreach=False
        )

    def zero_grad(self):
        self.optimizer.zero_grad()

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        grads = [param.grad for param in self.module.parameters()]
        for grad in grads:
            dist.all_reduce(grad, group=self.group)
            grad /= self.group.size()
        root = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
        norm = fp32(root)
        for grad in grads:
            if self.form in QUOTIENTS:
                grad.div_(QUOTIENTS[self.form](norm, root, self.norm_max))
            else:
                grad.mul_(ENGINES[self.form](norm, root, self.norm_max))
        self.optimizer.step()
        return StepResult(norm=norm)

    def params(self):
        return dict(self.module.named_parameters())


class Target:
    name = "clips"
    capabilities = Capabilities(stages=(0, 1), follows=("optimizer.clip_norm",))

    def __init__(self, form, *, declared="fp32-division"):
        self.form, self.numerics = form, Numerics(clip=declared)

    def build(self, module, *, scenario, group):
        return Engine(module, scenario, group, self.form)


# With this seed, every form but the default gives other bits than the default within six steps.
CASE = Scenario(
    schema=1,
    name="clipped",
    model=ModelSpec(name="mlp", hidden=3, blocks=1),
    world=WorldSpec(size=2),
    optimizer=OptimizerSpec(clip_norm=0.01, lr=0.1),
    run=RunSpec(steps=6, seed=2),
)
OTHERS = [form for form in CLIP_FORMS if form != "fp32-division"]


def test_every_form_has_an_engine():
    assert {*ENGINES, *QUOTIENTS} == {*CLIP_FORMS, "of no library"}


@pytest.mark.parametrize("form", CLIP_FORMS)
def test_declared_form_passes(pool, form):
    result = run_case(CASE, pool=pool, target=Target(form, declared=form))
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


@pytest.mark.parametrize("form", OTHERS)
def test_undeclared_form_is_named_in_the_finding(pool, form):
    result = run_case(CASE, pool=pool, target=Target(form))
    assert result.verdict == "fail"
    said, advice = result.findings[0].detail.splitlines()[-2:]
    assert said.startswith("the reference computed the update with clip = 'fp32-division'; ")
    assert repr(form) in said.partition("these are the bits of")[2]
    assert advice.startswith("If ")


def test_default_form_is_named_if_another_is_declared(pool):
    result = run_case(CASE, pool=pool, target=Target("fp32-division", declared="fp32-quotient"))
    said, advice = result.findings[0].detail.splitlines()[-2:]
    assert "these are the bits of clip = 'fp32-division'" in said
    assert advice == "If one of these is intended, declare Numerics(clip='fp32-division')"


def test_unknown_form_matches_no_rule(pool):
    result = run_case(CASE, pool=pool, target=Target("of no library"))
    said = "\n".join(result.findings[0].detail.splitlines()[-2:])
    assert "other known rules gives all the bits that the system has" in said


def test_wrong_gradient_does_not_mention_clipping(pool):
    class Undivided(Engine):
        def backward(self, loss, *, last_micro, rows):
            (loss * 2).backward()

    class RankDigests(Target):
        numerics = Numerics(grads_in_params=True, reported_grads="after-division")

        def build(self, module, *, scenario, group):
            return Undivided(module, scenario, group, "fp32-quotient")

    result = run_case(CASE, pool=pool, target=RankDigests("fp32-quotient"))
    assert result.findings
    assert not any("clip" in finding.detail for finding in result.findings)


@pytest.mark.parametrize("model", ["mlp", "fp8", "moe"])
@pytest.mark.parametrize("bucket_elems", [None, 40])
def test_forms_are_recognized_in_parts_and_other_dtypes(pool, monkeypatch, model, bucket_elems):
    """In zero_sim's own system, whose params may arrive during the next forward."""
    monkeypatch.setattr(optimizer, "clip_by_norm_", clip_by_quotient_)
    case = replace(
        CASE,
        model=ModelSpec(name=model, hidden=4, dtype="bf16" if model == "mlp" else "fp32"),
        system=SystemSpec(bucket_elems=bucket_elems),
    )
    result = run_case(case, pool=pool)
    assert result.findings[0].check in ("equality.master", "equality.state")
    assert "'fp32-quotient'" in result.findings[0].detail.splitlines()[-2]


def clip_by_quotient_(grads, *, norm, max_norm):
    for grad in grads:
        grad.div_(QUOTIENTS["fp32-quotient"](norm, None, max_norm))


def test_rules_of_several_judges_are_intersected():
    one = RulesTried(assumed="clip = 'a'", tried=3, fitting=("clip = 'b'", "clip = 'c'"))
    two = replace(one, fitting=("clip = 'c'", "clip = 'd'"))
    assert rules_together([one, two]).fitting == ("clip = 'c'",)
    assert rules_together([one, None]).fitting == ()
    assert rules_together([None]) is None
    blind = replace(one, blind="No rule is proposed")
    assert rules_together([blind, two]).blind == ""


class OfRows(Engine):
    """Norms of rows per rank; tensors without rows belong to the first rank."""

    def step(self, *, lr_factor):
        group, size = self.group, self.group.size()
        grads = [param.grad for param in self.module.parameters()]
        norms = []
        for grad in grads:
            dist.all_reduce(grad, group=group)
            grad /= size
            chunks = torch.atleast_1d(grad).chunk(size)
            mine = chunks[group.rank()] if group.rank() < len(chunks) else grad.new_empty(0)
            norms.append(torch.linalg.vector_norm(mine))
        squares = torch.stack(norms).square()
        dist.all_reduce(squares, group=group)
        norm = torch.linalg.vector_norm(squares.sqrt())
        for grad in grads:
            grad.mul_(torch.clamp(self.norm_max / (norm + 1e-6), max=1.0))
        self.optimizer.step()
        return StepResult(norm=norm)


@pytest.mark.parametrize("shapes", [((), (3, 2), ()), ((0,), (5,), (2, 0), (1,))])
def test_norm_of_rows_accepts_params_without_rows(pool, shapes):
    target = Target("fp32-reciprocal")
    target.numerics = Numerics(norm="of-rows", clip="fp32-reciprocal")
    target.build = lambda module, *, scenario, group: OfRows(module, scenario, group, None)
    case = replace(CASE, model=ModelSpec(name="params", shapes=shapes), world=WorldSpec(size=3))
    result = run_case(case, pool=pool, target=target)
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def test_many_fitting_rules_warn_of_a_fault():
    """One step of Adam hides most of a gradient, so a wrong gradient fits many rules."""
    fitting = ("divide = 'none'", "divide = 'pre'", "reduce_dtype = 'fp16'")
    many, few = (
        RulesTried(assumed="divide = 'post'", tried=9, fitting=fitting[:count]).in_words()
        for count in (3, 2)
    )
    assert "a fault may have these bits as well: `zero-sim rules`" in many
    assert "a fault may" not in few
