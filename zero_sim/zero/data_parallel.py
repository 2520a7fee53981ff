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
        # or, where this rank has no data for it: ddp.join_micro_batch(last=...)
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
from zero_sim.layout import BufferPlan, LayoutPolicy, ParamSpec, plan_buffers
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.collectives import SUMS_OF_ALL, broadcast_from_first, size_and_rank
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.division import build_divisor
from zero_sim.zero.groups import KindGroups, check_groups, check_kind_groups
from zero_sim.zero.model import DTYPE_NAMES, find_trainable_params
from zero_sim.zero.schedule import ReducedUnit, Schedules, build_schedules, order_by_forward
from zero_sim.zero.step_count import StepCount
from zero_sim.zero.unit import ParamMemory
from zero_sim.zero.variants.arena import Arena, move_grads
from zero_sim.zero.variants.fp8 import DTYPE_NAMES as FP8_DTYPES
from zero_sim.zero.variants.fp8 import find_grad_dtype, find_scale
from zero_sim.zero.variants.grad_unit import GradUnit
from zero_sim.zero.variants.reduce_buffers import ReduceBuffers

KindOf = Callable[[str, Tensor], str]
"""Tells the kind of a param, trained or not, or of a module buffer, from its name and the tensor;
params of different kinds share no buffer."""


