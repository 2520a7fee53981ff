"""Optimizers that need whole params, written from their papers: one plain fp32 tensor per param.

They share no code with the implementations under test. Operations, their order and matrix shapes
are the same, because these decide bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Jordan 2024: coefficients of the quintic Newton-Schulz iteration.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5

Move = Callable[[Tensor, Tensor, dict[str, Any], Mapping[str, Any]], None]
"""Moves a param in place, given its gradient, its state and the settings of its group."""


class TextbookOptimizer:
    """An optimizer that moves params individually, with torch's names for groups and state.

    Args:
        move: Moves a single param.
        groups: Params under `params`, and all settings, by group.
    """

    def __init__(self, move: Move, groups: Sequence[Mapping[str, Any]]) -> None:
        self._move = move
        self.param_groups: list[dict[str, Any]] = [dict(group) for group in groups]
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """Move every master that has a gradient."""
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    self._move(master, master.grad, self.state[master], group)


def move_by_muon(
    master: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]
) -> None:
    """Jordan 2024: M = lerp(M, G, 1 - mu); W = (1 - lr wd) W - lr sqrt(max(1, r / c)) NS(M)."""
    mu, lr = group["momentum"], group["lr"]
    # State is created on first use, under torch's key.
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(master)
    momentum = state["momentum_buffer"]
    # mu M + (1 - mu) G
    momentum.lerp_(grad, 1 - mu)
    update = torch.lerp(grad, momentum, mu) if group["nesterov"] else momentum
    # [rows, product of all other dimensions]; vectors are not orthogonalised.
    if master.dim() > 1 and master.numel() > 0:
        shape = (master.size(0), master.numel() // master.size(0))
        wide = newton_schulz(update.reshape(shape), eps=group["eps"])
        update = wide.mul(max(1.0, shape[0] / shape[1]) ** 0.5).reshape(master.shape)
    # Decoupled weight decay, before the update.
    master.mul_(1 - lr * group["weight_decay"])
    master.sub_(update.mul(lr))


def newton_schulz(matrix: Tensor, *, eps: float) -> Tensor:
    """Return U V' for a matrix close to U S V', by five steps of a quintic iteration."""
    # Iterate on the wide shape, because its Gram matrix is smaller.
    is_tall = matrix.size(0) > matrix.size(1)
    x = torch.div(matrix, torch.linalg.vector_norm(matrix).clamp(min=eps))
    if is_tall:
        x = x.t().contiguous()
    a, b, c = _COEFFICIENTS
    # x = a x + (b S + c S^2) x, with S = x x'
    for _ in range(_ITERATIONS):
        s = torch.mm(x, x.t())
        polynomial = s.mul(b).add(torch.mm(s, s).mul(c))
        x = x.mul(a).add(torch.mm(polynomial, x))
    return x.t().contiguous() if is_tall else x


def move_by_lamb(
    master: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]
) -> None:
    """You et al. 2019, algorithm 2: r = m^ / (sqrt(v^) + eps) + wd W; W -= lr |W| / |r| r."""
    beta1, beta2 = group["betas"]
    if "step" not in state:
        state.update(
            step=torch.tensor(0.0),
            exp_avg=torch.zeros_like(master),
            exp_avg_sq=torch.zeros_like(master),
        )
    state["step"] += 1
    t = float(state["step"])
    m, v = state["exp_avg"], state["exp_avg_sq"]
    # First and second moments.
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    # Bias correction.
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    # Adam's direction, plus decoupled weight decay.
    r = m_hat / (v_hat.sqrt() + group["eps"])
    r = torch.add(r, master, alpha=group["weight_decay"])
    # Norms of the whole param, which a shard alone cannot compute.
    weight_norm, update_norm = torch.linalg.vector_norm(master), torch.linalg.vector_norm(r)
    phi = weight_norm / update_norm
    # The trust ratio is 1 if a norm is 0.
    if not (weight_norm > 0 and update_norm > 0):
        phi = torch.ones_like(phi)
    master.sub_(r * (phi * group["lr"]))
