"""AdamW over one flat buffer: gradients are reduce-scattered, shards stepped and all-gathered."""

import torch
import torch.distributed as dist


def adamw_(param, grad, state, *, lr, betas, eps, weight_decay):
    """One step of AdamW in place; `state` is empty before the first one."""
    if not state:
        state.update(
            step=torch.tensor(0),
            exp_avg=torch.zeros_like(param),
            exp_avg_sq=torch.zeros_like(param),
        )
    state["step"] += 1
    step = state["step"].item()
    state["exp_avg"].mul_(betas[0]).add_(grad, alpha=1 - betas[0])
    state["exp_avg_sq"].mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    mean = state["exp_avg"] / (1 - betas[0] ** step)
    root = (state["exp_avg_sq"] / (1 - betas[1] ** step)).sqrt_().add_(eps)
    param.mul_(1 - lr * weight_decay).addcdiv_(mean, root, value=-lr)


class FlatAdamW:
    """AdamW with fp32 masters; params become views of one buffer, cut into equal shards.

    Args:
        params: Params of one dtype, the same ones in the same order on every rank.
        clip_norm: Largest norm of all gradients, or None.
    """

    def __init__(
        self, params, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip_norm=None,
        buffers=(),
    ):  # fmt: skip
        self.params = [p for p in params if p.requires_grad]
        self.lr, self.betas, self.eps = lr, betas, eps
        self.weight_decay, self.clip_norm = weight_decay, clip_norm
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        total = sum(p.numel() for p in self.params)
        self.shard_size = -(-total // self.world)
        self.flat = self.params[0].new_zeros(self.shard_size * self.world)
        for p, view in zip(self.params, self._views(self.flat), strict=True):
            view.copy_(p.data)
            p.data = view
        for tensor in (self.flat, *buffers):
            dist.broadcast(tensor, src=0)
        self.first = self.rank * self.shard_size
        self.shard = self.flat[self.first : self.first + self.shard_size]
        self.master = self.shard.float().clone()
        self.grad = torch.zeros_like(self.master)
        self.state = {}

    def _views(self, flat):
        start = 0
        for p in self.params:
            yield flat[start : start + p.numel()].view_as(p)
            start += p.numel()

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def reduce_gradients(self):
        full = torch.zeros(len(self.flat))
        for p, view in zip(self.params, self._views(full), strict=True):
            if p.grad is not None:
                view.copy_(p.grad)
        dist.reduce_scatter_single(self.grad, full)
        self.grad.div_(self.world)

    @torch.no_grad()
    def clip_gradients(self):
        total = torch.linalg.vector_norm(self.grad).square()
        dist.all_reduce(total)
        norm = total.sqrt()
        self.grad.mul_(torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0))
        return norm

    @torch.no_grad()
    def step(self):
        """Average and clip gradients, update all params; return the norm, None without clipping."""
        self.reduce_gradients()
        norm = None if self.clip_norm is None else self.clip_gradients()
        settings = {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        adamw_(self.master, self.grad, self.state, lr=self.lr, **settings)
        self.shard.copy_(self.master)
        dist.all_gather_single(self.flat, self.shard)
        return norm
