"""Contiguous memory for the params of one kind and dtype: the lowest layer of ZeRO.

A `Buffer` turns a plan made of integers into memory. It knows flat tensors, views of them, and the
collectives over them; it knows nothing of modules, backward passes or optimizers.

With stage 1 the working params live in `param_data` and every rank owns one shard of each bucket.
With stage 0 params stay where they are, and each bucket is one shard that every rank owns: the
layers above need no second code path.

With redundancy the ranks that shard are a part of those that train. After the reduce-scatter among
them a shard holds the sum over that part; a second sum, over the ranks that hold the same shard in
the other parts, makes it the sum over all. Gathers stay inside the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.errors import LayoutError, UsageError
from zero_sim.layout import BucketPlan, BufferPlan, Fragment, Span
from zero_sim.zero.collectives import (
    all_gather,
    all_gather_uneven,
    all_reduce_sum,
    reduce_scatter_sum,
    reduce_scatter_uneven_sum,
    size_and_rank,
)
from zero_sim.zero.config import Divide, Stage
from zero_sim.zero.division import divide_, multiply_by_reciprocal_
from zero_sim.zero.fp8 import dequantize, quantize_


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
    scale: Tensor | None  # 0D fp32
    """What the values of an fp8 param are multiplied by; None for other dtypes."""


@dataclass(kw_only=True, slots=True, eq=False)
class Bucket:
    """One bucket with elements, as the collectives see it; they are issued here and nowhere else.

    `reduce` and `gather` come back when they are done. `start_reduce`, then `chain_reduce`, then
    `finish_reduce`, and `start_gather`, then `finish_gather`, are the same in steps, between which
    the rank may do something else; finishing twice, or without a start, does nothing.
    """

    plan: BucketPlan
    grads: Tensor  # 1D
    grad_shard: Tensor  # 1D, this rank's part of grads
    grad_total: Tensor | None  # 1D, as long as grad_shard; None without accumulated sums
    params: Tensor | None  # 1D; None with stage 0
    param_shard: Tensor | None  # 1D, this rank's part of params
    group: dist.ProcessGroup
    replica_group: dist.ProcessGroup | None
    _reducing: dist.Work | None = None
    _chained: bool = True
    _gathering: dist.Work | None = None

    @property
    def gathering(self) -> bool:
        """Whether a gather was started that this rank has not waited for."""
        return self._gathering is not None

    @property
    def reducing(self) -> bool:
        """Whether a reduction was started that this rank has not waited for."""
        return self._reducing is not None

    def scale_grads(self, divide: Divide, *, divisor: Tensor) -> None:
        """Do to this rank's own gradients what `divide` does before the sum."""
        if divide == "pre":
            divide_(self.grads, divisor=divisor)
        elif divide == "premul":
            multiply_by_reciprocal_(self.grads, divisor=divisor)

    def reduce(self) -> None:
        """Sum over all ranks that train, in place."""
        self._sum_shards(async_op=False)
        self._sum_replicas(async_op=False)

    def start_reduce(self) -> None:
        """Issue the first of the two sums."""
        self._reducing = self._sum_shards(async_op=True)
        self._chained = False

    def chain_reduce(self) -> None:
        """Wait for the first sum and issue the second, if there are replicas."""
        if self._chained:
            return
        self._chained = True
        if self._has_replica_sum:
            self._wait_reduce()
            self._reducing = self._sum_replicas(async_op=True)

    def finish_reduce(self) -> None:
        """Wait until `grad_shard` is the sum over all ranks that train."""
        self.chain_reduce()
        self._wait_reduce()

    def accumulate_sum(self, *, is_first: bool) -> None:
        """Move the sum of one micro-batch to those before it, and zero the gradients."""
        assert self.grad_total is not None
        if is_first:
            self.grad_total.copy_(self.grad_shard)
        else:
            self.grad_total.add_(self.grad_shard)
        self.grads.zero_()

    def gather(self) -> None:
        """Fill the params with what their owners wrote."""
        self.finish_gather()
        self._gather_shards(async_op=False)

    def start_gather(self) -> None:
        """Issue the gather."""
        self.finish_gather()
        self._gathering = self._gather_shards(async_op=True)

    def finish_gather(self) -> None:
        """Wait until the params are what their owners wrote."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    @property
    def _has_replica_sum(self) -> bool:
        # With uneven shards this one can be empty; then it is on all its replicas.
        return self.replica_group is not None and self.grad_shard.numel() > 0

    def _wait_reduce(self) -> None:
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None

    def _sum_shards(self, *, async_op: bool) -> dist.Work | None:
        if self.params is None:
            call = partial(all_reduce_sum, self.grads, group=self.group)
        elif self.plan.is_even:
            call = partial(reduce_scatter_sum, self.grad_shard, self.grads, group=self.group)
        else:
            call = partial(
                reduce_scatter_uneven_sum,
                self.grad_shard,
                self.grads,
                sizes=self.plan.shard_sizes,
                group=self.group,
            )
        return call(async_op=True) if async_op else call()

    def _sum_replicas(self, *, async_op: bool) -> dist.Work | None:
        if not self._has_replica_sum:
            return None
        assert self.replica_group is not None
        return all_reduce_sum(self.grad_shard, group=self.replica_group, async_op=async_op)

    def _gather_shards(self, *, async_op: bool) -> dist.Work | None:
        assert self.params is not None
        assert self.param_shard is not None
        call = partial(all_gather, self.params, self.param_shard, group=self.group)
        if not self.plan.is_even:
            call = partial(
                all_gather_uneven,
                self.params,
                self.param_shard,
                sizes=self.plan.shard_sizes,
                group=self.group,
            )
        return call(async_op=True) if async_op else call()


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
        scales: Of each fp8 param its scale, 0D fp32, in the module's own memory.
        replica_group: With redundancy, the ranks that hold this rank's shard in all blocks.
        accumulate_sums: Whether sums of several micro-batches are added up, in memory of their own
            as long as this rank's shards.

    Raises:
        LayoutError: If the shard count does not fit the group, or `params` does not fit the plan.
    """

    plan: BufferPlan
    shard: int
    """Index of the shard that this rank owns."""
    grad_data: Tensor  # 1D
    param_data: Tensor | None  # 1D; None with stage 0
    total_data: Tensor | None  # 1D, this rank's shards one after another; None without such sums
    buckets: tuple[Bucket, ...]
    """Those with elements: every rank knows from the plan that others have nothing to exchange."""

    def __init__(
        self,
        plan: BufferPlan,
        *,
        params: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        stage: Stage,
        grad_dtype: torch.dtype,
        scales: Mapping[nn.Parameter, Tensor] | None = None,
        replica_group: dist.ProcessGroup | None = None,
        accumulate_sums: bool = False,
    ) -> None:
        self.plan = plan
        self.shard = _find_own_shard(plan, group=group, stage=stage)
        _check_params(plan, params)
        first = next(iter(params.values()))
        # Zeros, not empty: padding takes part in every sum, and must stay zero through all of them.
        self.grad_data = torch.zeros(plan.span.numel, dtype=grad_dtype, device=first.device)
        self.param_data = None
        if stage == 1:
            self.param_data = torch.zeros(plan.span.numel, dtype=first.dtype, device=first.device)
        self.total_data = None
        if accumulate_sums:
            own_elems = sum(bucket.shard_span(self.shard).numel for bucket in plan.buckets)
            self.total_data = torch.zeros(own_elems, dtype=grad_dtype, device=first.device)
        by_index = self._build_buckets(group=group, replica_group=replica_group)
        self.buckets = tuple(by_index.values())
        self._memory = self._adopt(params, buckets=by_index, scales=scales or {})
        self._bucket_of = {
            params[placed.name]: by_index[placed.bucket]
            for placed in plan.params
            if placed.bucket in by_index
        }

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
        """Set all gradients, their sums and their padding, to zero."""
        self.grad_data.zero_()
        if self.total_data is not None:
            self.total_data.zero_()

    def reduce_scatter_grads(self) -> None:
        """Sum gradients over the ranks, all replicas included; each gets those of its own shards.

        In place: afterwards only this rank's shards are sums, the rest is no longer of use.
        """
        self._require_shards("reduce_scatter_grads")
        for bucket in self.buckets:
            bucket.reduce()

    def all_reduce_grads(self) -> None:
        """Sum gradients over the ranks that share this buffer's group; each gets the whole sum."""
        for bucket in self.buckets:
            all_reduce_sum(bucket.grads, group=bucket.group)

    def bucket_of(self, param: nn.Parameter) -> Bucket | None:
        """Return the bucket that holds a param; None for an empty param in a bucket of such.

        Raises:
            LayoutError: If the param is not in this buffer.
        """
        self._find(param)
        return self._bucket_of.get(param)

    def allgather_params(self) -> None:
        """Fill every rank's working params with what their owners wrote."""
        self._require_shards("allgather_params")
        for bucket in self.buckets:
            bucket.gather()

    def get_grad_shard(self, param: nn.Parameter) -> Tensor:
        """Return this rank's part of a param's gradient, summed once the gradients are reduced.

        Returns:
            1D view into the buffer, or into `total_data` where there is one, in the gradient's
            dtype; empty where this rank owns nothing of the param.

        Raises:
            LayoutError: If the param is not in this buffer.
        """
        return self._find(param).own_grad

    def get_param_shard(self, param: nn.Parameter) -> Tensor:
        """Return this rank's part of a working param as a 1D tensor, to be read only.

        Of an fp8 param the weights that it stands for, in fp32.

        Raises:
            LayoutError: If the param is not in this buffer.
        """
        memory = self._find(param)
        working = memory.own_working.reshape(-1)
        return working if memory.scale is None else dequantize(working, scale=memory.scale)

    def write_param_shard(self, param: nn.Parameter, data: Tensor) -> None:
        """Write this rank's part of a working param, cast to its dtype; fp8 at its present scale.

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
        # A gather in flight may still read the shard that is written here.
        bucket = self._bucket_of.get(param)
        if bucket is not None:
            bucket.finish_gather()
        data = data.detach().view(working.shape)
        if memory.scale is None:
            working.copy_(data)
        else:
            quantize_(working, data, scale=memory.scale)

    def _adopt(
        self,
        params: Mapping[str, nn.Parameter],
        *,
        buckets: Mapping[int, Bucket],
        scales: Mapping[nn.Parameter, Tensor],
    ) -> dict[nn.Parameter, ParamMemory]:
        """Point params and their gradients into the flat memory."""
        # A param lies in one bucket, and so has at most one fragment in this rank's shards.
        fragments = {fragment.param: fragment for fragment in self.plan.fragments(self.shard)}
        memory: dict[nn.Parameter, ParamMemory] = {}
        for placed in self.plan.params:
            param = params[placed.name]
            fragment = fragments.get(placed.name)
            nothing = Span(placed.span.start, placed.span.start)
            own = nothing if fragment is None else fragment.in_buffer
            own_grad = _view(self.grad_data, own)
            if fragment is not None:
                total = buckets[placed.bucket].grad_total
                own_grad = own_grad if total is None else _view(total, fragment.in_shard)
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
                own_grad=own_grad,
                own_working=(
                    param.detach() if self.param_data is None else _view(self.param_data, own)
                ),
                scale=scales.get(param),
            )
        return memory

    def _build_buckets(
        self, *, group: dist.ProcessGroup, replica_group: dist.ProcessGroup | None
    ) -> dict[int, Bucket]:
        buckets: dict[int, Bucket] = {}
        total_start = 0
        for plan in self.plan.buckets:
            if plan.span.empty:
                continue
            own = plan.shard_span(self.shard)
            total = None
            if self.total_data is not None:
                total = self.total_data.narrow(0, total_start, own.numel)
                total_start += own.numel
            params = self.param_data
            buckets[plan.index] = Bucket(
                plan=plan,
                grads=_view(self.grad_data, plan.span),
                grad_shard=_view(self.grad_data, own),
                grad_total=total,
                params=None if params is None else _view(params, plan.span),
                param_shard=None if params is None else _view(params, own),
                group=group,
                replica_group=replica_group,
            )
        return buckets

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
