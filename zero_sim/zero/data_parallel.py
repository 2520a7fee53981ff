"""Gradients of a module, accumulated locally and summed over ranks: the middle layer of ZeRO.

Autograd writes `param.grad`. A hook adds it to `param.main_grad`, a view into the flat buffer, and
drops it. After the last micro-batch `finish_grad_sync` sums the buffers over ranks, and the
optimizer reads its part. `zero_grad_buffer` starts the next step.

This is a full step with several micro-batches. You may omit lines for settings that are off:

    for each micro-batch:
        ddp.add_rows(rows)                   # divide_by="tokens"
        ddp.begin_last_micro_batch()         # overlap_grads: the last; sync="every": each
        loss.backward()
        ddp.end_micro_batch(last=...)        # last=True: same as finish_grad_sync()
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
    """A module whose trainable params and gradients are in flat buffers.

    Keep a reference to this wrapper, for instance in an optimizer, because the module has none.
    Frozen params stay in place and cost nothing. If a step does not use a trainable param, its
    gradient is zero on every rank, and the optimizer steps it with that zero.

    Args:
        module: The module to train. Its params become views into buffers.
        config: Stage, numerics and layout.
        group: The ranks that train together. With redundancy, pass the result of
            `build_redundancy_groups`, which adds this rank's shard group and replica group.
        kind_of: Returns a param's kind, such as `dense` or `expert`. Default: all are `dense`.
        kind_groups: Groups for kinds that only some ranks hold, such as experts; see
            `build_expert_groups`. All ranks hold the other kinds. The groups must lie inside
            `group`, and every rank must hold a param of each kind listed here.
        buffer_of: Returns a number for a param name. Params with different numbers share no buffer;
            use it to separate param groups. Default: separate buffers by kind and dtype only.
        broadcast_params: True to copy params and module buffers from group rank 0. Pass False only
            if all ranks already have equal bits.
        seams: Alternative parts.

    Raises:
        ModelError: If the module cannot be trained; see `find_trainable_params`.
        LayoutError: If the config asks for an impossible layout.
        UsageError: If a group is missing, has the wrong ranks, or does not contain this process.
    """

    params: dict[str, nn.Parameter]
    """Trainable params by name, in registration order; a tied param once."""
    cast: PlainCast
    divisor: Tensor  # 0D fp32
    """Gradient divisor: the step's count once known, the world size before."""
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
            # After the params moved into their buffers, or each would be in memory twice.
            for tensors, holders in find_replicated_tensors(
                module, buffers=self.buffers, holders=self.holders
            ):
                broadcast_from_first(tensors, group=holders)
        for buffer in self.buffers:
            # After the broadcast, so that shards are cut from the first rank's values.
            buffer.shard_params()
        # The same tensor for the whole run; step_count.fix() overwrites it in each step.
        self.divisor = build_divisor(size_and_rank(dense.group)[0], device=self.buffers[0].device)
        self.step_count = seams.step_count(config, group=dense.group, divisor=self.divisor)
        self._grads_reduced = False
        wrapped = self._as_wrapped()
        self.grad_schedule = seams.grads(wrapped)
        # After the gradient schedule, because gathers on use close units in backward.
        self.param_schedule = seams.params(wrapped, grads=self.grad_schedule)
        self._handles = list(self._add_hooks())

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run forward."""
        return self.module(*args, **kwargs)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that train together."""
        return self.holders.dense.group

    @property
    def rank(self) -> int:
        """This process's group rank."""
        return size_and_rank(self.group)[1]

    @property
    def grads_reduced(self) -> bool:
        """True if the buffers contain sums over ranks, False if only this rank's gradients."""
        return self._grads_reduced

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches ended in this step."""
        return self.step_count.micro_batches

    def add_rows(self, rows: int) -> None:
        """Count rows in this rank's micro-batch, for `divide_by="tokens"`.

        Call it before the last micro-batch ends. If buckets are reduced during backward and divided
        before the sum, call it before `begin_last_micro_batch`, which needs the count.

        Raises:
            UsageError: If `rows` is not a count, or the step's rows were summed already.
        """
        self.step_count.add_rows(rows)

    def begin_last_micro_batch(self, *, count: int | Tensor | None = None) -> None:
        """Announce the backward that completes the gradients, so that it can reduce buckets.

        With sync="every", call it before each micro-batch. Without overlap_grads it is optional,
        but either every rank must call it, or none.

        Args:
            count: See `finish_grad_sync`.

        Raises:
            UsageError: If the gradients are sums already, or the previous call was not ended.
        """
        self._require_own_grads("begin_last_micro_batch")
        schedule = self.grad_schedule
        if schedule.running:
            raise UsageError(
                "expected end_micro_batch() or finish_grad_sync() after begin_last_micro_batch(), "
                "got a second begin_last_micro_batch(). End the micro-batch first."
            )
        # A division before the sum needs the divisor now: backward issues the first bucket.
        if count is not None or (schedule.sums_in_backward and self.config.divides_before_sum):
            self.step_count.fix(count, last=self.config.sync == "last")
        schedule.begin()

    def end_micro_batch(self, last: bool, *, count: int | Tensor | None = None) -> None:
        """End a micro-batch. If it is the last, or sync="every", sum gradients over the ranks.

        Every rank must call it, even without any gradient, because the collectives follow from the
        layout alone.

        Args:
            last: True for the step's last micro-batch.
            count: See `finish_grad_sync`.

        Raises:
            UsageError: If the gradients are sums already, the count is unusable, or a micro-batch
                begun as the last ends with `last=False`.
        """
        self._require_own_grads("end_micro_batch")
        is_summed = last or self.config.sync == "every"
        # First, because at stage 3 it closes units, and the sum below issues them.
        self.param_schedule.finish_backward()
        if not last and count is not None and not (is_summed and self.config.divides_before_sum):
            raise UsageError(
                f"expected the count with the last micro-batch, got count={count} with "
                f"last=False. Pass it with last=True."
            )
        if is_summed:
            # A division after the sum needs the count only when the step ends.
            if self.config.divides_before_sum or count is not None:
                self.step_count.fix(count, last=last)
            self._sum_over_ranks()
            # Sharded gradients were already added up when each unit was reduced.
            if self.config.sync == "every" and not self.config.sharding.grads:
                self.grad_schedule.accumulate_sums(is_first=self.micro_batches == 0)
        elif self.grad_schedule.running:
            raise UsageError(
                "expected end_micro_batch(last=True) after begin_last_micro_batch() with "
                "sync='last', got last=False, but its gradients are being reduced already."
            )
        if last:
            # After the sums: before them ranks may have issued different numbers of buckets, so
            # this collective could pair with a bucket on a faster rank.
            self.step_count.fix(count, last=True)
        self.step_count.end_micro_batch(last=last)
        self._grads_reduced = last

    def finish_grad_sync(self, *, count: int | Tensor | None = None) -> None:
        """Sum the accumulated gradients over the ranks, once per step, after the last backward.

        Same as `end_micro_batch(last=True)`. A step with a single micro-batch needs no other call.

        Args:
            count: Gradient divisor: a positive integer, equal on every rank. None for the world
                size, or the count selected by `divide_by`.

        Raises:
            UsageError: If the gradients are sums already, or the count is unusable.
        """
        self.end_micro_batch(True, count=count)

    def zero_grad_buffer(self) -> None:
        """Zero all gradients, to start the next step.

        Raises:
            UsageError: If a micro-batch was begun as the last and not ended.
        """
        if self.grad_schedule.running:
            raise UsageError(
                "expected end_micro_batch() or finish_grad_sync() after begin_last_micro_batch(), "
                "got zero_grad_buffer() while gradients are being reduced."
            )
        self.grad_schedule.reset()
        self.step_count.reset()
        self._grads_reduced = False

    def start_param_gather(self) -> None:
        """Start to gather new working params from their owners; a collective.

        With overlap_params it returns at once, and each module waits for its own params before its
        forward. Otherwise it waits for completion. No-op at stage 0. At stage 3 it only reshards,
        because modules gather params on use.
        """
        self.param_schedule.start()

    def gather_params(self) -> None:
        """Gather new working params from their owners and wait, even with overlap_params."""
        self.param_schedule.gather()

    def finish_param_gather(self) -> None:
        """Wait for all params. Call it before code outside a module's forward reads them."""
        self.param_schedule.finish()

    def unsharded_params(self) -> dict[str, Tensor]:
        """Return all working params, unsharded; a collective if they are sharded.

        Meant for inspection between steps, after `finish_param_gather`. Sharded params are copied.
        """
        copies = {
            param: copy
            for buffer in self.buffers
            for param, copy in buffer.unsharded_params().items()
        }
        return {name: copies.get(param, param.detach()) for name, param in self.params.items()}

    def unwrap(self) -> nn.Module:
        """Remove hooks and gradients, move each param to its own memory, and return the module.

        A collective if params are sharded. Do not use this wrapper or its optimizer afterwards.

        Raises:
            UsageError: If a micro-batch was begun as the last and not ended.
        """
        # First, because it refuses while gradients are being reduced.
        self.zero_grad_buffer()
        self.finish_param_gather()
        whole = self.unsharded_params()
        for handle in self._handles:
            handle.remove()
        # Clones, because views would keep the buffers alive.
        for name, param in self.params.items():
            param.data = whole[name].clone(memory_format=torch.contiguous_format)
            param.grad = None
            # A param with `main_grad` counts as wrapped, and a new wrapper would refuse it.
            vars(param).pop("main_grad", None)
        self._handles.clear()
        return self.module

    def _as_wrapped(self) -> Wrapped:
        units = order_by_forward(self.buffers, params=list(self.params.values()))
        # Params without elements have no unit.
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
                # A gradient from before the wrapping belongs to no step.
                param.grad = None
                # Weak references, because the garbage collector does not see through torch's
                # gradient hooks: a reference cycle through a hook would leak the buffers.
                hook = partial(_accumulate, weakref.ref(self), weakref.ref(buffer))
                yield param.register_post_accumulate_grad_hook(hook)

    def _scale_before_sum(self, unit: Unit) -> None:
        unit.scale_grads(self.config.divide, divisor=self.divisor)

    def _sum_over_ranks(self) -> None:
        self.grad_schedule.finish()

    def _require_own_grads(self, call: str) -> None:
        # A wrapped module has a hook for each param, until unwrap().
        if not self._handles:
            raise UsageError(
                f"expected a wrapped module, got {call}() after unwrap(). "
                f"Build a new DistributedDataParallel."
            )
        if self._grads_reduced:
            raise UsageError(
                f"expected gradients of this rank, got sums over ranks, because "
                f"finish_grad_sync() was called twice, or {call}() after it. "
                f"Call zero_grad_buffer() between two steps."
            )

    def _accumulate(self, memory: ParamMemory, param: Tensor) -> None:
        """Add a new gradient to the buffer; runs in backward."""
        grad = param.grad
        assert grad is not None
        if self._grads_reduced:
            raise UsageError(
                f"expected no backward between finish_grad_sync() and zero_grad_buffer(), got a "
                f"gradient of {memory.name!r}, which would be added to a sum over ranks. "
                f"Call zero_grad_buffer() first."
            )
        # Embeddings with sparse=True: a sparse tensor cannot be added into a flat buffer.
        if grad.layout is not torch.strided:
            raise ModelError(
                f"expected dense gradients, got layout {grad.layout} for {memory.name!r}. "
                f"Set sparse=False in its module."
            )
        assert isinstance(param, nn.Parameter)
        # All checks come first, so that a refusal leaves the buffer unchanged.
        self.grad_schedule.check_open(param, name=memory.name)
        self.param_schedule.check_read(param, name=memory.name)
        self.grad_schedule.take(memory)


def _accumulate(
    wrapper: weakref.ref[DistributedDataParallel], home: weakref.ref[Buffer], param: Tensor
) -> None:
    """Pass a new gradient to its wrapper; drop it if the wrapper is gone."""
    ddp, buffer = wrapper(), home()
    if ddp is not None and buffer is not None:
        assert isinstance(param, nn.Parameter)
        ddp._accumulate(buffer.memory[param], param)
