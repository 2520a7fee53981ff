"""Dion: orthonormal updates of low rank, by one power iteration a step (Ahn and Xu, 2025).

P Q^T of rank r approximates the momentum of a matrix. The Q of one step starts the power iteration
of the next, and the error of the approximation stays in the momentum (error feedback). Every param
has one owner, which alone keeps its momentum and Q, and sends the updated param to the others.
Vectors are stepped by the sign of their momentum, similarly to Lion.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

EPS = 1e-8


class Dion(torch.optim.Optimizer):
    """Low-rank orthonormal updates of matrices, signed updates of all other params.

    Args:
        params: The same on every rank, with gradients that are reduced already.
        rank_fraction: Rank of an update as a part of the smaller dimension.
        group: Data-parallel group among which matrices are shared out; None on one device.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        rank_fraction: float = 0.5,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.rank_fraction, self.group = rank_fraction, group
        params = [param for settings in self.param_groups for param in settings["params"]]
        self.owners = share_out(params, 1 if group is None else group.size())

    @torch.no_grad()
    def step(self) -> None:
        mine = 0 if self.group is None else self.group.rank()
        for settings in self.param_groups:
            for param in settings["params"]:
                if self.owners[param] == mine and param.grad is not None:
                    self.update(param, self.state[param], settings)
        if self.group is not None:
            self.send(self.owners)

    def send(self, owners: dict[Tensor, int]) -> None:
        """Send each param from its owner to all ranks."""
        for param, owner in owners.items():
            dist.broadcast(param, group_src=owner, group=self.group)

    def update(self, param: Tensor, state: dict[str, Tensor], settings: dict[str, Any]) -> None:
        lr, momentum = settings["lr"], settings["momentum"]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        param.mul_(1 - lr * settings["weight_decay"])
        buffer = state["momentum"].add_(param.grad)
        if param.ndim != 2 or param.numel() == 0:
            param.sub_(buffer.sign(), alpha=lr)
            buffer.mul_(momentum)
            return
        rows, columns = param.shape
        if "q" not in state:
            state["q"] = first_q(columns, max(1, int(self.rank_fraction * min(rows, columns))))
        left = torch.linalg.qr(buffer @ state["q"]).Q
        right = buffer.T @ left
        buffer.sub_(left @ right.T, alpha=1 - momentum)
        state["q"] = right / (right.norm(dim=0, keepdim=True) + EPS)
        param.sub_(left @ state["q"].T, alpha=lr * (rows / columns) ** 0.5)


def first_q(rows: int, rank: int) -> Tensor:
    """Draw the start of the power iteration: the same for every matrix of a shape."""
    generator = torch.Generator().manual_seed(rows)
    return torch.linalg.qr(torch.randn(rows, rank, generator=generator)).Q


def share_out(params: list[Tensor], ranks: int) -> dict[Tensor, int]:
    """Give each param, the largest first, to the rank that has the fewest elements so far."""
    owners, elems = {}, [0] * ranks
    for param in sorted(params, key=Tensor.numel, reverse=True):
        owners[param] = elems.index(min(elems))
        elems[owners[param]] += param.numel()
    return owners
