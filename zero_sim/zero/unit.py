"""A unit: a bucket with its memory, and the only code that issues the bucket's collectives.

`zero_sim.zero.states` defines the states of its gradients and params.

Source: ZeRO (arXiv 1910.02054), section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.errors import UsageError
from zero_sim.layout import BucketPlan, Fragment, Span
from zero_sim.zero.collectives import (
    all_gather,
    all_gather_uneven,
    all_reduce_sum,
    broadcast_from_owner,
    reduce_scatter_sum,
    reduce_scatter_uneven_sum,
    reduce_to_owner_sum,
)
from zero_sim.zero.config import Divide
from zero_sim.zero.division import scale_before_sum_
from zero_sim.zero.groups import KindGroups
from zero_sim.zero.states import (
    GradState,
    GradStep,
    ParamState,
    ParamStep,
    next_grad_state,
    next_param_state,
)
from zero_sim.zero.storage import Storage


@dataclass(kw_only=True, slots=True, eq=False)
class ParamMemory:
    """A param's memory: its unsharded gradient, and the parts that this rank owns."""

    name: str
    param: nn.Parameter
    in_unit: Span
    """The param's elements, counted from the start of the unit."""
    main_grad: Tensor | None  # ND, the param's shape
    """The unsharded gradient, accumulated on this rank; also `param.main_grad`. None if not in
    memory."""
    fragment: Fragment | None
    """Position of this rank's part; None if this rank owns nothing."""
    own_grad: Tensor  # 1D
    """This rank's part of the gradient; after the reduction, the sum over ranks."""
    param_shard: Tensor  # 1D; at stage 0: ND, the whole param in its own storage
    """This rank's part of the working param."""
    unit: Unit | None
    """None for an empty param in an empty bucket."""


