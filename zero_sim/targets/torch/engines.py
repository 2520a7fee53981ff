"""Engines around your own optimizer, complete except for the communication under test.

    class MyTarget:
        name = "mine"
        capabilities = Capabilities(stages=(0,))
        numerics = Numerics(reported_grads="after-division")

        def build(self, module, *, scenario, group):
            optimizer = MyOptimizer(module.parameters(), **settings_of(scenario.optimizer))
            return WholeParamEngine(module, optimizer, group=group)

The engines use your optimizer's `step`, `param_groups` and `state`. To test your own communication,
override hooks: `reduce`, `update` and `share` in `WholeParamEngine`; `shard_of`, `reduce`, `update`
and `gather` in `FlatShardEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from torch.optim import Optimizer

from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.optim import LearningRates, flat_state


class _WholeWorkingParams:
    def __init__(self, module: nn.Module, *, group: ProcessGroup) -> None:
        self.module = module
        self.group = group
        self.named = {n: p for n, p in module.named_parameters() if p.requires_grad}

    def zero_grad(self) -> None:
        """Reset the gradients."""
        for param in self.named.values():
            param.grad = None

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward for one micro-batch; gradients accumulate on this rank."""
        # False if this rank's forward only reads frozen params.
        if loss.requires_grad:
            loss.backward()

    def params(self) -> Mapping[str, Tensor]:
        """Return all params, by their names in the bare model."""
        return self.named

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Name a param with a nonzero gradient after `zero_grad`; "" if there is none."""
        grads = {} if padding_only else {name: param.grad for name, param in self.named.items()}
        return next((f"param {n!r}" for n, g in grads.items() if g is not None and g.any()), "")


class WholeParamEngine(_WholeWorkingParams):
    """A rank with whole params, for systems such as DDP, or ZeRO-1 with an owner for each param.

    A step calls `reduce`, `update` and `share`. Gradients are reported as `reduce` leaves them, by
    default as means, so declare `Numerics(reported_grads="after-division")`.

    Args:
        module: The bare model. If forward goes through a wrapper such as DDP, assign the wrapper to
            `module` afterwards.
        optimizer: Your optimizer over all params, or over this rank's params.
        group: The data-parallel group.
        owner_of: For `Capabilities(stages=(1,))`, a function from a param's name to the group rank
            that steps it, or to None for a small param that every rank steps. None for
            `stages=(0,)`, where every rank steps all params.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        group: ProcessGroup,
        owner_of: Callable[[str], int | None] | None = None,
    ) -> None:
        super().__init__(module, group=group)
        # Public attributes, because hooks in subclasses use them.
        self.optimizer = optimizer
        self.owner_of = owner_of
        self.rates = LearningRates(optimizer)
        # Reduced gradients of the last step by name, in their param's shape.
        self.reduced: dict[str, Tensor] = {}

    def reduce(self) -> None:
        """Hook: turn `.grad` into the mean over all ranks, at least on the param's owner."""
        # All ranks loop in registration order, so they call collectives in the same order.
        for param in self.named.values():
            if param.requires_grad:  # False while the param is frozen.
                if param.grad is None:  # Another rank may have a gradient, so take part.
                    param.grad = torch.zeros_like(param)
                dist.all_reduce(param.grad, group=self.group)
                param.grad /= self.group.size()

    def update(self) -> StepResult | None:
        """Hook: step the params that this rank owns."""
        for name, param in self.named.items():
            if not self.owns(name):
                param.grad = None  # So that an optimizer over all params skips it.
        self.optimizer.step()
        return None

    def share(self) -> None:
        """Hook: send each param from its owner to all ranks.

        Override it to do nothing if the optimizer's `step` has sent them.
        """
        if self.owner_of is not None:
            for name, param in self.named.items():
                owner = self.owner_of(name)
                # If None, every rank has stepped the param.
                if owner is not None:
                    dist.broadcast(param.detach(), group_src=owner, group=self.group)

    def owns(self, name: str) -> bool:
        """Return True if this rank steps a param."""
        return self.owner_of is None or self.owner_of(name) in (None, self.group.rank())

    def state_of(self, param: nn.Parameter) -> Mapping[str, Any]:
        """Return the optimizer's state for a param by torch's keys; empty before the first step."""
        return self.optimizer.state.get(param, {})

    def step(self, *, lr_factor: float) -> StepResult | None:
        """Reduce gradients, update owned params, and share them."""
        self.reduce()
        # Copies, because clipping and some optimizers write to `.grad`.
        self.reduced = {n: p.grad.clone() for n, p in self.named.items() if p.grad is not None}
        self.rates.scale(lr_factor)
        result = self.update()
        self.share()
        return result

    def parts(self) -> Iterator[OwnedPart]:
        """Yield this rank's params, with reduced gradients and state."""
        for name, param in self.named.items():
            if self.owns(name):
                grad = self.reduced.get(name)
                # A param without an owner in a sharded system is stepped by every rank.
                alone = self.owner_of is None or self.owner_of(name) is not None
                replicas = 1 if alone else self.group.size()
                yield OwnedPart(
                    place=Place(param=name, start=0, stop=param.numel(), replicas=replicas),
                    grad=None if grad is None else grad.reshape(-1),
                    master=param.detach().reshape(-1),
                    state=flat_state(self.state_of(param)),
                )


