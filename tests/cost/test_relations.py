"""Relations that every system of a stage satisfies: they find excess without declared costs."""

import pytest
import torch
import torch.distributed as dist

from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.mutants import find_mutants
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import Capabilities, Costs, find_target
from zero_sim.targets.own import ZeroSimTarget

RANKS = 2
WIDE = ModelSpec(name="params", shapes=((40, 100),))
"""4,000 elements, more than all padding that two ranks may add."""


class Sharded:
    """ZeRO-1 of a single param, half on each rank, without declared costs."""

    def __init__(self, module, scenario, group):
        self.module, self.group = module, group
        (self.param,) = module.parameters()
        self.half = self.param.numel() // RANKS
        start = dist.get_rank(group) * self.half
        self.master = self.param.detach().reshape(-1)[start : start + self.half].float()
        self.optimizer = torch.optim.SGD([self.master], lr=scenario.optimizer.lr, foreach=False)

    def zero_grad(self):
        self.param.grad = None

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def reduce(self, output, flat):
        dist.reduce_scatter_tensor(output, flat, group=self.group)

    def gather(self, whole, part):
        dist.all_gather_into_tensor(whole, part, group=self.group)

    def step(self, *, lr_factor):
        grad = torch.empty(self.half, dtype=self.param.dtype)
        self.reduce(grad, self.param.grad.reshape(-1))
        self.master.grad = grad.float() / RANKS
        self.optimizer.step()
        self.gather(self.param.data.view(-1), self.master.to(self.param.dtype))

    def params(self):
        return dict(self.module.named_parameters())


class ReducedTwice(Sharded):
    """Engine that reduces once more and drops the result."""

    def reduce(self, output, flat):
        super().reduce(torch.empty_like(output), flat)
        super().reduce(output, flat)


class GatheredEveryTime(Sharded):
    """Engine that gathers the same params four times."""

    def gather(self, whole, part):
        for _ in range(4):
            super().gather(whole, part)


class GatheredWide(Sharded):
    """Engine that gathers masters in fp32 and casts the result."""

    def gather(self, whole, part):
        wide = torch.empty(whole.shape)
        super().gather(wide, self.master)
        whole.copy_(wide)


class SentAFlag(Sharded):
    """Engine that sends a few more numbers, as a control message."""

    def reduce(self, output, flat):
        for _ in range(3):
            dist.all_reduce(torch.ones(20), group=self.group)
        super().reduce(output, flat)


class Target:
    name = "sharded"
    capabilities = Capabilities(stages=(1,), dtypes=("fp32", "bf16"), optimizers=("sgd",))

    def __init__(self, engine, costs=None):
        self.engine, self.costs = engine, costs

    def build(self, module, *, scenario, group):
        return self.engine(module, scenario, group)


@pytest.fixture(scope="module", autouse=True)
def plain_names():
    with pytest.MonkeyPatch.context() as patch:
        # torch 2.13 warns about the names of 2.11.
        for old, new in (("reduce_scatter_tensor", "reduce_scatter_single"),
                         ("all_gather_into_tensor", "all_gather_single")):  # fmt: skip
            if hasattr(dist, new):
                patch.setattr(dist, old, getattr(dist, new))
        yield


@pytest.fixture(scope="module")
def pool():
    with WorldPool() as worlds:
        yield worlds


def judged(pool, target, model=WIDE, **parts):
    scenario = Scenario(
        schema=1, name="case", model=model, world=WorldSpec(size=RANKS),
        optimizer=OptimizerSpec(name="sgd"), run=RunSpec(steps=2), **parts,
    )  # fmt: skip
    return run_case(scenario, pool=pool, target=target)


def test_minimal_system_passes(pool):
    result = judged(pool, Target(Sharded))
    assert (result.verdict, result.findings) == ("pass", ())


def test_control_messages_are_accepted(pool):
    assert judged(pool, Target(SentAFlag)).verdict == "pass"


def test_double_reduction_is_found(pool):
    (finding,) = judged(pool, Target(ReducedTwice)).findings
    assert (finding.check, finding.step) == ("invariant.volume", 0)
    assert "8000 elements summed over ranks, expected at most" in finding.message


def test_excessive_gathers_are_found(pool):
    (finding,) = judged(pool, Target(GatheredEveryTime)).findings
    assert "16000 elements gathered, expected at most" in finding.message


