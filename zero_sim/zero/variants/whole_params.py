"""Optimizers over shards that need whole params, such as Muon and LAMB.

State and master updates are elementwise, but an update also needs a number or a matrix computed
from the whole param. So a step has three parts:

1. Each owner computes its part of a direction, from its part of gradient and state.
2. Directions, and weights for LAMB, are gathered bucket by bucket; nothing else is ever unsharded.
3. Each owner computes the whole update and applies its own part.

If a single rank owns the whole param, nothing is gathered.

[Note: memory of its own]
A matrix's address in a flat buffer can change the bits of a product. So whole matrices are copied
to separate memory first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from zero_sim.errors import UsageError
from zero_sim.zero.masters import Master
from zero_sim.zero.optimizer import AllAtOnce, DistributedOptimizer
from zero_sim.zero.unit import Unit

Parts = Mapping[Tensor, tuple[Tensor, ...]]
"""Tensors by leaf, each with one value per leaf element. A leaf is a master's fragment."""
WholeOf = Callable[[Parts], Iterable[tuple[Tensor, tuple[Tensor, ...], slice]]]
"""Gathers parts. Yields each leaf, the whole tensors in the param's shape, and the leaf's slice in
the flattened whole. Every rank calls it equally often, even without leaves."""

# Coefficients and number of iterations in Jordan's Muon.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def leaves_are_whole(parts: Parts) -> Iterator[tuple[Tensor, tuple[Tensor, ...], slice]]:
    """Yield leaves that are whole params: the `WholeOf` without sharding."""
    for leaf, tensors in parts.items():
        yield leaf, tensors, slice(None)


class Muon(Optimizer):
    """Momentum whose matrices are made orthogonal before they update the params.

    Tensors with more than two dimensions become matrices: the first dimension is rows, the others
    are columns. Vectors and scalars are updated with their momentum directly.

    Args:
        params: Masters, fp32.
        lr: Learning rate.
        momentum: Weight of the old mean in the gradient's moving mean.
        nesterov: True to use a mean of gradient and momentum as the direction.
        eps: Lower bound for the norm that divides a matrix.
        weight_decay: Decoupled, as in AdamW.

    Source:
        Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024), with its
        coefficients, its scale max(1, rows / columns)^0.5, and five Newton-Schulz steps, here in
        fp32.
    """

    gathers = 1
    """Number of quantities to gather per param."""

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = False,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )
        self.whole_of: WholeOf = leaves_are_whole

    def attach(self, optimizer: DistributedOptimizer) -> None:
        """Gather whole directions with the params' own collectives.

        Raises:
            UsageError: If masters are on another device, or the stepper works in turns.
        """
        _attach(self, optimizer)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore
        """Update all masters with a gradient."""
        groups, directions = _groups_of(self), {}
        for leaf, group in groups.items():
            assert leaf.grad is not None
            state = self.state[leaf]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(leaf)
            # 1D fp32, the moving mean over this rank's fragment.
            mean = state["momentum_buffer"].lerp_(leaf.grad, 1 - group["momentum"])
            nesterov = group["nesterov"]
            directions[leaf] = (leaf.grad.lerp(mean, group["momentum"]) if nesterov else mean,)
        for leaf, (direction,), place in self.whole_of(directions):
            group = groups[leaf]
            update = orthogonalized(direction, eps=group["eps"]).reshape(-1)[place]
            # Decoupled decay, before the update, as in AdamW.
            leaf.mul_(1 - group["lr"] * group["weight_decay"])
            leaf.sub_(update.view(leaf.shape) * group["lr"])


