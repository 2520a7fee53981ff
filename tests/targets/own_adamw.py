"""A sharded AdamW some units in the last place from torch's, and faulty versions of it."""

import torch
import torch.distributed as dist

from zero_sim.targets import Capabilities, Numerics, OwnedPart, Place, StepResult

FOLLOWS = (
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.warmup_steps",
    "run.micro_batches",
)


@torch.no_grad()
def adamw_step(param, grad, state, settings):
    """Step AdamW as many write it by hand: moments by mul and add, not by torch's lerp."""
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    beta1, beta2 = settings["betas"]
    state["step"] += 1
    t = int(state["step"])
    mean = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    param.mul_(1 - settings["lr"] * settings["weight_decay"])
    step_size = settings["lr"] * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
    param.addcdiv_(mean, square.sqrt().add_(settings["eps"]), value=-step_size)


class OwnAdamW(torch.optim.Optimizer):
    """The same rule as an optimizer class."""

    def __init__(self, params, **settings):
        super().__init__(params, settings)

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    adamw_step(param, param.grad, self.state[param], group)


def settings_of(spec):
    names = ("lr", "betas", "eps", "weight_decay")
    return {name: getattr(spec, name) for name in names}


class ByStep:
    """A target whose reference steps by a function.

    Args:
        mistake: Name of its fault; empty for none.
    """

    name = "own-adamw"
    capabilities = Capabilities(follows=FOLLOWS, stages=(1,))
    numerics = Numerics(divide="post", elementwise=True)
    reference_step = rule = staticmethod(adamw_step)

    def __init__(self, mistake=""):
        self.mistake = mistake

    def build(self, module, *, scenario, group):
        return Engine(self, module, scenario, group)


class ByOptimizer(ByStep):
    """A target whose reference steps by a torch-style optimizer class."""

    reference_step = None

    def reference_optimizer(self, named_params, scenario):
        return OwnAdamW(named_params.values(), **settings_of(scenario.optimizer))


class LostUpdate(ByStep):
    """A target that never updates the last element of each shard."""

    def __init__(self):
        super().__init__("lost update")


class Engine:
    def __init__(self, target, module, scenario, group):
        self.target, self.module, self.group = target, module, group
        self.named = dict(module.named_parameters())
        flat = torch.cat([each.detach().reshape(-1) for each in self.named.values()])
        self.shard_elems = -(-flat.numel() // group.size())
        self.first = group.rank() * self.shard_elems
        self.shard = self.cut(flat).clone()
        self.grad = None
        self.state, self.settings_now = {}, settings_of(scenario.optimizer)

    def cut(self, flat):
        return flat[self.first : self.first + self.shard_elems]

    def zero_grad(self):
        self.module.zero_grad()

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.named.values()]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=self.group)
        self.grad = self.cut(flat)
        settings = self.settings_now | {"lr": self.settings_now["lr"] * lr_factor}
        before = self.shard.clone()
        self.target.rule(self.shard, self.grad / self.group.size(), self.state, settings)
        if self.target.mistake == "lost update":
            self.shard[-1:] = before[-1:]
        padded = flat.new_zeros(self.shard_elems)
        padded[: self.shard.numel()] = self.shard
        whole = flat.new_empty(self.shard_elems * self.group.size())
        dist.all_gather_into_tensor(whole, padded, group=self.group)
        start = 0
        for param in self.named.values():
            param.data.copy_(whole[start : start + param.numel()].view_as(param))
            start += param.numel()
        return StepResult()

    def params(self):
        return dict(self.named)

    def parts(self):
        start = 0
        for name, param in self.named.items():
            stop = start + param.numel()
            low = max(start, self.first)
            high = min(stop, self.first + self.shard.numel())
            if low < high:
                here = slice(low - self.first, high - self.first)
                yield OwnedPart(
                    place=Place(param=name, start=low - start, stop=high - start, flat_start=low),
                    grad=None if self.grad is None else self.grad[here],
                    master=self.shard[here],
                    state={k: v[here] if v.dim() else v for k, v in self.state.items()},
                )
            start = stop