def test_gather_in_a_wider_dtype_is_found_only_in_bf16(pool):
    assert judged(pool, Target(GatheredWide)).verdict == "pass"
    bf16 = ModelSpec(name="params", shapes=((40, 100),), dtype="bf16")
    (finding,) = judged(pool, Target(GatheredWide), model=bf16).findings
    assert "gathers 4 bytes per element, expected at most 2" in finding.message


def test_target_declares_fewer_gathers(pool):
    class Twice(Sharded):
        def gather(self, whole, part):
            super().gather(whole, part)
            super().gather(whole, part)

    assert judged(pool, Target(Twice)).verdict == "pass"
    (finding,) = judged(pool, Target(Twice, Costs(gathers=1))).findings
    assert "gathered at most 1 times" in finding.message


def test_undeclared_costs_are_unobserved(pool):
    silent = judged(pool, Target(Sharded)).unobserved
    for what in ("calls", "bytes moved", "bytes held", "what is in flight"):
        assert f"closed form of {what}" in silent
    own = run_case(
        Scenario(schema=1, model=ModelSpec(name="mlp"), world=WorldSpec(size=2)), pool=pool
    )
    assert not [what for what in own.unobserved if "form" in what or "relations" in what]


class BytesAlone(ZeroSimTarget):
    """The project's own system with only its bytes declared."""

    costs = Costs(volume="textbook")


class Relaxed(ZeroSimTarget):
    """The project's own system without declared costs."""

    costs = Costs()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ({}, 2),
        ({"align_elems": 64, "bucket_elems": 300}, 3),
        ({"sync": "every"}, 3),
        ({"redundancy": 2}, 4),
        ({"sum_by": "first-rank"}, 2),
    ],
)
def test_own_system_passes_at_all_stages(pool, stage, parts, size):
    if stage == 0 and {"redundancy", "align_elems"} & {*parts}:
        parts = {}
    if stage != 1 and "sum_by" in parts:
        parts = {}
    scenario = Scenario(
        schema=1, model=ModelSpec(name="mlp", hidden=48), world=WorldSpec(size=size),
        system=SystemSpec(stage=stage, **parts), run=RunSpec(steps=2, micro_batches=2),
        optimizer=OptimizerSpec(clip_norm=1.0),
    )  # fmt: skip
    result = run_case(scenario, pool=pool, target=Relaxed())
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize(
    "system",
    [SystemSpec(sum_by="first-rank", grad_dtype="fp32", align_elems=64),
     SystemSpec(align_elems=2, align_bytes=127)],
    ids=["sums of fp32 that the first rank sends back", "alignment beyond the usual"],
)  # fmt: skip
def test_costs_required_by_the_case_are_accepted(pool, system):
    scenario = Scenario(
        schema=1, model=ModelSpec(name="params", shapes=((1,),), dtype="bf16"),
        world=WorldSpec(size=2), system=system,
    )  # fmt: skip
    result = run_case(scenario, pool=pool, target=Relaxed())
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize(
    ("name", "stages"),
    [("torch-ddp", (0,)), ("torch-fsdp1", (0, 2, 3)), ("torch-fsdp2", (1,)),
     ("torch-zero-redundancy", (1,))],
)  # fmt: skip
def test_torch_systems_pass(pool, name, stages):
    for stage in stages:
        scenario = Scenario(
            schema=1, model=ModelSpec(name="mlp", hidden=48), world=WorldSpec(size=3),
            system=SystemSpec(target=name, stage=stage), run=RunSpec(steps=3, micro_batches=2),
        )  # fmt: skip
        result = run_case(scenario, pool=pool, target=find_target(name))
        assert (result.verdict, result.findings) == ("pass", ())


def test_own_system_that_gathers_in_fp32_is_found(pool):
    (mutant,) = find_mutants(["V15"])
    scenario = Scenario(
        schema=1, model=ModelSpec(name="params", shapes=((40, 100),), dtype="bf16"),
        world=WorldSpec(size=2),
    )  # fmt: skip
    with mutant.apply() as patches:
        found = [run_case(scenario, pool=pool, target=each()).findings
                 for each in (BytesAlone, Relaxed)]  # fmt: skip
    assert patches.armed
    assert "8000 of float32 in place of 0" in found[0][0].message
    assert "gathers 4 bytes per element" in found[1][0].message