class Lamb(Optimizer):
    """Adam whose step for each param is scaled to the param's norm times the learning rate.

    Args:
        params: Masters, fp32.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Added to the direction before its norm is taken.

    Source:
        You et al., "Large batch optimization for deep learning" (arXiv 1904.00962), algorithm 2,
        with bias correction. The ratio is unbounded, and is 1 if a norm is zero.
    """

    gathers = 2
    """Number of quantities to gather per param: weights and direction."""

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.whole_of: WholeOf = leaves_are_whole

    def attach(self, optimizer: DistributedOptimizer) -> None:
        """Gather whole weights and directions with the params' own collectives.

        Raises:
            UsageError: If masters are on another device, or the stepper works in turns.
        """
        _attach(self, optimizer)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore
        """Update all masters with a gradient."""
        groups, parts = _groups_of(self), {}
        directions: dict[Tensor, Tensor] = {}
        for leaf, group in groups.items():
            directions[leaf] = self._direction(leaf, group)
            parts[leaf] = (leaf.detach(), directions[leaf])
        # The ratio needs the whole tensors, but the update is elementwise and uses this part only.
        for leaf, (weights, direction), _ in self.whole_of(parts):
            ratio = trust_ratio(weights, direction)
            leaf.sub_(directions[leaf] * (ratio * groups[leaf]["lr"]))

    def _direction(self, leaf: Tensor, group: Mapping[str, Any]) -> Tensor:
        assert leaf.grad is not None
        state = self.state[leaf]
        if not state:
            # A 0D tensor on the CPU, as in torch's Adam, so checkpoints store it once per param.
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(leaf)
            state["exp_avg_sq"] = torch.zeros_like(leaf)
        # Bias-corrected moments of Adam, in fp32.
        state["step"] += 1
        steps, (first, second) = state["step"].item(), group["betas"]
        mean = state["exp_avg"].lerp_(leaf.grad, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(leaf.grad, leaf.grad, value=1 - second)
        denominator = (square / (1 - second**steps)).sqrt_().add_(group["eps"])
        return (mean / (1 - first**steps)).div_(denominator).add_(leaf, alpha=group["weight_decay"])


def _attach(inner: Muon | Lamb, optimizer: DistributedOptimizer) -> None:
    device = optimizer.ddp.buffers[0].device
    if optimizer.state_device != device:
        raise UsageError(
            f"expected state_device={str(device)!r} with {type(inner).__name__}, because it "
            f"gathers whole params with the params' own collectives, got "
            f"{str(optimizer.state_device)!r}. Remove state_device."
        )
    if type(optimizer.stepper) is not AllAtOnce:
        raise UsageError(
            f"expected all gradients at once with {type(inner).__name__}, because it steps whole "
            f"params, got {type(optimizer.stepper).__name__}. Remove `stepper`."
        )
    inner.whole_of = partial(_whole_of, optimizer, inner.gathers)


def _whole_of(
    optimizer: DistributedOptimizer, gathers: int, parts: Parts
) -> Iterator[tuple[Tensor, tuple[Tensor, ...], slice]]:
    """Gather fragments bucket by bucket: the `WholeOf` with sharding."""
    # Over all units, because ranks without a fragment take part in each collective too.
    members: dict[tuple[int, int], list[Master]] = {}
    for master in optimizer.masters:
        if master.leaf in parts:
            members.setdefault((master.buffer_index, master.fragment.bucket), []).append(master)
    for index, buffer in enumerate(optimizer.ddp.buffers):
        for unit in buffer.units:
            here = members.get((index, unit.plan.index), [])
            # A whole 1D tensor per gathered quantity, in the same order as in `parts`.
            wholes = []
            for which in range(gathers):
                # 1D, this rank's shard of the quantity; zeros for padding and frozen params.
                shard = torch.zeros(unit.own_span.numel, device=buffer.device)
                for master in here:
                    place = master.fragment.in_shard
                    shard.narrow(0, place.start, place.numel).copy_(parts[master.leaf][which])
                wholes.append(whole_of_unit(unit, shard))
            for master in here:
                yield master.leaf, *_of_param(master, wholes)


def whole_of_unit(unit: Unit, shard: Tensor) -> Tensor:
    """Gather a unit from its owners' shards, 1D. A collective, unless it has a single owner."""
    # Decided from the plan, which is equal on all ranks, so they agree not to gather.
    if unit.plan.partition.owner is not None or unit.plan.shard_count == 1:
        return shard
    whole = shard.new_empty(unit.plan.span.numel)
    unit.collect(whole, shard, sizes=unit.plan.shard_sizes, async_op=False)
    return whole


def _of_param(master: Master, wholes: list[Tensor]) -> tuple[tuple[Tensor, ...], slice]:
    """Return a param's whole quantities from its unit, and the master's slice of them."""
    at, own = master.buffer.memory[master.param].in_unit, master.fragment.in_param
    shape = master.param.shape
    mine = tuple(whole.narrow(0, at.start, at.numel).view(shape) for whole in wholes)
    return mine, slice(own.start, own.stop)


def orthogonalized(direction: Tensor, *, eps: float) -> Tensor:
    """Return an approximation of the nearest orthogonal matrix, scaled by its shape.

    Vectors are returned unchanged.

    Args:
        direction: fp32, in the shape of the whole param.
        eps: Lower bound for the norm that divides it.
    """
    if direction.dim() < 2 or not direction.numel():
        return direction
    # A contiguous copy, [rows, columns], fp32; see [Note: memory of its own].
    matrix = direction.clone(memory_format=torch.contiguous_format).view(direction.shape[0], -1)
    rows, columns = matrix.shape
    near = matrix / torch.linalg.vector_norm(matrix).clamp(min=eps)
    # The iteration multiplies rows x rows matrices, so take the shorter side as rows.
    near = near.mT.contiguous() if rows > columns else near
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = near @ near.mT
        # One Newton-Schulz step: a X + (b A + c A^2) X with A = X X^T, [rows, rows].
        near = near * a + (gram * b + (gram @ gram) * c) @ near
    near = near.mT.contiguous() if rows > columns else near
    return (near * math.sqrt(max(1.0, rows / columns))).view(direction.shape)


def trust_ratio(weights: Tensor, direction: Tensor) -> Tensor:
    """Return the param's norm divided by the direction's, 0D fp32; 1 if either is zero."""
    # Copies; see [Note: memory of its own].
    norms = [torch.linalg.vector_norm(each.clone()) for each in (weights, direction)]
    ratio = norms[0] / norms[1]
    return torch.where((norms[0] > 0) & (norms[1] > 0), ratio, torch.ones_like(ratio))


def _groups_of(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Return the group of each leaf with a gradient."""
    return {
        leaf: group
        for group in optimizer.param_groups
        for leaf in group["params"]
        if leaf.grad is not None
    }
