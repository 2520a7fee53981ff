"""Small engine that reports only params, with options for common mistakes."""

import torch
import torch.distributed as dist

from zero_sim.targets import Capabilities, Numerics, StepResult

CAN = Capabilities(
    dtypes=("fp32", "bf16"),
    optimizers=("adamw", "sgd", "muon", "lamb"),
    follows=(
        "optimizer.weight_decay",
        "optimizer.warmup_steps",
        "optimizer.groups",
        "optimizer.clip_norm",
        "optimizer.momentum",
        "optimizer.betas",
        "run.micro_batches",
    ),
)


def adamw_of_spec(params, spec):
    return torch.optim.AdamW(
        params.values(), lr=spec.lr, weight_decay=spec.weight_decay, foreach=False
    )


def sgd_of_spec(params, spec):
    return torch.optim.SGD(params.values(), lr=spec.lr, momentum=spec.momentum, foreach=False)


def mean_over_ranks(grad, group):
    dist.all_reduce(grad, group=group)
    return grad / group.size()


class Newcomer:
    """Target around the engine.

    Args:
        optimizer: Function of params by name and the optimizer's spec; returns an optimizer.
        reduce: Function of a gradient and a group; returns the mean.
        accumulates: True if gradients of micro-batches are added, False if replaced.
        reads_lr_factor: True if learning rates follow the warm-up.
        norm: Function of gradients by name and the group; returns the reported norm.
        shows_grads: True if params contain reduced gradients.
    """

    name = "newcomer"
    capabilities = CAN

    def __init__(
        self,
        *,
        optimizer=adamw_of_spec,
        reduce=mean_over_ranks,
        accumulates=True,
        reads_lr_factor=True,
        norm=None,
        shows_grads=False,
    ):
        self.optimizer, self.reduce, self.norm = optimizer, reduce, norm
        self.accumulates, self.reads_lr_factor = accumulates, reads_lr_factor
        self.numerics = Numerics(
            reported_grads="after-division" if shows_grads else "before-division",
            grads_in_params=shows_grads,
        )

    def build(self, module, *, scenario, group):
        return _Engine(self, module, scenario, group)


class _Engine:
    def __init__(self, target, module, scenario, group):
        self.target, self.module, self.group = target, module, group
        self.named = dict(module.named_parameters())
        self.optimizer = target.optimizer(self.named, scenario.optimizer)
        self.lrs = [each["lr"] for each in getattr(self.optimizer, "param_groups", ())]

    def zero_grad(self):
        self.module.zero_grad()

    def backward(self, loss, *, last_micro, rows):
        if not self.target.accumulates:
            self.module.zero_grad()
        loss.backward()

    def step(self, *, lr_factor):
        for param in self.named.values():
            param.grad = self.target.reduce(param.grad, self.group)
        grads = {name: param.grad for name, param in self.named.items()}
        norm = self.target.norm and self.target.norm(grads, self.group)
        if self.target.reads_lr_factor:
            for each, lr in zip(getattr(self.optimizer, "param_groups", ()), self.lrs, strict=True):
                each["lr"] = lr * lr_factor
        self.optimizer.step()
        return StepResult(norm=norm)

    def params(self):
        return dict(self.named)