@dataclass(kw_only=True, slots=True, eq=False)
class Unit:
    """A non-empty bucket with its memory and collectives.

    `reduce` and `gather` return after completion. To do other work in between, call `start_reduce`,
    `chain_reduce` and `finish_reduce`, or `start_gather` and `finish_gather`. A second finish, or a
    finish without a start, does nothing.
    """

    name: str
    """Name in messages: `bucket 2 of dense/bf16`."""
    plan: BucketPlan
    own_span: Span
    """This rank's shard, as offsets into the unit."""
    groups: KindGroups
    grad_storage: Storage
    """Unsharded gradients. If transient, this rank's shard moves into `grad_total` after the
    reduction."""
    grad_total: Tensor | None = None  # 1D, as long as a shard; None without accumulated sums
    param_storage: Storage | None
    """Unsharded params. None at stage 0, where they stay in the module's own memory."""
    param_shard: Tensor | None = None  # 1D; None at stage 0
    """This rank's shard of the params; only this rank writes it."""
    members: list[ParamMemory] = field(default_factory=list)
    grad_state: GradState = GradState.EMPTY
    param_state: ParamState = ParamState.WHOLE
    # The sum in flight: over the shard group, or over the replicas.
    _reducing: dist.Work | None = None
    # False while the sum over the replicas is not issued yet.
    _chained: bool = True
    _gathering: dist.Work | None = None
    # True if `grad_total` contains sums from earlier micro-batches in this step.
    _has_sum: bool = False
    # Number of modules that use the params now; modules may be nested.
    _users: int = 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The shard group; None if each rank holds everything."""
        return self.groups.shard_group

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same shard; None without replicas."""
        return self.groups.replica_group

    @property
    def frees_grads(self) -> bool:
        """True if unsharded gradients are freed after the reduction."""
        return not self.grad_storage.stays

    @property
    def frees_params(self) -> bool:
        """True if unsharded params are freed after use."""
        return self.param_storage is not None and not self.param_storage.stays

    @property
    def grads(self) -> Tensor:
        """This rank's unsharded gradients, 1D, with padding."""
        whole = self.grad_storage.whole
        if whole is None:
            raise self._without_memory()
        return whole

    @property
    def grad_shard(self) -> Tensor:
        """This rank's shard of the gradients, 1D."""
        return _view(self.grads, self.own_span)

    @property
    def params(self) -> Tensor | None:
        """The unsharded params, 1D, with padding; None if not in memory, or nothing is sharded."""
        return None if self.param_storage is None else self.param_storage.whole

    @property
    def gathering(self) -> bool:
        """True if a gather is in flight on this rank."""
        return self._gathering is not None

    @property
    def is_sharded(self) -> bool:
        """True if only this rank's shard of the params is in memory."""
        if not self.frees_params:
            return False
        return self.param_state in (ParamState.SHARDED, ParamState.UPDATED)

    @property
    def reducing(self) -> bool:
        """True if a reduction is in flight on this rank."""
        return self._reducing is not None

    # The life of gradients.

    def fill(self) -> None:
        """Allocate this rank's gradients as zeros, unless they are resident."""
        if self.grad_state is GradState.FILLING:
            return
        self._step_grads("fill")
        # Zeros, because add_grad accumulates, and missing gradients take part in the sum too.
        if self.frees_grads:
            whole = self.grad_storage.acquire()
            for memory in self.members:
                grad = _view(whole, memory.in_unit).view(memory.param.shape)
                memory.main_grad = grad
                set_main_grad(memory.param, grad)

    def add_grad(self, memory: ParamMemory, grad: Tensor) -> None:
        """Add to a param's gradient on this rank; `grad` has the param's shape."""
        if memory.main_grad is None:
            raise self._without_memory()
        memory.main_grad.add_(grad)

    def scale_grads(self, divide: Divide, *, divisor: Tensor) -> None:
        """Divide this rank's gradients, if `divide` does so before the sum."""
        scale_before_sum_(self.grads, divide, divisor=divisor)

    def reduce(self) -> None:
        """Sum over all training ranks, in place."""
        self._step_grads("reduce")
        self._sum_shards(async_op=False)
        self._sum_replicas(async_op=False)
        self._end_reduce()

    def start_reduce(self) -> None:
        """Issue the sum over the shard group; at stage 0, over the replicas."""
        self._step_grads("reduce")
        # At stage 0 there is no shard group, so the replicas' sum is the only sum.
        if self.group is None:
            self._reducing = self._sum_replicas(async_op=True)
            return
        self._reducing = self._sum_shards(async_op=True)
        # The sum over replicas follows in chain_reduce(), because it adds these partial sums.
        self._chained = False

    def chain_reduce(self) -> None:
        """If there are replicas, wait for the first sum and issue the sum over replicas."""
        # Ranks with an empty shard wait too, because some variants end a sum with a second call.
        if self._chained:
            return
        self._chained = True
        if self.replica_group is not None:
            self._wait_reduce()
            self._reducing = self._sum_replicas(async_op=True)

    def finish_reduce(self) -> None:
        """Wait until this rank's shard is the sum over all training ranks."""
        if self.grad_state is GradState.REDUCED:
            return
        self.chain_reduce()
        self._wait_reduce()
        self._end_reduce()

    def accumulate_sum(self, *, is_first: bool) -> None:
        """Add a micro-batch's sum to the step's previous sums, and zero the gradients."""
        assert self.grad_total is not None
        if is_first:
            self.grad_total.copy_(self.grad_shard)
        else:
            self.grad_total.add_(self.grad_shard)
        # The next micro-batch reuses resident memory, and accumulates from zero.
        if not self.frees_grads:
            self.grads.zero_()

    def reset_grads(self) -> None:
        """Drop the step's gradients and sums. The `Buffer` zeroes memory that units share."""
        if self.grad_state is not GradState.EMPTY:
            self._step_grads("reset")
        self._has_sum = False
        if self.frees_grads:
            assert self.grad_total is not None
            self.grad_total.zero_()
            self._free_grads()

    # The life of params.

    def gather(self) -> None:
        """Gather the params from the shard group, and wait."""
        # Another gather may still be in flight, for instance after prefetching.
        self.finish_gather()
        self._step_params("gather")
        self._gather_shards(async_op=False)
        self._adopt_unsharded()

    def start_gather(self) -> None:
        """Issue the gather."""
        self.finish_gather()
        self._step_params("gather")
        self._gathering = self._gather_shards(async_op=True)

    def finish_gather(self) -> None:
        """Wait until the params have their owners' values."""
        if self.param_state is not ParamState.GATHERING:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self._adopt_unsharded()

    def use(self) -> None:
        """Mark that a module begins to use the unsharded params; modules may be nested."""
        self._users += 1
        # If the gather has not ended, the params are not ready: reading them is a race.
        if self.param_state is ParamState.WHOLE:
            self._step_params("use")

    def leave(self) -> None:
        """Mark that a module no longer uses the unsharded params."""
        # At least 0, because a module that failed early calls leave() without use().
        self._users = max(0, self._users - 1)
        if not self._users and self.param_state is ParamState.IN_USE:
            self._step_params("leave")

    def update(self) -> None:
        """Wait for a gather in flight, which may read this rank's shard, and mark a write to it."""
        self.finish_gather()
        is_there = self.frees_params and self.params is not None
        if self.param_storage is None or is_there or self.param_state is ParamState.UPDATED:
            # Params are never gathered, or the unsharded params must be freed first, or another
            # param in this unit was written before.
            return
        self._step_params("update")

    def reshard(self) -> None:
        """Reshard: free the unsharded params and point each param to a placeholder."""
        if not self.frees_params:
            return
        self.finish_gather()
        self._step_params("free")
        assert self.param_storage is not None
        self.param_storage.release()
        for memory in self.members:
            memory.param.data = absent(memory.param)

    @property
    def _has_replica_sum(self) -> bool:
        # An uneven shard can be empty. Then it is empty on all replicas, so none issues a sum.
        return self.replica_group is not None and self.own_span.numel > 0

    def _wait_reduce(self) -> None:
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None

    def _end_reduce(self) -> None:
        self._step_grads("finish")
        # If gradients are transient, keep only this rank's shard of the sum.
        if self.frees_grads:
            self.accumulate_sum(is_first=not self._has_sum)
            self._has_sum = True
            self._free_grads()

    def _free_grads(self) -> None:
        # Drop `main_grad` too, because these views would keep the memory.
        self.grad_storage.release()
        for memory in self.members:
            memory.main_grad = None
            set_main_grad(memory.param, None)

    def _adopt_unsharded(self) -> None:
        self._step_params("finish")
        if self.frees_params:
            whole = self.params
            assert whole is not None
            for memory in self.members:
                # Views into new memory: the address may change with each gather.
                memory.param.data = _view(whole, memory.in_unit).view(memory.param.shape)

    def _sum_shards(self, *, async_op: bool) -> dist.Work | None:
        if self.group is None:
            return None
        return self._scatter(self.grad_shard, self.grads, group=self.group, async_op=async_op)

    def _sum_replicas(self, *, async_op: bool) -> dist.Work | None:
        if not self._has_replica_sum:
            return None
        assert self.replica_group is not None
        return all_reduce_sum(self.grad_shard, group=self.replica_group, async_op=async_op)

    def _gather_shards(self, *, async_op: bool) -> dist.Work | None:
        assert self.param_storage is not None
        whole = self.param_storage.acquire()
        sizes = self.plan.shard_sizes
        return self.collect(whole, self.param_shard, sizes=sizes, async_op=async_op)

    def _scatter(
        self,
        part: Tensor,
        whole: Tensor,
        *,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """Sum `whole` over a group and write this rank's shard to `part`."""
        sizes = self.plan.shard_sizes
        # The plan selects the collective. It is equal on all ranks, so they agree.
        call = partial(reduce_scatter_sum, part, whole, group=group)
        if self.plan.partition.owner is not None:
            call = partial(reduce_to_owner_sum, whole, owner=_index_of(sizes), group=group)
        elif not self.plan.is_even:
            call = partial(reduce_scatter_uneven_sum, part, whole, sizes=sizes, group=group)
        return call(async_op=True) if async_op else call()

    def collect(
        self,
        whole: Tensor,
        part: Tensor | None,
        *,
        sizes: tuple[int, ...],
        async_op: bool,
    ) -> dist.Work | None:
        """Fill `whole` with all shards in the group."""
        group = self.group
        assert part is not None
        assert group is not None
        call = partial(all_gather, whole, part, group=group)
        if self.plan.partition.owner is not None:
            call = partial(broadcast_from_owner, whole, part, owner=_index_of(sizes), group=group)
        elif not self.plan.is_even:
            call = partial(all_gather_uneven, whole, part, sizes=sizes, group=group)
        return call(async_op=True) if async_op else call()

    def _step_grads(self, step: GradStep) -> None:
        self.grad_state = next_grad_state(self.grad_state, step, of=self._described)

    def _step_params(self, step: ParamStep) -> None:
        self.param_state = next_param_state(self.param_state, step, of=self._described)

    def _without_memory(self) -> UsageError:
        return UsageError(
            f"expected the gradients of {self._described()} to be in memory, got "
            f"{self.grad_state.upper()}: 'fill' is missing."
        )

    def _described(self) -> str:
        return f"{self.name} ({', '.join(repr(memory.name) for memory in self.members)})"


def absent(param: nn.Parameter) -> Tensor:
    """Return a placeholder for a sharded param: a single NaN, expanded to the param's shape."""
    # A forward that reads it without a gather computes NaN, not values from freed memory. If
    # autograd saves the placeholder, `OnUse` raises an error.
    # fp32 first, because torch cannot fill all param dtypes, for example fp8.
    value = torch.full((), float("nan"), dtype=torch.float32, device=param.device)
    return value.to(param.dtype).expand(param.shape)


def set_main_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    """Set `param.main_grad`, the param's unsharded gradient on this rank; None if absent."""
    setattr(param, "main_grad", grad)  # noqa: B010  (nn.Parameter does not declare it)


def _index_of(sizes: tuple[int, ...]) -> int:
    """Return the group rank that owns all elements."""
    return next(index for index, size in enumerate(sizes) if size)


def _view(flat: Tensor, span: Span) -> Tensor:
    return flat.narrow(0, span.start, span.stop - span.start)
