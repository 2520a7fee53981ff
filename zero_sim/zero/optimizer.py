"""Optimizer state, sharded over ranks: the top layer of ZeRO.

Each rank keeps fp32 masters and moments only of the fragments that it owns (with stage 0: of
everything). An elementwise optimizer cannot tell a fragment from a param, so the update of the
fragments, put together, is the update of the params.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from zero_sim.errors import UsageError
from zero_sim.layout import Fragment, Span
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.division import divide_

OptimFactory = Callable[[ParamsT], Optimizer]
"""Builds the optimizer of one rank from the fp32 masters it is given."""

_NOT_ELEMENTWISE = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedFragment:
    """One fragment that this rank owns, with all its state: what a judge compares.

    The tensors are the engine's own memory: valid until the next call into it, and read only.
    """

    param: str
    """Name of the param."""
    buffer: int
    """Index into `ddp.buffers`."""
    bucket: int
    shard: int
    in_param: Span
    in_buffer: Span
    grad: Tensor  # 1D, in the gradient's dtype
    """The gradient as reduced, before any division after the sum; until `zero_grad`."""
    master: Tensor  # 1D fp32
    state: Mapping[str, Tensor]
    """The optimizer's own state, under its names; empty before the first step."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Master:
    """One owned fragment and the fp32 leaf that the inner optimizer steps."""

    buffer_index: int
    buffer: Buffer
    param: nn.Parameter
    fragment: Fragment
    leaf: nn.Parameter  # 1D fp32, a view of the bucket's master shard


class DistributedOptimizer:
    """An elementwise `torch.optim` optimizer over this rank's part of the params.

    A step, after `ddp.finish_grad_sync()`: reduced gradient -> fp32 -> divided -> stepped on the
    masters -> cast into the working params -> gathered from their owners.

    Args:
        ddp: The module and its buffers.
        optim_factory: Called once with the list of owned fp32 masters, each 1D. On a rank that owns
            nothing its result is only checked, and not kept.

    Raises:
        UsageError: If the optimizer is not elementwise, or is fused.
    """

    inner: Optimizer | None
    """The rank's optimizer; None on a rank that owns nothing."""
    master_shards: Mapping[tuple[int, int], Tensor]  # 1D fp32 each
    """Masters by (buffer, bucket) index, as long as a shard; padding is zero. Only where owned."""

    def __init__(self, ddp: DistributedDataParallel, *, optim_factory: OptimFactory) -> None:
        self.ddp = ddp
        self.master_shards, self._masters = _build_masters(ddp)
        leaves = [master.leaf for master in self._masters]
        # torch.optim refuses an empty list. A rank without params still calls the factory, so that
        # a refused optimizer is refused on all ranks alike and none waits for the others.
        stand_in = nn.Parameter(torch.zeros(0, device=ddp.divisor.device), requires_grad=False)
        inner = optim_factory(leaves or [stand_in])
        _check_shardable(inner)
        self.inner = inner if leaves else None

    @torch.no_grad()
    def step(self) -> None:
        """Update the working params of all ranks from the reduced gradients.

        The reduced gradients stay readable until `zero_grad`.

        Raises:
            UsageError: If `ddp.finish_grad_sync()` was not called for this step.
        """
        if not self.ddp.grads_reduced:
            raise UsageError(
                "Expected gradients summed over ranks but got this rank's own. "
                "Try ddp.finish_grad_sync() after the last backward and before step()."
            )
        for master in self._masters:
            master.leaf.grad = self._upcast_grad(master)
        if self.inner is not None:
            self.inner.step()
        for master in self._masters:
            master.buffer.write_param_shard(master.param, master.leaf)
            # fp32 copies of the gradients are only needed inside a step.
            master.leaf.grad = None
        # Outside any test of what this rank owns: a rank that owns nothing gathers like the others.
        if self.ddp.config.stage == 1:
            for buffer in self.ddp.buffers:
                buffer.allgather_params()

    def zero_grad(self) -> None:
        """Zero the gradient buffers for the next step."""
        self.ddp.zero_grad_buffer()

    def fragments(self) -> Iterator[OwnedFragment]:
        """Yield everything that this rank owns, in buffer order; with stage 0 the whole params.

        Params without elements have no fragment.
        """
        for master in self._masters:
            state = {} if self.inner is None else self.inner.state.get(master.leaf, {})
            yield OwnedFragment(
                param=master.fragment.param,
                buffer=master.buffer_index,
                bucket=master.fragment.bucket,
                shard=master.fragment.shard,
                in_param=master.fragment.in_param,
                in_buffer=master.fragment.in_buffer,
                grad=master.buffer.get_grad_shard(master.param),
                master=master.leaf.detach(),
                state={key: value for key, value in state.items() if isinstance(value, Tensor)},
            )

    def _upcast_grad(self, master: _Master) -> Tensor:
        reduced = master.buffer.get_grad_shard(master.param)
        # Always a copy: optimizers may write to the gradient (foreach SGD with nesterov does), and
        # the buffer has to keep what was reduced.
        grad = reduced.to(torch.float32, copy=True)
        if self.ddp.config.divide == "post":
            divide_(grad, divisor=self.ddp.divisor)
        return grad


def _build_masters(
    ddp: DistributedDataParallel,
) -> tuple[dict[tuple[int, int], Tensor], tuple[_Master, ...]]:
    """Allocate one flat fp32 shard a bucket and cut it into one leaf an owned fragment."""
    shards: dict[tuple[int, int], Tensor] = {}
    masters: list[_Master] = []
    for index, buffer in enumerate(ddp.buffers):
        for param, memory in buffer.memory.items():
            fragment = memory.fragment
            if fragment is None:
                continue
            key = (index, fragment.bucket)
            if key not in shards:
                shard_elems = buffer.plan.buckets[fragment.bucket].shard_elems
                shards[key] = torch.zeros(
                    shard_elems, dtype=torch.float32, device=buffer.grad_data.device
                )
            place = fragment.in_shard
            view = shards[key].narrow(0, place.start, place.numel)
            view.copy_(buffer.get_param_shard(param))
            leaf = nn.Parameter(view, requires_grad=False)
            masters.append(
                _Master(
                    buffer_index=index, buffer=buffer, param=param, fragment=fragment, leaf=leaf
                )
            )
    return shards, tuple(masters)


def _check_shardable(inner: Optimizer) -> None:
    """Refuse an optimizer whose update of a fragment is not that of the whole param."""
    name = type(inner).__name__
    if name in _NOT_ELEMENTWISE:
        raise UsageError(
            f"Expected an elementwise optimizer but got {name}, whose update of one element "
            f"depends on others that may lie on another rank. Try AdamW, Adam or SGD."
        )
    if any(group.get("fused") for group in inner.param_groups):
        raise UsageError(
            f"Expected fused=False but got {name} with fused=True. The fused CPU kernels round the "
            f"vector body and the scalar tail of a tensor differently, so the result would depend "
            f"on where shards are cut. Try foreach=True."
        )
