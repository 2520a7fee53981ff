"""ZeRO-1 by owner whose queries communicate, and faulty engines made from it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from zero_sim.scenario.spec import ModelSpec, OptimizerSpec, RunSpec, SystemSpec, WorldSpec
from zero_sim.targets import Capabilities, Numerics, OwnedPart, Place

UNKNOWN = WorldSpec(size=2, order="tree", order_known=False)
TWO_PARAMS = ModelSpec(name="params", shapes=((2,), (2,)))
QUERIES = ("parts", "params", "stray_gradients", "stray_padding", "notes", "settings")


class OwnerEngine:
    """ZeRO-1 by owner; each query issues a collective of its own length.

    Args:
        hides: `(step, rank, param)` of gradients reported as None.
        spoils: `(step, rank)` after which the rank's first param is wrong.
    """

    def __init__(self, module, group, *, hides=(), spoils=()):
        self.module, self.group, self.rank = module, group, dist.get_rank(group)
        self.named = self.register(module)
        self.hides, self.spoils, self.steps = hides, spoils, 0
        self.own = {
            name: torch.nn.Parameter(param.detach().clone())
            for index, (name, param) in enumerate(self.named.items())
            if index % dist.get_world_size(group) == self.rank
        }
        lr = OptimizerSpec().lr
        self.adam = torch.optim.AdamW(self.own.values(), lr=lr, weight_decay=0.0, foreach=False)
        self.reduced = {}

    def register(self, module):
        return dict(module.named_parameters())

    def _answer(self, query):
        dist.all_reduce(torch.zeros(20 + QUERIES.index(query)), group=self.group)

    def zero_grad(self):
        self.module.zero_grad()

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        self.reduced = {}
        for name, param in self.named.items():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad, group=self.group)
            if name in self.own:
                is_shown = param.requires_grad and (self.steps, self.rank, name) not in self.hides
                self.reduced[name] = grad.reshape(-1).clone() if is_shown else None
                mean = grad / dist.get_world_size(self.group)
                self.own[name].grad = mean if param.requires_grad else None
        self.adam.step()
        for index, (name, param) in enumerate(self.named.items()):
            if name in self.own:
                param.data.copy_(self.own[name].detach())
            owner = index % dist.get_world_size(self.group)
            dist.broadcast(param.data, group_src=owner, group=self.group)
        if (self.steps, self.rank) in self.spoils:
            next(iter(self.named.values())).data.view(-1)[0] += 1
        self.steps += 1

    def params(self):
        self._answer("params")
        return self.named

    def parts(self):
        self._answer("parts")
        for name, master in self.own.items():
            state = self.adam.state[master]
            yield OwnedPart(
                place=Place(param=name, start=0, stop=master.numel()),
                grad=self.reduced.get(name),
                master=master.detach().reshape(-1),
                state={
                    key: each.reshape(-1) if each.dim() else each for key, each in state.items()
                },
            )

    def stray_gradients(self, *, padding_only):
        self._answer("stray_gradients")
        return ""

    def stray_padding(self):
        self._answer("stray_padding")
        return ""

    def notes(self):
        self._answer("notes")
        return [f"rank {self.rank} ran"]


def target(engine=OwnerEngine, *, follows=(), **wrong):
    return SimpleNamespace(
        name="by-owner",
        capabilities=Capabilities(models=("params",), stages=(1,), follows=follows),
        numerics=Numerics(divide="post"),
        build=lambda module, *, scenario, group: engine(module, group, **wrong),
    )


def judge(judged, system, **parts):
    case = {"model": TWO_PARAMS, "world": UNKNOWN, "system": SystemSpec(stage=1), **parts}
    return judged(system, **{"run": RunSpec(steps=3), **case})
