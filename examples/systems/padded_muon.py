"""Muon for matrices, by turns of the ranks, which gather all updates; Adam for the rest."""

import torch
import torch.distributed as dist


def orthogonalize(grad, steps=5):
    """Newton-Schulz iteration of order five towards the nearest semi-orthogonal matrix, in bf16."""
    x = grad.bfloat16()
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    return x.T if tall else x


def muon_update(grad, state, group):
    """Return the update of a matrix: Nesterov momentum, made orthogonal. `state` starts empty."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(grad)
    state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
    matrix = grad.lerp(state["momentum_buffer"], group["momentum"]).reshape(len(grad), -1)
    return orthogonalize(matrix) * max(1, matrix.size(0) / matrix.size(1)) ** 0.5


def adam_update(grad, state, group):
    """Return the update of any other param."""
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
    beta1, beta2 = group["betas"]
    state["step"] += 1
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
    mean = state["exp_avg"] / (1 - beta1 ** state["step"])
    square = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
    return mean / (square.sqrt() + group["eps"])


class MuonAndAdam(torch.optim.Optimizer):
    """Muon for matrices, assigned in padded turns; Adam on all ranks for vectors.

    Gradients must be averaged already: call `average_gradients` before `step`.
    """

    def __init__(
        self, params, lr=0.02, momentum=0.95, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
    ):
        params = list(params)
        groups = [{"params": [p for p in params if p.ndim < 2], "muon": False}]
        for size in sorted({p.numel() for p in params if p.ndim >= 2}):
            matrices = [p for p in params if p.ndim >= 2 and p.numel() == size]
            groups.append({"params": matrices, "muon": True})
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(
            [g for g in groups if g["params"]], {**defaults, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (self._step_matrices if group["muon"] else self._step_vectors)(group)

    def _step_matrices(self, group):
        params, world, rank = group["params"], dist.get_world_size(), dist.get_rank()
        size = params[0].numel()
        gathered = torch.empty(world, size, dtype=torch.bfloat16, device=params[0].device)
        for base in range(0, len(params), world):
            if base + rank < len(params):
                p = params[base + rank]
                update = muon_update(p.grad, self.state[p], group)
            else:
                update = torch.zeros(size, dtype=torch.bfloat16, device=gathered.device)
            dist.all_gather_single(gathered, update.reshape(-1).contiguous())
            for p, update in zip(params[base : base + world], gathered, strict=False):
                apply_update(p, update, group)

    def _step_vectors(self, group):
        for p in group["params"]:
            apply_update(p, adam_update(p.grad, self.state[p], group), group)


def apply_update(param, update, group):
    param.mul_(1 - group["lr"] * group["weight_decay"])
    param.add_(update.view_as(param), alpha=-group["lr"])


def average_gradients(params):
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
