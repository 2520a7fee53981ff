"""Target for zero_sim's own system (`zero_sim.zero`), whose config comes from the case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from zero_sim import checkpoint
from zero_sim.layout import BucketPlan, LayoutPolicy, Span
from zero_sim.layout.topology import Topology
from zero_sim.scenario.derived import overlaps_grads, overlaps_params
from zero_sim.scenario.kinds import is_expert
from zero_sim.scenario.spec import (
    CheckpointForm,
    OptimizerSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
)
from zero_sim.targets.costs import TEXTBOOK
from zero_sim.targets.held import held_bytes, memory_of, whole_bytes
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.protocol import OwnedPart, Place, Settings, StepResult
from zero_sim.targets.torch.optim import class_of, group_index, own_settings, settings_of
from zero_sim.workloads.tp_block import Blocks, OneDevice
from zero_sim.zero import (
    DistributedDataParallel,
    DistributedOptimizer,
    OptimFactory,
    OwnedFragment,
    ZeroConfig,
)
from zero_sim.zero.gathers import OnUse, schedule_params
from zero_sim.zero.groups import build_redundancy_groups
from zero_sim.zero.model import PlainCast
from zero_sim.zero.optimizer import AllAtOnce, StepSeams
from zero_sim.zero.schedule import UnderBackward, schedule_grads
from zero_sim.zero.seams import Seams
from zero_sim.zero.step_count import StepCount
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants.activations import TensorParallel
from zero_sim.zero.variants.arena import Arena, move_grads
from zero_sim.zero.variants.fp8 import DTYPE_NAMES as FP8_DTYPES
from zero_sim.zero.variants.fp8 import Fp8Cast
from zero_sim.zero.variants.gathers import ChunkedUnit, GatheredAfterStep, chunked_units
from zero_sim.zero.variants.grad_unit import GradUnit
from zero_sim.zero.variants.model_groups import (
    build_expert_groups,
    build_model_parallel_group,
)
from zero_sim.zero.variants.reduce_buffers import BufferedGrads, BufferSettings
from zero_sim.zero.variants.root_reduce import (
    AllReducedUnit,
    SummedAtFirstUnit,
    UnderBackwardAtFirst,
)
from zero_sim.zero.variants.scaler import LossScaler
from zero_sim.zero.variants.step_buffer import StepBuffer
from zero_sim.zero.variants.uneven_micro_batches import (
    RepeatableOnUse,
    UnevenStepCount,
    join_micro_batch,
)


def build_optim_factory(spec: OptimizerSpec) -> OptimFactory:
    """Return a factory that builds the scenario's optimizer from param groups of masters."""
    cls, settings = class_of(spec), settings_of(spec)

    def factory(groups: ParamsT) -> Optimizer:
        # torch's default group is enough if no group has its own settings.
        if not spec.groups:
            return cls(groups, **settings)
        own: list[dict[str, Any]] = []
        for group in groups:
            assert isinstance(group, dict)
            # The last index is for params in no group, which use the optimizer's own settings.
            index = group["group_index"]
            group_settings = {} if index == len(spec.groups) else own_settings(spec.groups[index])
            own.append({"params": group["params"], **group_settings})
        return cls(own, **settings)

    return factory


def topology_of(scenario: Scenario) -> Topology:
    """Return the topology of all ranks.

    Args:
        scenario: The case of a dp-cp group. Its `world.size` is the group's size.
    """
    # A dp-cp group has dp * cp ranks.
    spec = scenario.topology
    return Topology(
        tp=spec.tp,
        cp=spec.cp,
        pp=spec.pp,
        dp=scenario.world.size // spec.cp,
        ep=spec.ep,
        order=spec.order,
    )


def is_counted(spec: TopologySpec, name: str, *, place: Mapping[str, int]) -> bool:
    """Return True if the norm counts a param on this rank.

    Args:
        spec: The topology, with the name endings of params that several tp or pp ranks have.
        name: The param's name.
        place: The rank's index by dimension, such as `{"tp": 0, "pp": 1}`.
    """
    # Replicas have equal gradients, so only the first replica counts.
    is_copy = place["tp"] > 0 and name.endswith(spec.shared)
    return not is_copy and not (place["pp"] > 0 and name.endswith(spec.tied))


