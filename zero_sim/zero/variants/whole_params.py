"""Optimizers over shards whose step of an element depends on its whole param.

Their state is elementwise, and so is the update of a master. But the update also needs a number or
a matrix computed from the whole param. So a step has three parts:

1. Each owner computes its part of a direction from its part of gradient and state.
2. The parts are gathered, one bucket at a time; nothing else is ever unsharded.
3. Each owner computes the whole update and applies its own part.

If one rank owns all of a param, nothing is gathered.

[Note: memory of its own]
The address of a matrix in a flat buffer can change the bits of a product. So whole matrices are
copied to their own memory first.
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
"""Tensors with one value per element of a leaf, by leaf; a leaf is a fragment of a master."""
WholeOf = Callable[[Parts], Iterable[tuple[Tensor, tuple[Tensor, ...], slice]]]
"""Gathers parts. Yields each leaf with the whole tensors, in the shape of its param, and the leaf's
slice of these, flattened. Every rank calls it equally often, even without leaves."""

# Coefficients and number of iterations of Jordan's Muon.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def leaves_are_whole(parts: Parts) -> Iterator[tuple[Tensor, tuple[Tensor, ...], slice]]:
    """Yield leaves that are whole params: the `WholeOf` without sharding."""
    for leaf, tensors in parts.items():
        yield leaf, tensors, slice(None)


class Muon(Optimizer):
    """Momentum with matrices made orthogonal before they are added.

    Tensors of more than two dimensions count as matrices of their first one. Vectors and scalars
    are moved by their momentum directly.

    Args:
        params: Masters, fp32.
        lr: Learning rate.
        momentum: Weight of the old mean in the moving mean of gradients.
        nesterov: True to use the mean of gradient and momentum as the direction.
        eps: Lower bound for the norm that divides a matrix.
        weight_decay: Decoupled, as in AdamW.

    Source:
        Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024), with its
        coefficients and five steps of Newton-Schulz, here in fp32; scaled by
        max(1, rows / columns)^0.5 as there.
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
        """Gather whole directions with the collectives of the params' owners.

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
    """Adam with each param's step scaled to the norm of the param, times the learning rate.

    Args:
        params: Masters, fp32.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Added to the direction before its norm is taken.

    Source:
        You et al., "Large batch optimization for deep learning" (arXiv 1904.00962), algorithm 2,
        with bias correction and without bounds for the ratio, which is 1 if a norm is zero.
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
        """Gather whole weights and directions with the collectives of the params' owners.

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
        # The ratio needs both wholes, but the update is elementwise, so it uses the own part.
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
    # Over all units, not over `parts`: ranks without a fragment take part in each collective.
    members: dict[tuple[int, int], list[Master]] = {}
    for master in optimizer.masters:
        if master.leaf in parts:
            members.setdefault((master.buffer_index, master.fragment.bucket), []).append(master)
    for index, buffer in enumerate(optimizer.ddp.buffers):
        for unit in buffer.units:
            here = members.get((index, unit.plan.index), [])
            # One whole 1D tensor per gathered quantity, in the order of `parts`.
            wholes = []
            for which in range(gathers):
                # 1D, one shard of this quantity; zeros for padding and frozen params.
                shard = torch.zeros(unit.own_span.numel, device=buffer.device)
                for master in here:
                    place = master.fragment.in_shard
                    shard.narrow(0, place.start, place.numel).copy_(parts[master.leaf][which])
                wholes.append(whole_of_unit(unit, shard))
            for master in here:
                yield master.leaf, *_of_param(master, wholes)


def whole_of_unit(unit: Unit, shard: Tensor) -> Tensor:
    """Return the whole of a unit from each owner's shard, 1D; a collective if several own parts."""
    # Decided from the plan, which is equal on all ranks, so they agree not to gather.
    if unit.plan.partition.owner is not None or unit.plan.shard_count == 1:
        return shard
    whole = shard.new_empty(unit.plan.span.numel)
    unit.collect(whole, shard, sizes=unit.plan.shard_sizes, async_op=False)
    return whole


def _of_param(master: Master, wholes: list[Tensor]) -> tuple[tuple[Tensor, ...], slice]:
    """Return one param's part of a unit's whole quantities, and the master's slice of it."""
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
    """Return the norm of a whole param over that of its direction, 0D fp32; 1 if either is zero."""
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
