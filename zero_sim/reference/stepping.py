"""The optimizer: torch's own classes on one plain fp32 tensor a param, never foreach or fused.

Fused kernels treat the tail of a tensor differently from its body, so their bits depend on where a
shard was cut; the loop over params has no such seam.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, assert_never

import torch
from torch import Tensor

from zero_sim.scenario.spec import OptimizerSpec

Divide = Literal["none", "pre", "post"]


def divide_local(grad: Tensor, *, divide: Divide, world_size: int) -> Tensor:
    """Divide a rank's gradient by the world size, in its dtype, where that precedes the sum."""
    return grad.div(world_size) if divide == "pre" else grad


def master_gradient(reduced: Tensor, *, divide: Divide, world_size: int) -> Tensor:
    """Return what the optimizer sees: a new fp32 tensor, divided where that follows the sum.

    The quotient is a true one: a product with a rounded 1 / world_size differs in the last bit.
    """
    wide = reduced.to(torch.float32, copy=True)
    return wide.div_(world_size) if divide == "post" else wide


def build_optimizer(spec: OptimizerSpec, *, masters: list[Tensor]) -> torch.optim.Optimizer:
    """Return the torch optimizer that the spec names, over all `masters`."""
    match spec.name:
        case "adamw" | "adam":
            kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
            return kind(
                masters,
                lr=spec.lr,
                betas=spec.betas,
                eps=spec.eps,
                weight_decay=spec.weight_decay,
                foreach=False,
                fused=False,
            )
        case "sgd":
            return torch.optim.SGD(
                masters,
                lr=spec.lr,
                momentum=spec.momentum,
                weight_decay=spec.weight_decay,
                foreach=False,
                fused=False,
            )
        case unknown:
            assert_never(unknown)


class Stepper:
    """The masters and the optimizer that moves them."""

    def __init__(self, spec: OptimizerSpec, *, params: Mapping[str, Tensor]) -> None:
        """Copy each param, of any dtype and shape, into an fp32 master; at least one is needed.

        Args:
            spec: Optimizer and its settings; `foreach` is ignored.
            params: Initial values by name.
        """
        self.masters: dict[str, Tensor] = {
            name: param.detach().to(torch.float32, copy=True) for name, param in params.items()
        }
        self._optimizer = build_optimizer(spec, masters=list(self.masters.values()))

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """Take one step in place.

        Args:
            grads: fp32 gradient of every master, by name; zeros count as a gradient.
        """
        for name, master in self.masters.items():
            master.grad = grads[name]
        self._optimizer.step()
        for master in self.masters.values():
            master.grad = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return every state tensor by param and torch's own key; live, not copied."""
        state = self._optimizer.state
        return {
            name: {key: value for key, value in state[master].items() if isinstance(value, Tensor)}
            for name, master in self.masters.items()
        }
