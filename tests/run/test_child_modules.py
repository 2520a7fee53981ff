"""Bare params in child modules: tied siblings, skipped modules, params of one rank."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.run.summing import CASE, Engine
from zero_sim import run_case
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    ModelSpec,
    OneRankSpec,
    RunSpec,
    SkipSpec,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import Capabilities, Numerics

BARE = ModelSpec(name="params", shapes=((3,), (5,), (4,)))
TIED = replace(BARE, tied=("p0",))
ONE = replace(BARE, one_rank=(OneRankSpec(param="p1", rank=1),))
SKIP = replace(BARE, skip=(SkipSpec(param="p1", start=1, stop=2),))
MODELS = {
    "plain": replace(BARE, nested=True),
    "tied": replace(TIED, nested=True),
    "tied, second names first": replace(TIED, nested=True, tied_first=True),
    "one rank": replace(ONE, nested=True),
    "skipped": replace(SKIP, nested=True),
    "skipped and tied": replace(SKIP, nested=True, tied=("p1",)),
    "deep": replace(BARE, shapes=((2, 3, 2), (3, 2, 1, 2))),
}
SYSTEMS = {
    "stage 1": SystemSpec(bucket_elems=4, overlap_params=True),
    "stage 3": SystemSpec(stage=3, bucket_elems=4),
    "no prefetch": SystemSpec(stage=3, bucket_elems=4, prefetch=0),
    "kept": SystemSpec(stage=3, bucket_elems=4, reshard_after_forward=False),
}


class Summing(Engine):
    """Right engine: sums each gradient, or zeros."""

    def __init__(self, module, scenario, group):
        super().__init__(module, scenario, group, averages=True, keeps=False)

    def reduced(self, param):
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(grad, group=self.group)
        return grad / self.group.size()

    def step(self, *, lr_factor):
        for param in self.module.parameters():
            param.grad = self.reduced(param)
        self.optimizer.step()


class GathersAtHome(Summing):
    """Params contain their values only while the module runs that registered them first."""

    def __init__(self, module, scenario, group):
        super().__init__(module, scenario, group)
        self.kept = {}
        homes = set()
        for owner in module.modules():
            own = [param for param in owner.parameters(recurse=False) if param not in homes]
            homes.update(own)
            owner.register_forward_pre_hook(partial(self.gather, own))
            owner.register_forward_hook(partial(self.free, own))
        self.free(list(homes), module, (), None)

    def gather(self, params, module, args):
        for param in params:
            param.data = self.kept[param].clone()

    def free(self, params, module, args, output):
        for param in params:
            self.kept[param] = param.data
            param.data = torch.zeros_like(param)

    def step(self, *, lr_factor):
        self.gather(self.kept, self.module, ())
        super().step(lr_factor=lr_factor)
        self.free(list(self.kept), self.module, (), None)

    def params(self):
        return {name: self.kept[param] for name, param in self.module.named_parameters()}


class GathersAhead(GathersAtHome):
    """Like `GathersAtHome`, but reshards only at the end of the whole forward."""

    def free(self, params, module, args, output):
        if module is self.module:
            super().free(list(self.module.parameters()), module, args, output)


class ReducesByModule(Summing):
    """Sums the gradients of a module when backward reaches its output."""

    def __init__(self, module, scenario, group):
        super().__init__(module, scenario, group)
        self.waiting = []
        for owner in module.modules():
            owner.register_forward_hook(self.watch)

    def watch(self, owner, args, output):
        if output.requires_grad:
            output.register_hook(lambda grad: self.waiting.append(owner))

    def step(self, *, lr_factor):
        for owner in self.waiting:
            for param in owner.parameters(recurse=False):
                param.grad = self.reduced(param)
        self.waiting.clear()
        self.optimizer.step()


class KeepsOldGradients(Summing):
    """Keeps gradients in a buffer that only new gradients overwrite."""

    def __init__(self, module, scenario, group):
        super().__init__(module, scenario, group)
        self.buffer = {param: torch.zeros_like(param) for param in module.parameters()}

    def reduced(self, param):
        if param.grad is not None:
            self.buffer[param] = param.grad
        param.grad = self.buffer[param].clone()
        return super().reduced(param)


class SumsMatrices(Summing):
    """Sums only the first slice beyond two dimensions."""

    def reduced(self, param):
        whole = super().reduced(param)
        if param.dim() < 3:
            return whole
        part = param.grad.clone()
        part.flatten(2)[..., 0] = whole.flatten(2)[..., 0]
        return part


class Target:
    """Target around one of these engines."""

    name = "child-modules"
    capabilities = Capabilities(
        models=("params",), follows=("model.tied", "model.skip", "model.one_rank")
    )
    numerics = Numerics(unused="zeros")

    def __init__(self, engine):
        self.engine = engine

    def build(self, module, *, scenario, group):
        return self.engine(module, scenario, group)


def judged(pool, model, *, engine=None, **parts):
    case = replace(CASE, model=model, run=RunSpec(steps=3), **parts)
    assert check_scenario(case) == []
    return run_case(case, pool=pool, target=None if engine is None else Target(engine))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("model", MODELS)
def test_own_system_passes(pool, model, system):
    result = judged(pool, MODELS[model], system=SYSTEMS[system], world=WorldSpec(size=2))
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.parametrize("model", MODELS)
def test_right_engine_passes(pool, model):
    assert judged(pool, MODELS[model], engine=Summing).verdict == "pass"


@pytest.mark.parametrize(
    ("engine", "before", "now"),
    [
        (GathersAtHome, TIED, MODELS["tied"]),
        (GathersAhead, TIED, MODELS["tied, second names first"]),
        (GathersAhead, MODELS["tied"], MODELS["tied, second names first"]),
        (ReducesByModule, ONE, MODELS["one rank"]),
        (KeepsOldGradients, replace(BARE, unused=("p1",)), MODELS["skipped"]),
        (SumsMatrices, replace(BARE, shapes=((2, 3), (6, 2))), MODELS["deep"]),
    ],
    ids=["sibling", "sibling first", "sibling before", "one rank", "skipped", "deep"],
)
def test_fault_is_found_by_the_new_case_only(pool, engine, before, now):
    target = Target(engine)
    target.capabilities = replace(
        target.capabilities, follows=(*target.capabilities.follows, "model.unused")
    )
    cases = [replace(CASE, model=model, run=RunSpec(steps=3)) for model in (before, now)]
    assert [run_case(case, pool=pool, target=target).verdict for case in cases] == ["pass", "fail"]
