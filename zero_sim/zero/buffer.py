"""Contiguous memory for the params of one kind and dtype: the lowest layer of ZeRO.

A `Buffer` turns a plan made of integers into memory. It knows flat tensors, views of them, and the
collectives over them; it knows nothing of modules, backward passes or optimizers.

With stage 1 the working params live in `param_data` and every rank owns one shard of each bucket.
With stage 0 params stay where they are, and each bucket is one shard that every rank owns: the
layers above need no second code path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.errors import LayoutError, UsageError
from zero_sim.layout import BufferPlan, Fragment, Span
from zero_sim.zero.collectives import (
    all_gather,
    all_reduce_sum,
    reduce_scatter_sum,
    size_and_rank,
)
from zero_sim.zero.config import Stage
from zero_sim.zero.division import divide_


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParamMemory:
    """The memory of one param: its whole gradient, and the parts that this rank owns."""

    name: str
    main_grad: Tensor  # ND, the param's shape
    """The whole gradient, accumulated on this rank; also `param.main_grad`."""
    fragment: Fragment | None
    """Where this rank's part lies; None where it owns nothing of the param."""
    own_grad: Tensor  # 1D
    """This rank's part of the gradient; the sum over ranks once the gradients are reduced."""
    own_working: Tensor  # 1D; stage 0: ND, the whole param in its own storage
    """This rank's part of the working param."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _BucketMemory:
    """One bucket as the collectives see it."""

    grads: Tensor  # 1D
    grad_shard: Tensor  # 1D, this rank's part of grads
    params: Tensor | None  # 1D; None with stage 0
    param_shard: Tensor | None  # 1D, this rank's part of params


class Buffer:
    """Flat gradients, and with stage 1 flat params, of one `BufferPlan`.

    Construction moves things: `param.main_grad` becomes a view of `grad_data`, and with stage 1
    `param.data` becomes a view of `param_data` that holds the same values. Both are contiguous in
    the param's logical order, whatever strides the param had.

    Args:
        plan: The layout. Its shard count must be the size of `group` with stage 1, and 1 with
            stage 0.
        params: The plan's params by name, all on one device.
        group: The ranks that reduce together; with stage 1, those that hold a shard each.
        stage: 0 or 1.
        grad_dtype: Dtype of the gradients.

    Raises:
        LayoutError: If the shard count does not fit the group, or `params` does not fit the plan.
    """

    plan: BufferPlan
    shard: int
    """Index of the shard that this rank owns."""
    grad_data: Tensor  # 1D
    param_data: Tensor | None  # 1D; None with stage 0

    def __init__(
        self,
        plan: BufferPlan,
        *,
        params: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        stage: Stage,
        grad_dtype: torch.dtype,
    ) -> None:
        self.plan = plan
        self.shard = _find_own_shard(plan, group=group, stage=stage)
        self._group = group
        _check_params(plan, params)
        first = next(iter(params.values()))
        # Zeros, not empty: padding takes part in every sum, and must stay zero through all of them.
        self.grad_data = torch.zeros(plan.span.numel, dtype=grad_dtype, device=first.device)
        self.param_data = None
        if stage == 1:
            self.param_data = torch.zeros(plan.span.numel, dtype=first.dtype, device=first.device)
        self._buckets = tuple(self._build_bucket_memory())
        self._memory = self._adopt(params)

    @property
    def memory(self) -> Mapping[nn.Parameter, ParamMemory]:
        """Each param of the buffer with its memory, in buffer order."""
        return self._memory

    def working_memory(self) -> list[Tensor]:
        """Return the working params as few tensors: the flat buffer, or with stage 0 each param."""
        if self.param_data is not None:
            return [self.param_data]
        return [param.detach() for param in self._memory]

    def zero_grads(self) -> None:
        """Set all gradients, and their padding, to zero."""
        self.grad_data.zero_()

    def divide_grads(self, divisor: Tensor) -> None:
        """Divide this rank's own gradients, in their dtype, by a 0D divisor."""
        for bucket in self._buckets:
            divide_(bucket.grads, divisor=divisor)

    def reduce_scatter_grads(self) -> None:
        """Sum gradients over the ranks; each rank gets the sum of its own shards.

        In place: afterwards only this rank's shards are sums, the rest is no longer of use.
        """
        self._require_shards("reduce_scatter_grads")
        for bucket in self._buckets:
            reduce_scatter_sum(bucket.grad_shard, bucket.grads, group=self._group)

    def all_reduce_grads(self) -> None:
        """Sum gradients over the ranks; every rank gets the whole sum."""
        for bucket in self._buckets:
            all_reduce_sum(bucket.grads, group=self._group)

    def allgather_params(self) -> None:
        """Fill every rank's working params with what their owners wrote."""
        self._require_shards("allgather_params")
        for bucket in self._buckets:
            assert bucket.params is not None
            assert bucket.param_shard is not None
            all_gather(bucket.params, bucket.param_shard, group=self._group)

    def get_grad_shard(self, param: nn.Parameter) -> Tensor:
        """Return this rank's part of a param's gradient.

        Returns:
            1D view into the buffer, in the gradient's dtype; empty where this rank owns nothing of
            the param.

        Raises:
            LayoutError: If the param is not in this buffer.
        """
        return self._find(param).own_grad

    def get_param_shard(self, param: nn.Parameter) -> Tensor:
        """Return this rank's part of a working param as a 1D tensor, to be read only.

        Raises:
            LayoutError: If the param is not in this buffer.
        """
        return self._find(param).own_working.reshape(-1)

    def write_param_shard(self, param: nn.Parameter, data: Tensor) -> None:
        """Write this rank's part of a working param, cast to its dtype.

        Other ranks see it after `allgather_params`.

        Args:
            param: A param of this buffer.
            data: 1D, as long as this rank's part; empty where the rank owns nothing of it.

        Raises:
            LayoutError: If the length is wrong, or the param is not in this buffer.
        """
        memory = self._find(param)
        working = memory.own_working
        if data.dim() != 1 or data.numel() != working.numel():
            raise LayoutError(
                f"Expected 1D data of {working.numel()} elements, this rank's part of the param, "
                f"but got shape {tuple(data.shape)} for param {memory.name!r}, "
                f"shard {self.shard} of {self.plan.policy.shard_count}."
            )
        working.copy_(data.detach().view(working.shape))

    def _adopt(self, params: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, ParamMemory]:
        """Point params and their gradients into the flat memory."""
        # A param lies in one bucket, and so has at most one fragment in this rank's shards.
        fragments = {fragment.param: fragment for fragment in self.plan.fragments(self.shard)}
        memory: dict[nn.Parameter, ParamMemory] = {}
        for placed in self.plan.params:
            param = params[placed.name]
            fragment = fragments.get(placed.name)
            nothing = Span(placed.span.start, placed.span.start)
            own = nothing if fragment is None else fragment.in_buffer
            main_grad = _view(self.grad_data, placed.span).view(param.shape)
            setattr(param, "main_grad", main_grad)  # noqa: B010  (nn.Parameter does not declare it)
            if self.param_data is not None:
                flat = _view(self.param_data, placed.span).view(param.shape)
                flat.copy_(param.detach())
                param.data = flat
            memory[param] = ParamMemory(
                name=placed.name,
                main_grad=main_grad,
                fragment=fragment,
                own_grad=_view(self.grad_data, own),
                own_working=(
                    param.detach() if self.param_data is None else _view(self.param_data, own)
                ),
            )
        return memory

    def _build_bucket_memory(self) -> Iterator[_BucketMemory]:
        for bucket in self.plan.buckets:
            # Every rank knows from the plan that an empty bucket has nothing to communicate.
            if bucket.span.empty:
                continue
            own = bucket.shard_span(self.shard)
            params = self.param_data
            yield _BucketMemory(
                grads=_view(self.grad_data, bucket.span),
                grad_shard=_view(self.grad_data, own),
                params=None if params is None else _view(params, bucket.span),
                param_shard=None if params is None else _view(params, own),
            )

    def _find(self, param: nn.Parameter) -> ParamMemory:
        memory = self._memory.get(param)
        if memory is None:
            raise LayoutError(
                f"Expected a param of buffer {self.plan.key} but got one of shape "
                f"{tuple(param.shape)} that is not in it. Frozen params are in no buffer."
            )
        return memory

    def _require_shards(self, call: str) -> None:
        if self.param_data is None:
            raise UsageError(
                f"Expected a buffer of stage 1 but got {call}() on one of stage 0, which has no "
                f"shards. Try all_reduce_grads()."
            )


