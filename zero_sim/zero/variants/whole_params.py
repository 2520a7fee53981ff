"""Optimizers whose step of an element depends on its whole param, over shards.

Their state is elementwise, and so is what they add to a master; in between stands a number or a
matrix that only the whole param gives. So a step has three parts: each owner computes its part of a
direction from its part of gradient and state; the parts are gathered; each owner computes what the
whole gives, and takes of it what is its own. Nothing but the directions is ever whole, a bucket at
a time. Where one rank has all of a param, nothing is gathered.

What the whole gives is computed in memory of its own, as the place of a matrix in a flat buffer can
change the bits of a product.
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
"""By leaf, a fragment of a master: tensors with a value for each of its elements."""
WholeOf = Callable[[Parts], Iterable[tuple[Tensor, tuple[Tensor, ...], slice]]]
"""Gathers parts: yields each leaf with the whole tensors, in the shape of its param, and where in
these, flattened, the leaf lies. Every rank calls it equally often, also without leaves."""

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def leaves_are_whole(parts: Parts) -> Iterator[tuple[Tensor, tuple[Tensor, ...], slice]]:
    """The `WholeOf` of leaves that are whole params."""
    for leaf, tensors in parts.items():
        yield leaf, tensors, slice(None)


class Muon(Optimizer):
    """Momentum whose matrices are made orthogonal before they are added.

    Tensors of more dimensions count as matrices of their first one; vectors and scalars are moved
    by their momentum as it is.

    Args:
        params: Masters, fp32.
        lr: Learning rate.
        momentum: Of the moving mean of gradients.
        nesterov: Whether the direction is the mean of gradient and momentum.
        eps: Least norm by which a matrix is divided.
        weight_decay: Decoupled, as AdamW's.

    Source:
        Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024), with its
        coefficients and five steps of Newton-Schulz, here in fp32; scaled by
        max(1, rows / columns)^0.5 as there.
    """

    gathers = 1
    """Quantities of which it needs the whole."""

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
        """Gather what the whole params give by the collectives of their owners.

        Raises:
            UsageError: If masters are on another device, or not stepped all at once.
        """
        _attach(self, optimizer)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore
        """Move all masters that have a gradient."""
        groups, directions = _groups_of(self), {}
        for leaf, group in groups.items():
            assert leaf.grad is not None
            state = self.state[leaf]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(leaf)
            mean = state["momentum_buffer"].lerp_(leaf.grad, 1 - group["momentum"])
            nesterov = group["nesterov"]
            directions[leaf] = (leaf.grad.lerp(mean, group["momentum"]) if nesterov else mean,)
        for leaf, (direction,), place in self.whole_of(directions):
            group = groups[leaf]
            update = orthogonalized(direction, eps=group["eps"]).reshape(-1)[place]
            leaf.mul_(1 - group["lr"] * group["weight_decay"])
            leaf.sub_(update.view(leaf.shape) * group["lr"])


class Lamb(Optimizer):
    """Adam whose step of each param is as long as the param, times the learning rate.

    Args:
        params: Masters, fp32.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Added to the direction, before its norm is taken.

    Source:
        You et al., "Large batch optimization for deep learning" (arXiv 1904.00962), algorithm 2,
        with bias correction and without bounds for the ratio, which is 1 where a norm is zero.
    """

    gathers = 2
    """Quantities of which it needs the whole."""

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
        """Gather what the whole params give by the collectives of their owners.

        Raises:
            UsageError: If masters are on another device, or not stepped all at once.
        """
        _attach(self, optimizer)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore
        """Move all masters that have a gradient."""
        groups, parts = _groups_of(self), {}
        directions: dict[Tensor, Tensor] = {}
        for leaf, group in groups.items():
            directions[leaf] = self._direction(leaf, group)
            parts[leaf] = (leaf.detach(), directions[leaf])
        for leaf, (weights, direction), _ in self.whole_of(parts):
            ratio = trust_ratio(weights, direction)
            leaf.sub_(directions[leaf] * (ratio * groups[leaf]["lr"]))

    def _direction(self, leaf: Tensor, group: Mapping[str, Any]) -> Tensor:
        assert leaf.grad is not None
        state = self.state[leaf]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(leaf)
            state["exp_avg_sq"] = torch.zeros_like(leaf)
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
            f"expected state_device={str(device)!r} with {type(inner).__name__}, which brings "
            f"whole params together with the params' own collectives, got "
            f"{str(optimizer.state_device)!r}. Try leaving it out."
        )
    if type(optimizer.stepper) is not AllAtOnce:
        raise UsageError(
            f"expected all gradients at once with {type(inner).__name__}, which steps whole "
            f"params, got {type(optimizer.stepper).__name__}. Remove `stepper`."
        )
    inner.whole_of = partial(_whole_of, optimizer, inner.gathers)


def _whole_of(
    optimizer: DistributedOptimizer, gathers: int, parts: Parts
) -> Iterator[tuple[Tensor, tuple[Tensor, ...], slice]]:
    """The `WholeOf` of fragments: bucket by bucket, on all ranks alike."""
    members: dict[tuple[int, int], list[Master]] = {}
    for master in optimizer.masters:
        if master.leaf in parts:
            members.setdefault((master.buffer_index, master.fragment.bucket), []).append(master)
    for index, buffer in enumerate(optimizer.ddp.buffers):
        for unit in buffer.units:
            here = members.get((index, unit.plan.index), [])
            wholes = []
            for which in range(gathers):
                shard = torch.zeros(unit.own_span.numel, device=buffer.device)
                for master in here:
                    place = master.fragment.in_shard
                    shard.narrow(0, place.start, place.numel).copy_(parts[master.leaf][which])
                wholes.append(whole_of_unit(unit, shard))
            for master in here:
                yield master.leaf, *_of_param(master, wholes)


def whole_of_unit(unit: Unit, shard: Tensor) -> Tensor:
    """Return the whole from each owner's shard, 1D; a collective where several own parts."""
    if unit.plan.partition.owner is not None or unit.plan.shard_count == 1:
        return shard
    whole = shard.new_empty(unit.plan.span.numel)
    unit.collect(whole, shard, sizes=unit.plan.shard_sizes, async_op=False)
    return whole