class DistributedDataParallel:
    """A module whose trainable params and gradients live in flat buffers.

    It lives as long as somebody holds it, an optimizer for instance; the module does not. Frozen
    params stay as they are and cost nothing. A trainable param that takes no part in a step
    has a gradient of zero, on every rank, and is stepped with it.

    Args:
        module: What is trained; its params are re-pointed into buffers.
        config: Stage, numerics and layout.
        group: The ranks that train together.
        shard_group: With redundancy, the block of consecutive ranks of `group` that shard together,
            from `build_redundancy_groups`; else left out.
        replica_group: With redundancy, the ranks that hold the same shard in all blocks.
        kind_of: Tells kinds apart, such as `dense` and `expert`; all are `dense` where left out.
        kind_groups: By kind: the groups of params that not all of `group` hold, such as experts,
            from `build_expert_groups`. A kind without an entry is held by all. The groups must lie
            inside `group`, and no rank may be without a param of such a kind.
        buffer_of: By name: params with different numbers share no buffer, such as those of
            different param groups. They differ in kind and dtype alone where left out.

    Raises:
        ModelError: If the module cannot be trained; see `find_trainable_params`.
        LayoutError: If the config asks for a layout that cannot exist.
        UsageError: If a group is missing, is not as said above or does not hold this process.
    """

    module: nn.Module
    params: dict[str, nn.Parameter]
    """Trainable params by name, in registration order; a tied param once."""
    scales: dict[nn.Parameter, Tensor]
    """Of each fp8 param its scale, 0D fp32, a buffer of the module; see zero/variants/fp8.py. It
    belongs to the param's values and is to be read when they are."""
    buffers: tuple[Buffer, ...]
    divisor: Tensor  # 0D fp32
    """What gradients are divided by: the count of the step once it is known, before the world size.
    """
    arena: Arena | None
    """Where whole gradients lie; None where each unit's have memory of their own."""
    shard_group: dist.ProcessGroup | None
    """The ranks that hold a shard each; with one copy of the state it is `group`, and None where
    nothing is sharded."""
    replica_group: dist.ProcessGroup | None
    """The ranks that hold the same shard; None with one copy of the state."""
    kind_of: KindOf
    kinds: Mapping[str, str]
    """The kind of each trained param, by name."""

    def __init__(
        self,
        module: nn.Module,
        *,
        config: ZeroConfig,
        group: dist.ProcessGroup,
        shard_group: dist.ProcessGroup | None = None,
        replica_group: dist.ProcessGroup | None = None,
        kind_of: KindOf | None = None,
        kind_groups: Mapping[str, KindGroups] | None = None,
        buffer_of: Callable[[str], int] | None = None,
    ) -> None:
        self.module = module
        self.config = config
        self.group = group
        self.world_size, self.rank = size_and_rank(group)
        self._dense_groups = check_groups(
            KindGroups(
                group=group,
                shard_group=shard_group,
                replica_group=replica_group,
            ),
            config=config,
        )
        self.shard_group = self._dense_groups.shard_group
        self.replica_group = self._dense_groups.replica_group
        self._kind_groups = check_kind_groups(kind_groups or {}, within=group, config=config)
        self.params = find_trainable_params(module)
        self.scales = {
            param: find_scale(module, name=name, param=param)
            for name, param in self.params.items()
            if param.dtype in FP8_DTYPES
        }
        self.kind_of = kind_of or _all_dense
        self.kinds = {name: self.kind_of(name, param) for name, param in self.params.items()}
        self._buffer_of = buffer_of
        self.buffers = tuple(self._build_buffer(plan) for plan in self._plan())
        if config.broadcast_params:
            # After the params moved into their buffers: before, each would be in memory twice.
            for tensors, holders in self._replicated_tensors():
                broadcast_from_first(tensors, group=holders)
        for buffer in self.buffers:
            buffer.shard_params()
        self.divisor = build_divisor(self.world_size, device=self.buffers[0].device)
        self._count = StepCount(config, group=group, divisor=self.divisor)
        self._grads_reduced = self._is_unwrapped = False
        self._unit_of = {
            param: unit
            for buffer in self.buffers
            for param in buffer.memory
            if param.numel() and (unit := buffer.unit_of(param)) is not None
        }
        self._reduce_buffers = self.arena = None
        if config.reduce_buffer_elems is not None:
            self._reduce_buffers = ReduceBuffers(
                self.buffers, params=self.params, config=config, groups_of=self.groups_of
            )
        self._grad_pipeline, self._param_pipeline, self._on_use = self._build_schedules()
        self._handles = list(self._add_hooks())

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module's forward."""
        return self.module(*args, **kwargs)

    @property
    def grads_reduced(self) -> bool:
        """Whether the buffers hold sums over ranks rather than this rank's own gradients."""
        return self._grads_reduced

    @property
    def grad_units(self) -> tuple[GradUnit, ...]:
        """What is reduced in the place of units, in this order; none without reduce buffers."""
        return () if self._reduce_buffers is None else self._reduce_buffers.units

    def reduce_buffers(self) -> list[Tensor]:
        """Return the memory that grad units take turns to use, as far as it is there."""
        return [] if self._reduce_buffers is None else self._reduce_buffers.memory

    def grad_unit_of(self, param: nn.Parameter) -> GradUnit | None:
        """Return the grad unit of a param; None for an empty param, or without reduce buffers."""
        if self._reduce_buffers is None:
            return None
        return self._reduce_buffers.unit_of.get(param)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this step that have ended."""
        return self._count.micro_batches

    def groups_of(self, kind: str) -> KindGroups:
        """Return the groups over which params of a kind are summed, sharded and held in copies."""
        return self._kind_groups.get(kind, self._dense_groups)

    @property
    def has_parts(self) -> bool:
        """Whether some kinds of params are held by some of the ranks only."""
        return bool(self._kind_groups)

    def is_held_by_all(self, kind: str) -> bool:
        """Tell whether all ranks of `group` hold the params of a kind."""
        return kind not in self._kind_groups

    def is_first_copy(self, kind: str) -> bool:
        """Tell whether this rank holds the first copy of what it owns of a kind.

        Every element is in the first copy once, on one rank. Where nothing is sharded that is the
        first rank of the kind's group; with redundancy, every rank of its first block.
        """
        replicas = self.groups_of(kind).replica_group
        return replicas is None or replicas.rank() == 0

    def owners_of(self, kind: str) -> dist.ProcessGroup | None:
        """Return the ranks that own a shard of a kind each; None where each of them owns all."""
        return self.groups_of(kind).shard_group

    def add_rows(self, rows: int) -> None:
        """Count rows of this rank's micro-batch, for `divide_by="tokens"`.

        Before the end of the last micro-batch; with overlap_grads and a division before the sum,
        before its `begin_last_micro_batch`, which then counts.

        Raises:
            UsageError: If it is no count, or comes too late.
        """
        self._count.add_rows(rows)

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
        pipeline = self._grad_pipeline
        if pipeline is not None and pipeline.running:
            raise UsageError(
                "expected end_micro_batch() or finish_grad_sync() after begin_last_micro_batch(), "
                "got it again."
            )
        if count is not None or (pipeline is not None and self.config.divides_before_sum):
            self._count.fix(count, last=self.config.sync == "last")
        if pipeline is not None:
            pipeline.begin()

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
        if self._on_use is not None:
            self._on_use.finish_backward()
        if not last and count is not None and not (is_summed and self.config.divides_before_sum):
            raise UsageError(
                f"expected the count with the last micro-batch, where it is used, got "
                f"count={count} with last=False."
            )
        if is_summed:
            if self.config.divides_before_sum or count is not None:
                self._count.fix(count, last=last)
            self._sum_over_ranks()
            if self.config.sync == "every" and not self.config.sharding.grads:
                self._accumulate_sums(is_first=self.micro_batches == 0)
        elif self._grad_pipeline is not None and self._grad_pipeline.running:
            raise UsageError(
                "expected end_micro_batch(last=True) after begin_last_micro_batch() with "
                "sync='last', got last=False: its gradients are on their way already."
            )
        if last:
            # Behind the sums: ranks may have reached this point with different numbers of buckets
            # issued, so that a collective before it would meet another one elsewhere.
            self._count.fix(count, last=True)
        self._count.end_micro_batch(last=last)
        self._grads_reduced = last

    def join_micro_batch(self, last: bool, *, count: int | Tensor | None = None) -> None:
        """Take part in a micro-batch for which this rank has no data, with gradients of zero.

        In the place of begin_last_micro_batch, forward, backward and end_micro_batch, where the
        config has `joins`. What the rank accumulated in the step before is summed with the others'.

        Args:
            last: As in `end_micro_batch`.
            count: As in `finish_grad_sync`.

        Raises:
            UsageError: As those; or if the config has no joins, or params are sharded and this rank
                has not trained in a micro-batch yet, in the order of which it gathers them.
        """
        self._count.join()
        self.finish_param_gather()
        if self._on_use is not None:
            self._on_use.repeat_forward()
        # Behind the forward, as on ranks that have one: it may count over ranks.
        if last or self.config.sync == "every":
            self.begin_last_micro_batch(count=count)
        self.end_micro_batch(last, count=count)

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
        if self._grad_pipeline is not None and self._grad_pipeline.running:
            raise UsageError(
                "expected end_micro_batch() or finish_grad_sync() after begin_last_micro_batch(), "
                "got zero_grad_buffer() while gradients are on their way."
            )
        for buffer in self.buffers:
            buffer.zero_grads()
        for unit in self.grad_units:
            unit.reset_grads()
        self._count.reset()
        self._grads_reduced = False

    def start_param_gather(self) -> None:
        """Give every rank what the owners wrote into the working params.

        With overlap_params it comes back at once, and each module waits for its own params when its
        forward begins; without, it comes back when all is there. Where every rank owns everything
        there is nothing to do, and where params are sharded each is gathered when it is used.
        """
        if self._param_pipeline is not None:
            self._param_pipeline.start()
        else:
            self.gather_params()

    def gather_params(self) -> None:
        """Do the same, and come back when all is there, whatever is overlapped."""
        if self._on_use is not None:
            self._on_use.free_all()
            if self.config.gather_after_step:
                for unit in (unit for buffer in self.buffers for unit in buffer.units):
                    unit.gather()
                    unit.free_params()
        elif self.config.sharding.state:
            for buffer in self.buffers:
                buffer.allgather_params()

    def finish_param_gather(self) -> None:
        """Wait for all params: before anything but a module's forward reads them."""
        if self._param_pipeline is not None:
            self._param_pipeline.finish()

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
        self._is_unwrapped = True
        return self.module

    def whole_params(self) -> dict[str, Tensor]:
        """Return all working params of this rank; a collective where they are sharded.

        For looking at them between steps, after `finish_param_gather`: of sharded params copies.
        """
        copies = {
            param: copy for buffer in self.buffers for param, copy in buffer.whole_params().items()
        }
        return {name: copies.get(param, param.detach()) for name, param in self.params.items()}

    def _replicated_tensors(self) -> list[tuple[list[Tensor], dist.ProcessGroup]]:
        """Everything that must start out equal on all its holders, and who they are.

        Flat buffers come as a whole. What all ranks hold is first, so that the order is theirs too.
        """
        in_buffers = set(self.params.values())
        tensors: dict[str, list[Tensor]] = {"dense": []}
        for buffer in self.buffers:
            tensors.setdefault(buffer.plan.key.kind, []).extend(buffer.working_memory())
        frozen = (each for each in self.module.named_parameters() if each[1] not in in_buffers)
        for name, tensor in (*frozen, *self.module.named_buffers()):
            tensors.setdefault(self.kind_of(name, tensor), []).append(tensor)
        shared = [
            tensor
            for kind, members in tensors.items()
            if self.is_held_by_all(kind)
            for tensor in members
        ]
        own = [(tensors.get(kind, []), held.group) for kind, held in self._kind_groups.items()]
        return [(shared, self.group), *own]

    def _plan(self) -> list[BufferPlan]:
        """Plan the buffers of each kind for the ranks that shard it; kinds as first registered."""
        specs: dict[str, list[ParamSpec]] = {}
        for name, param in self.params.items():
            kind = self.kinds[name]
            spec = ParamSpec(
                name=name,
                shape=tuple(param.shape),
                dtype=DTYPE_NAMES[param.dtype],
                kind=kind,
                group=0 if self._buffer_of is None else self._buffer_of(name),
            )
            specs.setdefault(kind, []).append(spec)
        plans: list[BufferPlan] = []
        for kind, members in specs.items():
            owners = self.owners_of(kind)
            policy = LayoutPolicy(
                shard_count=1 if owners is None else size_and_rank(owners)[0],
                align_elems=self.config.align_elems,
                align_bytes=self.config.align_bytes,
                bucket_elems=self.config.bucket_elems,
                param_order=self.config.param_order,
                partition=self.config.partition,
            )
            plans.extend(plan_buffers(members, policy=policy))
        return plans

    def _build_buffer(self, plan: BufferPlan) -> Buffer:
        params = {placed.name: self.params[placed.name] for placed in plan.params}
        in_fp32 = self.config.grad_dtype == "fp32"
        groups = self.groups_of(plan.key.kind)
        return Buffer(
            plan,
            params=params,
            sharding=self.config.sharding,
            group=groups.shard_group,
            grad_dtype=torch.float32 if in_fp32 else find_grad_dtype(params),
            scales=self.scales,
            replica_group=groups.replica_group,
            sum_all=SUMS_OF_ALL[self.config.sum_by],
            gather_chunk_elems=self.config.gather_chunk_elems,
            accumulate_sums=self.config.sync == "every",
        )

    def _build_schedules(self) -> Schedules:
        order = order_by_forward(self.buffers, params=list(self.params.values()))
        if self.config.arena:
            self.arena = move_grads(self.buffers, order=order[::-1], config=self.config)
        buffers = self._reduce_buffers
        return build_schedules(
            self.module,
            config=self.config,
            units=order,
            unit_of=self._unit_of,
            grad_units=self.grad_units,
            grad_unit_of=None if buffers is None else buffers.unit_of,
            before_sum=self._scale_before_sum,
        )

    def _add_hooks(self) -> Iterator[RemovableHandle]:
        for schedule in (self._param_pipeline, self._on_use):
            yield from () if schedule is None else schedule.handles
        for buffer in self.buffers:
            for param in buffer.memory:
                # A gradient from before the wrapping belongs to no step of ours.
                param.grad = None
                # By weak references: the collector does not see through torch's gradient hooks, so
                # that a circle through one of them would keep the buffers for ever.
                hook = partial(_accumulate, weakref.ref(self), weakref.ref(buffer))
                yield param.register_post_accumulate_grad_hook(hook)

    def _scale_before_sum(self, unit: ReducedUnit) -> None:
        unit.scale_grads(self.config.divide, divisor=self.divisor)

    def _sum_over_ranks(self) -> None:
        if self._grad_pipeline is not None:
            self._grad_pipeline.finish()
            if self._reduce_buffers is not None:
                self._reduce_buffers.release()
            return
        for buffer in self.buffers:
            for unit in buffer.units:
                unit.fill()
                self._scale_before_sum(unit)
            buffer.reduce_grads()

    def _accumulate_sums(self, *, is_first: bool) -> None:
        for buffer in self.buffers:
            if self._reduce_buffers is not None:
                # What left by reduce buffers was added up when it came back.
                assert buffer.grad_data is not None
                buffer.grad_data.zero_()
                continue
            for unit in buffer.units:
                unit.accumulate_sum(is_first=is_first)

    @property
    def _leaves_by_itself(self) -> bool:
        return self._reduce_buffers is not None and self.config.sharding.grads

    def _require_own_grads(self, call: str) -> None:
        if self._is_unwrapped:
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
        if self._param_pipeline is not None:
            self._param_pipeline.check_waited(param, name=memory.name)
        if self._grad_pipeline is not None:
            self._grad_pipeline.check_open(param, name=memory.name)
        unit = self._unit_of.get(param)
        if self._on_use is not None:
            self._on_use.check_gathered(name=memory.name, unit=unit)
        if self._leaves_by_itself and unit is not None:
            # A grad unit takes it from where it is, and drops it.
            assert self._grad_pipeline is not None
            self._grad_pipeline.mark_ready(param)
            return
        # A param without elements is in no unit, and has nothing to add.
        if unit is not None:
            unit.fill()
            # detach: with create_graph=True a gradient has a history that the buffer must not keep.
            unit.add_grad(memory, grad.detach())
        param.grad = None
        if self._grad_pipeline is not None:
            self._grad_pipeline.mark_ready(param)


def _accumulate(
    wrapper: weakref.ref[DistributedDataParallel], home: weakref.ref[Buffer], param: Tensor
) -> None:
    """Hand a fresh gradient to its wrapper; one that nobody holds any more wants none."""
    ddp, buffer = wrapper(), home()
    if ddp is not None and buffer is not None:
        assert isinstance(param, nn.Parameter)
        ddp._accumulate(buffer.memory[param], param)


def _all_dense(name: str, tensor: Tensor) -> str:
    return "dense"
