"""Data parallelism in which each param has an owner that keeps its state and broadcasts it."""

import math

import torch
import torch.distributed as dist


class AdamW(torch.optim.Optimizer):
    """AdamW with both bias corrections folded into the learning rate."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                t = state.get("t", 0) + 1
                m = state.get("m", torch.zeros_like(p))
                v = state.get("v", torch.zeros_like(p))
                m = beta1 * m + (1 - beta1) * p.grad
                v = beta2 * v + (1 - beta2) * p.grad**2
                lr_t = group["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t)
                p.data -= lr_t * m / (torch.sqrt(v) + group["eps"])
                p.data -= group["lr"] * group["weight_decay"] * p.data
                state["t"], state["m"], state["v"] = t, m, v


class DataParallel(torch.nn.Module):
    """A wrapper that averages each gradient over all ranks in the background, as backward makes it.

    Set `sync` to False during all but the last backward of a step.
    """

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.sync = True
        self.in_flight = []
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
        for p in module.parameters():
            dist.broadcast(p.data, src=0)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._average)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _average(self, p):
        if self.sync:
            p.grad /= dist.get_world_size()
            self.in_flight.append(dist.all_reduce(p.grad, async_op=True))

    def wait_for_gradients(self):
        for work in self.in_flight:
            work.wait()
        self.in_flight.clear()


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps the params of this rank by `optimizer_class`, and broadcasts them."""

    def __init__(self, params, optimizer_class, **settings):
        self.optimizer_class = optimizer_class
        self.load = [0] * dist.get_world_size()
        self.owner = {}
        self.local = None
        self.pairs = []
        super().__init__(params, settings)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            self.owner[p] = self.load.index(min(self.load))
            self.load[self.owner[p]] += p.numel()
        mine = [p for p in group["params"] if self.owner[p] == dist.get_rank()]
        if not mine:
            return
        local = {**group, "params": mine}
        if self.local is None:
            self.local = self.optimizer_class([local])
        else:
            self.local.add_param_group(local)
        self.pairs.append((group, self.local.param_groups[-1]))

    def step(self):
        for group, local in self.pairs:  # a scheduler sees the outer groups only
            local["lr"] = group["lr"]
        if self.local is not None:
            self.local.step()
        for p, owner in self.owner.items():
            dist.broadcast(p.data, src=owner)