def kind_of(name: str, tensor: Tensor) -> str:
    """Return the kind of a param: `expert` below a module named `experts`, else `dense`."""
    return "expert" if is_expert(name) else "dense"


@dataclass(frozen=True, slots=True)
class _Reduction:
    kind: Literal["reduce_scatter", "reduce_scatter_list", "reduce", "all_reduce"]
    elems: int
    """Elements of the reduced tensor."""
    offset: int
    """Offset of the fragment in this tensor."""


def _reduction_of(
    owned: OwnedFragment, *, bucket: BucketPlan, system: SystemSpec, own_unit: GradUnit | None
) -> _Reduction:
    """Return the call that sums a fragment: its grad unit's if it has one, else its bucket's."""
    # Stage 0 keeps whole gradients on every rank.
    to_all = not system.stage or system.sum_by != "reduce-scatter"
    if own_unit is not None:
        # Gradients in a reduce buffer are summed in runs with the same owner, not by bucket.
        own = next(each.own for each in own_unit.slices if each.memory.name == owned.param)
        if to_all:
            return _Reduction("all_reduce", own_unit.plan.numel, own.start)
        run = next(run for run in own_unit.plan.runs if run.span.contains(own))
        return _Reduction("reduce", run.span.numel, own.start - run.span.start)
    elems, offset = bucket.span.numel, owned.in_buffer.start - bucket.span.start
    if to_all:
        return _Reduction("all_reduce", elems, offset)
    if bucket.partition.owner is not None:
        return _Reduction("reduce", elems, offset)
    kind = "reduce_scatter" if bucket.is_even else "reduce_scatter_list"
    return _Reduction(kind, elems, offset)


def _parallelize(
    module: nn.Module, *, system: SystemSpec, group: ProcessGroup | None
) -> TensorParallel | None:
    """Connect a module's split layers to the other tp ranks; None if it has no split layers."""
    if not isinstance(module, Blocks):
        return None
    parallel = TensorParallel(
        group, checkpoints=system.checkpoints, offload=system.offload_checkpoints
    )
    module.be_parallel(parallel)
    return parallel


def config_of(scenario: Scenario) -> ZeroConfig:
    """Return the config of zero_sim's own system for a scenario."""
    system = scenario.system
    return ZeroConfig(
        stage=system.stage,
        divide=system.divide,
        divide_by=system.divide_by,
        sync=system.sync,
        micro_batches=scenario.run.micro_batches,
        redundancy=system.redundancy,
        grad_dtype=system.grad_dtype,
        layout=LayoutPolicy(
            bucket_elems=system.bucket_elems,
            align_elems=system.align_elems,
            align_bytes=system.align_bytes,
            param_order=system.param_order,
            partition=system.partition,
        ),
        overlap_grads=overlaps_grads(system),
        overlap_params=overlaps_params(system),
        prefetch=1 if system.prefetch is None else system.prefetch,
        reshard_after_forward=system.reshard_after_forward,
    )


class _RepeatableAndGatheredAfterStep(GatheredAfterStep, RepeatableOnUse):
    """Both variants."""


# Gathers on use, by (ranks join micro-batches, params are also gathered after the step).
_ON_USE = {
    (False, False): OnUse,
    (False, True): GatheredAfterStep,
    (True, False): RepeatableOnUse,
    (True, True): _RepeatableAndGatheredAfterStep,
}


@dataclass(kw_only=True, slots=True, eq=False)
class _AllReducedChunkedUnit(AllReducedUnit, ChunkedUnit):
    """Both variants."""


@dataclass(kw_only=True, slots=True, eq=False)
class _SummedAtFirstChunkedUnit(SummedAtFirstUnit, ChunkedUnit):
    """Both variants."""


_UNITS: dict[str, tuple[type[Unit], type[ChunkedUnit]]] = {
    "reduce-scatter": (Unit, ChunkedUnit),
    "all-reduce": (AllReducedUnit, _AllReducedChunkedUnit),
    "first-rank": (SummedAtFirstUnit, _SummedAtFirstChunkedUnit),
}
"""Unit that gathers in a single call, and unit that gathers in chunks, by `system.sum_by`."""


