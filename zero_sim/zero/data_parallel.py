"""Gradients of a module, accumulated locally and summed over ranks: the middle layer of ZeRO.

The life of a gradient: autograd writes `param.grad`; a hook adds it to `param.main_grad`, a view
of the flat buffer, and drops it; after the last micro-batch `finish_grad_sync` sums the buffers
over ranks; the optimizer reads its part; `zero_grad_buffer` starts the next step.

A step of several micro-batches, in full; what the config does not ask for may be left out:

    for each micro-batch:
        ddp.add_rows(rows)                   # divide_by="tokens"
        ddp.begin_last_micro_batch()         # overlap_grads: the last one; sync="every": each
        loss.backward()
        ddp.end_micro_batch(last=...)        # of the last, finish_grad_sync() is the same
    optimizer.step()                         # ends with ddp.start_param_gather()
    optimizer.zero_grad()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_sim.errors import ModelError, UsageError
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.buffered_module import build_buffers, find_replicated_tensors
from zero_sim.zero.collectives import broadcast_from_first, size_and_rank
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.division import build_divisor
from zero_sim.zero.gathers import ParamSchedule
from zero_sim.zero.groups import (
    Holders,
    KindGroups,
    KindOf,
    all_dense,
    check_groups,
    check_kind_groups,
)
from zero_sim.zero.model import PlainCast, find_trainable_params
from zero_sim.zero.schedule import GradSchedule, Wrapped, order_by_forward
from zero_sim.zero.seams import TEXTBOOK, Seams
from zero_sim.zero.step_count import StepCount
from zero_sim.zero.unit import ParamMemory, Unit


class DistributedDataParallel:
    """A module whose trainable params and gradients live in flat buffers.

    It lives as long as somebody holds it, an optimizer for instance; the module does not. Frozen
    params stay as they are and cost nothing. A trainable param that takes no part in a step
    has a gradient of zero, on every rank, and is stepped with it.

    Args:
        module: What is trained; its params are re-pointed into buffers.
        config: Stage, numerics and layout.
        group: The ranks that train together; with redundancy also the block of consecutive ranks
            that shard together, and the ranks that hold the same shard in all blocks, from
            `build_redundancy_groups`.
        kind_of: Tells kinds apart, such as `dense` and `expert`; all are `dense` where left out.
        kind_groups: By kind: the groups of params that not all of `group` hold, such as experts,
            from `build_expert_groups`. A kind without an entry is held by all. The groups must lie
            inside `group`, and no rank may be without a param of such a kind.
        buffer_of: By name: params with different numbers share no buffer, such as those of
            different param groups. They differ in kind and dtype alone where left out.
        broadcast_params: True if group rank 0's params and module buffers replace all others' here.
            If False, the caller vouches that every rank built the same bits.
        seams: The parts that are exchanged for others.

    Raises:
        ModelError: If the module cannot be trained; see `find_trainable_params`.
        LayoutError: If the config asks for a layout that cannot exist.
        UsageError: If a group is missing, is not as said above or does not hold this process.
    """

    params: dict[str, nn.Parameter]
    """Trainable params by name, in registration order; a tied param once."""
    cast: PlainCast
    """How masters become working params."""
    divisor: Tensor  # 0D fp32
    """What gradients are divided by: the count of the step once it is known, before the world size.
    """
    step_count: StepCount
    grad_schedule: GradSchedule
    param_schedule: ParamSchedule

    def __init__(
        self,
        module: nn.Module,
        *,
        config: ZeroConfig,
        group: dist.ProcessGroup | KindGroups,
        kind_of: KindOf | None = None,
        kind_groups: Mapping[str, KindGroups] | None = None,
        buffer_of: Callable[[str], int] | None = None,
        broadcast_params: bool = True,
        seams: Seams = TEXTBOOK,
    ) -> None:
        self.module = module
        self.config = config
        given = group if isinstance(group, KindGroups) else KindGroups(group=group)
        dense = check_groups(given, config=config)
        parts = check_kind_groups(kind_groups or {}, within=dense.group, config=config)
        self.params = find_trainable_params(module, dtypes=seams.cast.dtype_names)
        kind_of = kind_of or all_dense
        kinds = {name: kind_of(name, param) for name, param in self.params.items()}
        self.holders = Holders(dense=dense, parts=parts, kind_of=kind_of, kinds=kinds)
        self.cast = seams.cast.build(module, params=self.params, holders=self.holders)
        self.buffers = build_buffers(
            self.params,
            holders=self.holders,
            config=config,
            cast=self.cast,
            unit=seams.unit,
            buffer_of=buffer_of,
        )
        if broadcast_params:
            # After the params moved into their buffers: before, each would be in memory twice.
            for tensors, holders in find_replicated_tensors(
                module, buffers=self.buffers, holders=self.holders
            ):
                broadcast_from_first(tensors, group=holders)
        for buffer in self.buffers:
            buffer.shard_params()
        self.divisor = build_divisor(size_and_rank(dense.group)[0], device=self.buffers[0].device)
        self.step_count = seams.step_count(config, group=dense.group, divisor=self.divisor)
        self._grads_reduced = False
        wrapped = self._as_wrapped()
        self.grad_schedule = seams.grads(wrapped)
        self.param_schedule = seams.params(wrapped, grads=self.grad_schedule)
        self._handles = list(self._add_hooks())

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module's forward."""
        return self.module(*args, **kwargs)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that train together."""
        return self.holders.dense.group

    @property
    def rank(self) -> int:
        """This rank inside the group."""
        return size_and_rank(self.group)[1]

    @property
    def grads_reduced(self) -> bool:
        """Whether the buffers hold sums over ranks rather than this rank's own gradients."""
        return self._grads_reduced

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this step that have ended."""
        return self.step_count.micro_batches

    def add_rows(self, rows: int) -> None:
        """Count rows of this rank's micro-batch, for `divide_by="tokens"`.

        Before the end of the last micro-batch; with overlap_grads and a division before the sum,
        before its `begin_last_micro_batch`, which then counts.

        Raises:
            UsageError: If it is no count, or comes too late.
        """
        self.step_count.add_rows(rows)

    def begin_last_micro_batch(self, *, count: int | Tensor | None = None) -> None:
        """Say that the next backward completes the gradients: buckets are reduced while it runs.

        With sync="every" each micro-batch is completed on its own. Without overlap_grads this is
        not needed. Every rank must call it, or none.

        Args:
            count: As in `finish_grad_sync`.

        Raises:
            UsageError: If the gradients are sums already, or it was called before.
        """
        self._require_own_grads("begin_last_micro_batch")
        schedule = self.grad_schedule
        if schedule.running:
            raise UsageError(
                "expected end_micro_batch() or finish_grad_sync() after begin_last_micro_batch(), "
                "got it again."
            )
        if count is not None or (schedule.sums_in_backward and self.config.divides_before_sum):
            self.step_count.fix(count, last=self.config.sync == "last")
        schedule.begin()

    def end_micro_batch(self, last: bool, *, count: int | Tensor | None = None) -> None:
        """End a micro-batch: the last is summed over the ranks, with sync="every" each is.

        Every rank must call it, also one whose backward touched no param: the collectives follow
        from the layout alone, never from which gradients arrived.

        Args:
            last: Whether the step has no micro-batch after this one.
            count: As in `finish_grad_sync`.

        Raises:
            UsageError: If the gradients are sums already, the count cannot be used, or a
                micro-batch that was begun as the last is not.
        """
        self._require_own_grads("end_micro_batch")
        is_summed = last or self.config.sync == "every"
        self.param_schedule.finish_backward()
        if not last and count is not None and not (is_summed and self.config.divides_before_sum):
            raise UsageError(
                f"expected the count with the last micro-batch, where it is used, got "
                f"count={count} with last=False."
            )
        if is_summed:
            if self.config.divides_before_sum or count is not None:
                self.step_count.fix(count, last=last)
            self._sum_over_ranks()
            if self.config.sync == "every" and not self.config.sharding.grads:
                self.grad_schedule.accumulate_sums(is_first=self.micro_batches == 0)
        elif self.grad_schedule.running:
            raise UsageError(
                "expected end_micro_batch(last=True) after begin_last_micro_batch() with "
                "sync='last', got last=False: its gradients are on their way already."
            )
        if last:
            # Behind the sums: ranks may have reached this point with different numbers of buckets
            # issued, so that a collective before it would meet another one elsewhere.
            self.step_count.fix(count, last=True)
        self.step_count.end_micro_batch(last=last)
        self._grads_reduced = last

    def finish_grad_sync(self, *, count: int | Tensor | None = None) -> None:
        """Sum the accumulated gradients over the ranks, once a step, after the last backward.

        The same as `end_micro_batch(last=True)`, and all that a step of one micro-batch needs.

        Args:
            count: What the gradients are divided by: a positive integer, the same on every rank.
                None for the world size, or for what `divide_by` says.

        Raises:
            UsageError: If the gradients are sums already, or the count cannot be used.
        """
        self.end_micro_batch(True, count=count)

    def zero_grad_buffer(self) -> None:
        """Zero all gradients, so that the next backward starts a new step.

        Raises:
            UsageError: If a micro-batch was begun as the last and not ended.
        """
        if self.grad_schedule.running:
            raise UsageError(
                "expected end_micro_batch() or finish_grad_sync() after begin_last_micro_batch(), "
                "got zero_grad_buffer() while gradients are on their way."
            )
        self.grad_schedule.reset()
        self.step_count.reset()
        self._grads_reduced = False

    def start_param_gather(self) -> None:
        """Give every rank what the owners wrote into the working params.

        With overlap_params it comes back at once, and each module waits for its own params when its
        forward begins; without, it comes back when all is there. Where every rank owns everything
        there is nothing to do, and where params are sharded each is gathered when it is used.
        """
        self.param_schedule.start()

    def gather_params(self) -> None:
        """Do the same, and come back when all is there, whatever is overlapped."""
        self.param_schedule.gather()

    def finish_param_gather(self) -> None:
        """Wait for all params: before anything but a module's forward reads them."""
        self.param_schedule.finish()

    def whole_params(self) -> dict[str, Tensor]:
        """Return all working params of this rank; a collective where they are sharded.

        For looking at them between steps, after `finish_param_gather`: of sharded params copies.
        """
        copies = {
            param: copy for buffer in self.buffers for param, copy in buffer.whole_params().items()
        }
        return {name: copies.get(param, param.detach()) for name, param in self.params.items()}

    def unwrap(self) -> nn.Module:
        """Give the module back: no hooks, no gradients, each param in contiguous memory of its own.

        A collective where params are sharded. Afterwards neither this nor its optimizer is of use.

        Raises:
            UsageError: If a micro-batch was begun as the last and not ended.
        """
        self.zero_grad_buffer()
        self.finish_param_gather()
        whole = self.whole_params()
        for handle in self._handles:
            handle.remove()
        for name, param in self.params.items():
            param.data = whole[name].clone(memory_format=torch.contiguous_format)
            param.grad = None
            vars(param).pop("main_grad", None)
        self._handles.clear()
        return self.module

    def _as_wrapped(self) -> Wrapped:
        units = order_by_forward(self.buffers, params=list(self.params.values()))
        members = ((memory.param, unit) for unit in units for memory in unit.members)
        return Wrapped(
            module=self.module,
            config=self.config,
            buffers=self.buffers,
            units=units,
            unit_of={param: unit for param, unit in members if param.numel()},
            params=self.params,
            holders=self.holders,
            before_sum=self._scale_before_sum,
        )

    def _add_hooks(self) -> Iterator[RemovableHandle]:
        yield from self.param_schedule.handles
        for buffer in self.buffers:
            for param in buffer.memory:
                # A gradient from before the wrapping belongs to no step of ours.
                param.grad = None
                # By weak references: the collector does not see through torch's gradient hooks, so
                # that a circle through one of them would keep the buffers for ever.
                hook = partial(_accumulate, weakref.ref(self), weakref.ref(buffer))
                yield param.register_post_accumulate_grad_hook(hook)

    def _scale_before_sum(self, unit: Unit) -> None:
        unit.scale_grads(self.config.divide, divisor=self.divisor)

    def _sum_over_ranks(self) -> None:
        self.grad_schedule.finish()

    def _require_own_grads(self, call: str) -> None:
        # A wrapped module has a hook for each of its params.
        if not self._handles:
            raise UsageError(
                f"expected a wrapped module, got {call}() after unwrap(), which gave it back. "
                f"Try a new DistributedDataParallel."
            )
        if self._grads_reduced:
            raise UsageError(
                f"expected gradients of this rank alone, got sums over ranks: "
                f"finish_grad_sync() was called twice, or {call}() after it. "
                f"Try zero_grad_buffer() between two steps."
            )

    def _accumulate(self, memory: ParamMemory, param: Tensor) -> None:
        """Add a fresh gradient to the buffer; runs inside backward, once a param and backward."""
        grad = param.grad
        assert grad is not None
        if self._grads_reduced:
            raise UsageError(
                f"expected no backward between finish_grad_sync() and zero_grad_buffer(), got a "
                f"gradient of {memory.name!r}, which would be added to a sum over ranks."
            )
        if grad.layout is not torch.strided:
            raise ModelError(
                f"expected dense gradients, got layout {grad.layout} for {memory.name!r}. "
                f"Try sparse=False in its module."
            )
        assert isinstance(param, nn.Parameter)
        self.grad_schedule.check_open(param, name=memory.name)
        self.param_schedule.check_read(param, name=memory.name)
        self.grad_schedule.take(memory)


def _accumulate(
    wrapper: weakref.ref[DistributedDataParallel], home: weakref.ref[Buffer], param: Tensor
) -> None:
    """Hand a fresh gradient to its wrapper; one that nobody holds any more wants none."""
    ddp, buffer = wrapper(), home()
    if ddp is not None and buffer is not None:
        assert isinstance(param, nn.Parameter)
        ddp._accumulate(buffer.memory[param], param)