@dataclass(kw_only=True, slots=True, eq=False)
class FlatBuffer:
    """All params with the same dtype, concatenated, and the shard that this rank steps."""

    named: dict[str, nn.Parameter]
    """Params by their names in the bare model; each is a view of `flat`."""
    flat: Tensor  # 1D, the params' dtype
    """The buffer: the elements of all params, then zeros as padding."""
    spans: list[tuple[int, int]]
    """Start and stop of each rank's shard in `flat`."""
    first: int
    """Offset of this rank's shard."""
    shard: nn.Parameter  # 1D, fp32
    """The shard's masters, including padding."""
    grad: Tensor | None = None  # 1D, fp32
    """Copy of the shard's reduced gradient, because some optimizers write to `shard.grad`."""


class FlatShardEngine(_WholeWorkingParams):
    """A ZeRO-1 rank that steps its shard of a flat buffer, with a buffer for each dtype.

    A step calls `reduce` for each buffer, `update`, and `gather` for each buffer. Masters are fp32.
    Declare `Capabilities(stages=(1,))` and `Numerics(reported_grads="after-division")`; with bf16
    params, also `reported_dtype="fp32"`.

    Args:
        module: The bare model; its params become views of the buffers.
        make_optimizer: Function from the shards, by buffer name, to your optimizer.
        group: The data-parallel group.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[dict[str, nn.Parameter]], Optimizer],
        *,
        group: ProcessGroup,
    ) -> None:
        super().__init__(module, group=group)
        # A flat tensor has a single dtype, so each dtype needs its own buffer.
        by_dtype: dict[str, dict[str, nn.Parameter]] = {}
        for name, param in self.named.items():
            by_dtype.setdefault(str(param.dtype), {})[name] = param
        self.buffers = {key: self._buffer(named) for key, named in by_dtype.items()}
        self.optimizer = make_optimizer({key: each.shard for key, each in self.buffers.items()})
        self.rates = LearningRates(self.optimizer)

    def shard_of(self, elems: int, rank: int) -> tuple[int, int]:
        """Hook: return start and stop of a rank's shard in a buffer.

        By default, all shards have the same length. The buffer is padded with zeros up to the last
        stop. If lengths differ, also override `reduce` and `gather` for gloo, which needs equal
        lengths.

        Args:
            elems: Elements in the buffer without padding.
            rank: The group rank.
        """
        # Rounded up, so that the shards cover the buffer.
        shard_elems = -(-elems // self.group.size())
        return rank * shard_elems, (rank + 1) * shard_elems

    def reduce(self, buffer: FlatBuffer, grads: Tensor) -> Tensor:
        """Hook: return this rank's shard of the mean gradient, in fp32.

        Args:
            buffer: The gradients' buffer.
            grads: This rank's gradients, including padding. 1D, the params' dtype.
        """
        own = torch.empty_like(buffer.shard, dtype=grads.dtype)  # [shard elems]
        pieces = [grads[start:stop] for start, stop in buffer.spans]
        dist.reduce_scatter(own, pieces, group=self.group)
        # Widen before the division, so that a mean of 16-bit gradients is not rounded to 16 bits.
        return own.float() / self.group.size()

    def update(self) -> StepResult | None:
        """Hook: step the shards."""
        self.optimizer.step()
        return None

    def gather(self, buffer: FlatBuffer) -> None:
        """Hook: fill `buffer.flat` with all ranks' updated shards."""
        # Views of `flat`, so that the call writes into the params.
        pieces = [buffer.flat[start:stop] for start, stop in buffer.spans]
        own = buffer.shard.detach().to(buffer.flat.dtype)
        dist.all_gather(pieces, own, group=self.group)

    def step(self, *, lr_factor: float) -> StepResult | None:
        """Reduce gradients to shards, update the shards, and gather the params."""
        # Reduce all buffers before the update, so that `update` can clip by the total norm.
        for each in self.buffers.values():
            each.shard.grad = self.reduce(each, _flat_grads(each))
            each.grad = each.shard.grad.clone()
        self.rates.scale(lr_factor)
        result = self.update()
        for each in self.buffers.values():
            self.gather(each)
        return result

    def parts(self) -> Iterator[OwnedPart]:
        """Yield the part of each param in this rank's shards."""
        for index, each in enumerate(self.buffers.values()):
            yield from flat_parts(
                each.named,
                first=each.first,
                master=each.shard,
                grad=each.grad,
                state=self.optimizer.state.get(each.shard, {}),
                buffer=index,
            )

    def stray_padding(self) -> str:
        """Name a buffer with nonzero padding; "" if there is none."""
        for key, each in self.buffers.items():
            elems = sum(param.numel() for param in each.named.values())
            # Padding begins at `elems`, which may be before, in or after this rank's shard.
            if each.flat[elems:].any() or each.shard[max(0, elems - each.first) :].any():
                return f"buffer {key}"
        return ""

    def _buffer(self, named: dict[str, nn.Parameter]) -> FlatBuffer:
        flat = torch.cat([param.detach().reshape(-1) for param in named.values()])
        spans = [self.shard_of(len(flat), rank) for rank in range(self.group.size())]
        # Zeros, because `stray_padding` reports any other padding.
        flat = pad(flat, (0, spans[-1][1] - len(flat)))
        first, stop = spans[self.group.rank()]
        # Clone, because float() returns an fp32 tensor itself, a view of `flat`.
        shard = nn.Parameter(flat[first:stop].float().clone())
        offset = 0
        # Params become views of the buffer, so that a gather into it updates them.
        for param in named.values():
            param.data = flat[offset : offset + param.numel()].view_as(param)
            offset += param.numel()
        return FlatBuffer(named=named, flat=flat, spans=spans, first=first, shard=shard)