def seams_of(scenario: Scenario, *, module: nn.Module, config: ZeroConfig) -> Seams:
    """Return the variants of zero_sim's own system for a scenario."""
    system, joins = scenario.system, bool(scenario.run.own_micro_batches)
    has_fp8 = any(param.dtype in FP8_DTYPES for param in module.parameters())
    # A sum on the first rank takes two calls, so its schedule under backward differs.
    grads = partial(
        schedule_grads,
        under_backward=UnderBackwardAtFirst if system.sum_by == "first-rank" else UnderBackward,
    )
    unit, chunked_unit = _UNITS[system.sum_by]
    if system.reduce_buffer_elems is not None:
        # Grad units carry the gradients here, so param units only gather.
        unit, chunked_unit = Unit, ChunkedUnit
        settings = BufferSettings(
            elems=system.reduce_buffer_elems,
            contiguous_grads=system.contiguous_grads,
            sums_unsharded=system.sum_by == "all-reduce",
        )
        grads = partial(BufferedGrads, settings=settings)
    chunk_elems = system.gather_chunk_elems
    # `zero` calls these variants without knowing the scenario.
    return Seams(
        cast=Fp8Cast if has_fp8 else PlainCast,
        unit=unit
        if chunk_elems is None
        else chunked_units(chunk_elems, config=config, unit=chunked_unit),
        step_count=UnevenStepCount if joins else StepCount,
        grads=grads,
        params=partial(schedule_params, on_use=_ON_USE[joins, system.gather_after_step]),
    )