def _view(flat: Tensor, span: Span) -> Tensor:
    return flat.narrow(0, span.start, span.numel)


def _find_own_shard(plan: BufferPlan, *, group: dist.ProcessGroup, stage: Stage) -> int:
    """Return this rank's shard index, from its rank inside `group`, never the global one."""
    group_size, rank = size_and_rank(group)
    expected = group_size if stage == 1 else 1
    shard_count = plan.policy.shard_count
    if shard_count != expected:
        why = "the size of its group" if stage == 1 else "as stage 0 does not shard"
        raise LayoutError(
            f"Expected a layout of {expected} shards, {why}, but got shard_count={shard_count} "
            f"in buffer {plan.key}. Try plan_buffers with LayoutPolicy(shard_count={expected})."
        )
    return rank if stage == 1 else 0


def _check_params(plan: BufferPlan, params: Mapping[str, nn.Parameter]) -> None:
    planned = {placed.name for placed in plan.params}
    if planned != params.keys():
        raise LayoutError(
            f"Expected the params that buffer {plan.key} was planned for but got "
            f"missing={sorted(planned - params.keys())}, extra={sorted(params.keys() - planned)}."
        )
    for placed in plan.params:
        shape = tuple(params[placed.name].shape)
        if shape != placed.spec.shape:
            raise LayoutError(
                f"Expected shape {placed.spec.shape}, as planned, but got {shape} "
                f"for param {placed.name!r}."
            )