def _flat_grads(buffer: FlatBuffer) -> Tensor:
    """Return this rank's padded gradients, with zeros for params without a gradient."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in buffer.named.values()]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    return pad(flat, (0, len(buffer.flat) - len(flat)))


def flat_parts(
    params: Mapping[str, Tensor],
    *,
    first: int,
    master: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Any],
    buffer: int = 0,
) -> Iterator[OwnedPart]:
    """Yield the parts of params in a rank's shard of a flat buffer, for an engine's `parts`.

    Args:
        params: All params in the buffer, in its order, by their names in the bare model.
        first: Offset of the shard in the buffer, in elements.
        master: The shard's masters. 1D, fp32.
        grad: The shard's reduced gradient. 1D, or None before the first step.
        state: The shard's optimizer state: 1D tensors of its length, 0D counters.
        buffer: Index of the buffer, if there are several.

    Example:
        A shard with elements 4 to 8 of a buffer with two params of 6 elements:

        >>> params = {"up": torch.zeros(2, 3), "down": torch.zeros(6)}
        >>> shard = torch.zeros(4)
        >>> for part in flat_parts(params, first=4, master=shard, grad=None, state={}):
        ...     print(part.place.param, part.place.start, part.place.stop)
        up 4 6
        down 0 2
    """
    # A param covers `start` to `stop` in the buffer, and `low` to `high` in the shard.
    start, state = 0, flat_state(state)
    for name, param in params.items():
        stop = start + param.numel()
        low, high = max(start, first), min(stop, first + len(master))
        if low < high:
            here = slice(low - first, high - first)
            yield OwnedPart(
                place=Place(
                    param=name,
                    start=low - start,
                    stop=high - start,
                    flat_start=low,
                    buffer=buffer,
                    # Includes padding, because the rounding of a shard's norm depends on offsets.
                    shard_start=first,
                    shard_stop=first + len(master),
                ),
                grad=None if grad is None else grad[here],
                master=master.detach()[here],
                state={key: each[here] if each.dim() else each for key, each in state.items()},
            )
        start = stop
