"""Shampoo over a device mesh: Kronecker factors are DTensors sharded by rows (Gupta et al., 2018).

Gradients are averaged as DTensors with a partial placement. Factors are whole only while their
param is stepped, so a rank keeps 1 / N of them between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor


class Shampoo(torch.optim.Optimizer):
    """Shampoo: matrices are stepped by L^(-1/4) G R^(-1/4), vectors as in Adagrad.

    Args:
        params: Whole on every rank. Those of more than two dimensions are flattened to matrices.
        eps: Weight of the identity in each factor.
        mesh: 1D mesh of the data-parallel ranks; None on one device.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float = 0.1,
        momentum: float = 0.0,
        eps: float = 1e-4,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "eps": eps})
        self.mesh = mesh

    def average_gradients(self) -> None:
        """Replace the gradient of each rank by the mean over the ranks."""
        for settings in self.param_groups:
            for param in settings["params"]:
                partial = DTensor.from_local(param.grad, self.mesh, [Partial("sum")])
                param.grad = partial.full_tensor() / self.mesh.size()

    @torch.no_grad()
    def step(self) -> None:
        for settings in self.param_groups:
            for param in settings["params"]:
                if param.grad is not None and param.numel():
                    self.update(param, self.state[param], settings)

    def update(self, param: Tensor, state: dict[str, Tensor], settings: dict[str, Any]) -> None:
        grad = param.grad.reshape(len(param), -1) if param.ndim > 1 else param.grad.reshape(-1)
        if not state:
            state["direction"] = torch.zeros_like(param)
            sizes = grad.shape if grad.ndim == 2 else ()
            for name, size in zip(("left", "right"), sizes, strict=False):
                state[name] = self.scattered(settings["eps"] * torch.eye(size))
            if not sizes:
                state["squares"] = self.scattered(torch.full_like(grad, settings["eps"]))
        if grad.ndim == 2:
            left = whole(state["left"]) + grad @ grad.T
            right = whole(state["right"]) + grad.T @ grad
            state["left"], state["right"] = self.scattered(left), self.scattered(right)
            update = inverse_root(left) @ grad @ inverse_root(right)
        else:
            squares = whole(state["squares"]) + grad * grad
            state["squares"] = self.scattered(squares)
            update = grad / squares.sqrt()
        direction = state["direction"].mul_(settings["momentum"]).add_(update.view_as(param))
        param.sub_(direction, alpha=settings["lr"])

    def scattered(self, factor: Tensor) -> Tensor:
        return factor if self.mesh is None else distribute_tensor(factor, self.mesh, [Shard(0)])


def whole(factor: Tensor) -> Tensor:
    return factor.full_tensor() if isinstance(factor, DTensor) else factor


def inverse_root(factor: Tensor) -> Tensor:
    """Return the inverse fourth root of a symmetric positive matrix."""
    values, vectors = torch.linalg.eigh(factor)
    return vectors * values.clamp(min=1e-12).pow(-0.25) @ vectors.T