class ZeroSimEngine:
    """A rank of zero_sim's own system."""

    # The order matters: groups, buffers, an arena that replaces the buffers' memory, optimizer.
    def __init__(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> None:
        system, spec = scenario.system, scenario.optimizer
        config = config_of(scenario)
        by_group = system.buffers_by == "param-group"
        group_of = partial(group_index, spec) if spec.groups else None
        groups = build_redundancy_groups(group, redundancy=system.redundancy)
        topology = topology_of(scenario)
        kind_groups = {}
        if topology.ep > 1:
            kind_groups["expert"] = build_expert_groups(
                group, expert_parallel=topology.ep, redundancy=system.redundancy
            )
        place = topology.coordinates(dist.get_rank())
        is_split = topology.tp * topology.pp > 1
        self._part = f"tp-{place['tp']}-pp-{place['pp']}" if is_split else ""
        self.module = module
        self._system = system
        self._ddp = DistributedDataParallel(
            module,
            config=config,
            group=groups,
            kind_of=kind_of,
            kind_groups=kind_groups,
            buffer_of=group_of if by_group else None,
            seams=seams_of(scenario, module=module, config=config),
        )
        self._arena: Arena | None = None
        if system.arena:
            self._arena = move_grads(self._ddp)
        parts_group = (
            build_model_parallel_group(topology.groups_over("tp", "pp")) if is_split else None
        )
        self._tensor_parallel = _parallelize(module, system=system, group=parts_group)
        scale = spec.loss_scale
        self._optimizer = DistributedOptimizer(
            self._ddp,
            optim_factory=build_optim_factory(spec),
            group_of=group_of,
            clip_norm=spec.clip_norm,
            clip_value=spec.clip_value,
            seams=StepSeams(
                loss_scaler=None
                if scale is None
                else LossScaler(scale=scale.initial, growth_interval=scale.growth_interval),
                model_parallel_group=parts_group,
                # Without tp and pp, no param has a replica to skip.
                is_counted=partial(is_counted, scenario.topology, place=place)
                if is_split
                else lambda name: True,
                state_device=torch.device("cpu") if system.offload_state else None,
                stepper=AllAtOnce
                if system.step_buffer_elems is None
                else partial(StepBuffer, elems=system.step_buffer_elems),
            ),
        )
        self._places: dict[str, Place] = {}

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self._optimizer.zero_grad()

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward. Hooks move the gradients into the buffers."""
        self._ddp.add_rows(rows)
        # Announce the last micro-batch before backward, because backward hooks start reductions.
        if last_micro or self._system.sync == "every":
            self._ddp.begin_last_micro_batch()
        scaler = self._optimizer.loss_scaler
        # Scale before backward, so that small gradients do not underflow in fp16.
        loss = loss if scaler is None else scaler.scale_loss(loss)
        # False if this rank's forward only reads frozen params.
        if loss.requires_grad:
            loss.backward()
        self._ddp.end_micro_batch(last_micro)

    def join_micro_batch(self, *, last: bool) -> None:
        """Take part in a micro-batch without data."""
        join_micro_batch(self._ddp, last)

    def step(self, *, lr_factor: float) -> StepResult:
        """Update the params on every rank."""
        # All reductions have finished in `end_micro_batch`.
        self._optimizer.set_lr_factor(lr_factor)
        result = self._optimizer.step()
        return StepResult(
            norm=result.norm,
            zeros=result.zeros,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
        )

    def settle(self) -> None:
        """Wait for gathers in flight."""
        self._ddp.finish_param_gather()

    def held_bytes(self) -> Mapping[str, int]:
        """Return the bytes of all memory that buffers and optimizer can reach, by purpose."""
        held = dict(held_bytes(self._ddp, self._optimizer, arena=self._arena))
        # No activation checkpoint may remain between steps, so a leak appears in `other`.
        held["other"] += self.checkpoint_bytes()
        return held

    def checkpoint_bytes(self) -> int:
        """Return the bytes of activation checkpoints, on all devices."""
        kept = () if self._tensor_parallel is None else self._tensor_parallel.memory()
        # By storage, because several checkpoints may be views of the same storage.
        storages = {each.data_ptr(): each for each in (t.untyped_storage() for t in kept)}
        return sum(each.nbytes() for each in storages.values())

    def whole_bytes(self) -> Iterator[tuple[str, str, int]]:
        """Return the bytes of each unit's unsharded gradients and params."""
        return whole_bytes(self._ddp, arena=self._arena)

    def memory(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all named memory."""
        if self._tensor_parallel is not None:
            yield from (("checkpoints", kept) for kept in self._tensor_parallel.memory())
        yield from memory_of(self._ddp, self._optimizer, arena=self._arena)

    def unwrap(self) -> nn.Module:
        """Return the module as it was before the engine was built."""
        if self._tensor_parallel is not None and isinstance(self.module, Blocks):
            self.module.be_parallel(OneDevice())
        return self._ddp.unwrap()

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint; with tp or pp, each part of the model has its own folder."""
        checkpoint.save(path / self._part, ddp=self._ddp, optimizer=self._optimizer, form=form)

    def save_async(self, path: Path, *, form: CheckpointForm) -> checkpoint.SaveHandle:
        """Start to write a checkpoint while training goes on."""
        return checkpoint.save_async(
            path / self._part, ddp=self._ddp, optimizer=self._optimizer, form=form
        )

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Load a checkpoint that was saved in any layout."""
        checkpoint.load(
            path / self._part,
            ddp=self._ddp,
            optimizer=self._optimizer,
            weights_only=weights_only,
        )

    def params(self) -> Mapping[str, Tensor]:
        """Return whole working params on this rank."""
        return self._ddp.unsharded_params()

    def parts(self) -> Iterator[OwnedPart]:
        """Yield the parts that this rank owns, in buffer order."""
        for owned in self._optimizer.fragments():
            master, state = owned.master, owned.state
            if self._system.offload_state:
                # The judge compares on the gradients' device. 0-D counters stay on the CPU.
                master = master.to(owned.grad.device)
                state = {k: v.to(owned.grad.device) if v.dim() else v for k, v in state.items()}
            yield OwnedPart(self._place_of(owned), owned.grad, master, state)

    def settings(self) -> Settings:
        """Return settings of the param groups and the loss scaler."""
        scaler = self._optimizer.loss_scaler
        return Settings(
            params=self._optimizer.settings(),
            loss_scale=None if scaler is None else scaler.scale,
            good_steps=None if scaler is None else scaler.good_steps,
        )

    def _place_of(self, owned: OwnedFragment) -> Place:
        # A rank owns a single fragment of a param, and its place never changes.
        place = self._places.get(owned.param)
        if place is None:
            # Offsets in param and buffer come from the layout, offsets in the reduction from the
            # unit that carries the gradient.
            buffer = self._ddp.buffers[owned.buffer]
            bucket = buffer.plan.buckets[owned.bucket]
            param = self._ddp.params[owned.param]
            unit = buffer.unit_of(param)
            assert unit is not None
            schedule = self._ddp.grad_schedule
            own_unit = None
            if isinstance(schedule, BufferedGrads):
                own_unit = schedule.buffers.unit_of.get(param)
            reduction = _reduction_of(owned, bucket=bucket, system=self._system, own_unit=own_unit)
            shard = unit.own_span.shift(bucket.span.start)
            place = self._places[owned.param] = Place(
                param=owned.param,
                start=owned.in_param.start,
                stop=owned.in_param.stop,
                flat_start=owned.in_buffer.start,
                bucket=owned.bucket,
                shard=owned.shard,
                shard_start=shard.start,
                shard_stop=shard.stop,
                reduced_by=reduction.kind,
                call_elems=reduction.elems,
                call_offset=reduction.offset,
                buffer=owned.buffer,
                bucket_start=bucket.span.start,
                bucket_stop=bucket.span.stop,
                padding_start=bucket.padding.start,
            )
        return place

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Describe the first nonzero element in gradient buffers and sums, or in their padding."""
        for index, buffer in enumerate(self._ddp.buffers):
            if not padding_only:
                for memory in (buffer.grad_data, buffer.total_data):
                    if memory is not None and memory.any():
                        first = int(memory.nonzero()[0])
                        return f"element {first} of gradient buffer {index}"
            for unit in buffer.units:
                stray = _stray_in_gradients(unit, index=index, padding_only=padding_only)
                if stray:
                    return stray
        return ""

    def stray_padding(self) -> str:
        """Describe the first nonzero padding element in param buffers or master shards."""
        for index, buffer in enumerate(self._ddp.buffers):
            for unit in buffer.units:
                stray = _stray_in_params(unit, index=index)
                if stray:
                    return stray
        # A master shard has the padding of its shard.
        for (index, number), master in self._optimizer.master_shards.items():
            buffer = self._ddp.buffers[index]
            where = f"the masters of buffer {index}, in bucket {number}"
            bucket = buffer.plan.buckets[number]
            own = bucket.shard_span(buffer.shard)
            stray = _stray_in_part(bucket, own, master, where=where)
            if stray:
                return stray
        return ""


def _stray(padding: Tensor, *, start: int, where: str) -> str:
    """Describe the first nonzero padding element. The padding begins at `start` in `where`."""
    if not padding.numel() or not padding.any():
        return ""
    return f"element {start + int(padding.nonzero()[0])} of {where}"


def _stray_in_part(bucket: BucketPlan, own: Span, memory: Tensor, *, where: str) -> str:
    """Describe the first nonzero padding element in a bucket's span `own`, of the flat buffer."""
    # Padding is the bucket's tail, and the span may cover all of it, some or none.
    start = min(max(own.start, bucket.padding.start), own.stop)
    return _stray(memory[start - own.start :], start=start, where=where)


def _stray_in_gradients(unit: Unit, *, index: int, padding_only: bool) -> str:
    bucket, whole = unit.plan, unit.grad_storage.whole
    where = f"gradient buffer {index}, in bucket {bucket.index}"
    if whole is not None:
        # If gradients are sharded, whole gradients only exist while backward fills them.
        start = bucket.padding.start if padding_only else bucket.span.start
        stray = _stray(whole[start - bucket.span.start :], start=start, where=where)
        if stray:
            return stray
    if unit.grad_total is None:
        return ""
    own = unit.own_span.shift(bucket.span.start)
    return _stray_in_part(bucket, own, unit.grad_total, where=f"the sums of {where}")


def _stray_in_params(unit: Unit, *, index: int) -> str:
    bucket, whole = unit.plan, unit.params
    where = f"param buffer {index}, in bucket {bucket.index}"
    if whole is not None:
        start = bucket.padding.start
        return _stray(whole[start - bucket.span.start :], start=start, where=where)
    if unit.param_shard is None:
        return ""
    held = unit.own_span.shift(bucket.span.start)
    return _stray_in_part(bucket, held, unit.param_shard, where=where)


class ZeroSimTarget:
    """zero_sim's own system, stages 0 to 3."""

    name = "zero_sim"
    # None stands for every setting of a scenario.
    capabilities = None
    numerics = Numerics(reported_grads="before-division")
    costs = TEXTBOOK

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> ZeroSimEngine:
        """Wrap the module for training on this rank."""
        return ZeroSimEngine(module, scenario=scenario, group=group)


TARGETS = (ZeroSimTarget(),)
