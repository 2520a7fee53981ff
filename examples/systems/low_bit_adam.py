"""Adam for bf16 params without fp32 copies: 8-bit moments with scales by block, remainders."""

import torch
import torch.distributed as dist

BLOCK = 64


def quantize(values, levels):
    """Return codes of values by blocks of 64, and scales that make the largest code `levels`."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1).div(levels)
    codes = (blocks / scale.clamp_min(1e-38)[:, None]).round()
    return codes.view(-1)[: len(values)], scale


def dequantize(codes, scale):
    return codes.float() * scale.repeat_interleave(BLOCK)[: len(codes)]


class LowBitAdam(torch.optim.Optimizer):
    """Adam with int8 first moments, uint8 roots of second moments and params' remainders."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad.float().view(-1), self.state[p], group)

    def _step(self, p, grad, state, group):
        if not state:
            blocks = -(-p.numel() // BLOCK)
            state["step"] = torch.tensor(0.0)
            state["mean"] = torch.zeros(p.numel(), dtype=torch.int8)
            state["mean_scale"] = torch.zeros(blocks)
            state["root"] = torch.zeros(p.numel(), dtype=torch.uint8)
            state["root_scale"] = torch.zeros(blocks)
            state["remainder"] = torch.zeros_like(p)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = (
            dequantize(state["mean"], state["mean_scale"]).mul_(beta1).add_(grad, alpha=1 - beta1)
        )
        root = dequantize(state["root"], state["root_scale"])
        square = root.square_().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1 = 1 - beta1 ** state["step"].item()
        correction2 = 1 - beta2 ** state["step"].item()
        update = mean / correction1 / ((square / correction2).sqrt_() + group["eps"])
        full = p.float().view(-1) + state["remainder"].float().view(-1)
        full = full * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update
        p.copy_(full.view_as(p))
        state["remainder"].copy_((full - p.float().view(-1)).view_as(p))
        codes, scale = quantize(mean, 127)
        state["mean"].copy_(codes)
        state["mean_scale"].copy_(scale)
        codes, scale = quantize(square.sqrt_(), 255)
        state["root"].copy_(codes)
        state["root_scale"].copy_(scale)


class OwnerSharded:
    """ZeRO-1 around an optimizer: owners by turns, gradients averaged in their own dtype."""

    def __init__(self, params, optimizer_class, **settings):
        self.params = list(params)
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        mine = self.params[self.rank :: self.world]
        self.optimizer = optimizer_class(mine, **settings) if mine else None

    def set_lr(self, lr):
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = lr

    def reduce_gradients(self):
        works = []
        for index, p in enumerate(self.params):
            p.grad.div_(self.world)
            works.append(dist.reduce(p.grad, dst=index % self.world, async_op=True))
        for work in works:
            work.wait()

    def step(self):
        self.reduce_gradients()
        if self.optimizer is not None:
            self.optimizer.step()
        works = [
            dist.broadcast(p.data, src=i % self.world, async_op=True)
            for i, p in enumerate(self.params)
        ]
        for work in works:
            work.wait()