def _of_param(master: Master, wholes: list[Tensor]) -> tuple[tuple[Tensor, ...], slice]:
    """Of a unit's whole quantities what is one param's, and where in that the master lies."""
    at, own = master.buffer.memory[master.param].in_unit, master.fragment.in_param
    shape = master.param.shape
    mine = tuple(whole.narrow(0, at.start, at.numel).view(shape) for whole in wholes)
    return mine, slice(own.start, own.stop)


def orthogonalized(direction: Tensor, *, eps: float) -> Tensor:
    """Return the nearest orthogonal matrix, roughly, scaled by its shape; a vector as it is.

    Args:
        direction: fp32, a whole param's.
        eps: Least norm by which it is divided.
    """
    if direction.dim() < 2 or not direction.numel():
        return direction
    # A copy, in memory of its own: see above.
    matrix = direction.clone(memory_format=torch.contiguous_format).view(direction.shape[0], -1)
    rows, columns = matrix.shape
    near = matrix / torch.linalg.vector_norm(matrix).clamp(min=eps)
    near = near.mT.contiguous() if rows > columns else near
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = near @ near.mT
        near = near * a + (gram * b + (gram @ gram) * c) @ near
    near = near.mT.contiguous() if rows > columns else near
    return (near * math.sqrt(max(1.0, rows / columns))).view(direction.shape)


def trust_ratio(weights: Tensor, direction: Tensor) -> Tensor:
    """Return the norm of a whole param by that of its direction, 0D fp32; 1 where one is zero."""
    # Copies, in memory of their own: see above.
    norms = [torch.linalg.vector_norm(each.clone()) for each in (weights, direction)]
    ratio = norms[0] / norms[1]
    return torch.where((norms[0] > 0) & (norms[1] > 0), ratio, torch.ones_like(ratio))


def _groups_of(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """By leaf with a gradient its group."""
    return {
        leaf: group
        for group in optimizer.param_groups
        for leaf in group["params"]
        if leaf.grad is not None
    }
