"""Minimal engines that report params and perhaps gradients; some never average."""

import torch
import torch.distributed as dist

from zero_sim.scenario.spec import ModelSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.targets import Capabilities, Numerics, class_of, settings_of

CASE = Scenario(
    schema=1,
    name="case",
    model=ModelSpec(name="params", shapes=((3,), (5,))),
    world=WorldSpec(size=3),
    system=SystemSpec(stage=0),
)
"""Case within the capabilities of these targets."""


class Engine:
    """All-reduces each gradient in place, averages it or not, and steps.

    Args:
        module: The model.
        scenario: The case.
        group: All ranks.
        averages: True if the sum is divided by the number of ranks.
        keeps: True if `.grad` contains the sum again after the step.
    """

    def __init__(self, module, scenario, group, *, averages, keeps):
        self.module, self.group, self.averages, self.keeps = module, group, averages, keeps
        self.clip = scenario.optimizer.clip_norm
        spec = scenario.optimizer
        self.optimizer = class_of(spec)(module.parameters(), **settings_of(spec))

    def zero_grad(self):
        self.optimizer.zero_grad()

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        params = list(self.module.parameters())
        for param in params:
            dist.all_reduce(param.grad, group=self.group)
        sums = [param.grad.clone() for param in params]
        if self.averages:
            for param in params:
                param.grad /= self.group.size()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(params, self.clip, foreach=False)
        self.optimizer.step()
        if self.keeps:
            for param, total in zip(params, sums, strict=True):
                param.grad = total

    def params(self):
        return dict(self.module.named_parameters())


class Target:
    """Target around the engine.

    Args:
        optimizers: Supported optimizers.
        shows: True if params contain gradients after a step.
        averages: As for `Engine`.
        keeps: As for `Engine`.
        follows: Supported options.
        numerics: Further fields of `Numerics`.
    """

    name = "summing"

    def __init__(
        self, *optimizers, shows=False, averages=True, keeps=False, follows=(), **numerics
    ):
        models = ("mlp", "params")
        self.capabilities = Capabilities(
            models=models,
            stages=(0,),
            optimizers=optimizers or ("adamw", "sgd"),
            empty_params=False,
            follows=follows,
        )
        self.numerics = Numerics(grads_in_params=shows, **numerics)
        self.averages, self.keeps = averages, keeps

    def build(self, module, *, scenario, group):
        return Engine(module, scenario, group, averages=self.averages, keeps=self.keeps)


class Undivided(Target):
    """Never averages; importable by the command line."""

    def __init__(self):
        super().__init__(averages=False)


class ShowsMeans(Target):
    """Shows averaged gradients without declaring it."""

    def __init__(self):
        super().__init__(shows=True)


class UndividedAdam(Target):
    """Never averages, and supports only AdamW."""

    def __init__(self):
        super().__init__("adamw", averages=False)
