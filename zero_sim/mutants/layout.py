"""Faults of where things lie: padding, shards, fragments, and params that are tied or absent."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from zero_sim.layout import BucketPlan, BufferPlan, Span, planner
from zero_sim.layout.request import LayoutPolicy
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import data_parallel, optimizer
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.unit import Unit


def _moved(bucket: BucketPlan, *, start: int) -> BucketPlan:
    offset = start - bucket.span.start

    def shifted(span: Span) -> Span:
        return Span(span.start + offset, span.stop + offset)

    return replace(
        bucket,
        span=shifted(bucket.span),
        padding=shifted(bucket.padding),
        params=tuple(replace(param, span=shifted(param.span)) for param in bucket.params),
    )


def _joined(plan: BufferPlan, buckets: list[BucketPlan]) -> BufferPlan:
    params = tuple(param for bucket in buckets for param in bucket.params)
    return replace(plan, buckets=tuple(buckets), params=params)


@mutant("M01", "LAYOUT", "PD NP B2", seen_in="DeepSpeed#8158", core=True)
def unpadded_stride(patch: Patches) -> None:
    """A bucket is allocated with its padding, but the next one starts where its params end."""

    @patch(planner, "_plan_buffer")
    def wrong(right, key, specs, *, policy):
        plan, buckets, start = right(key, specs, policy=policy), [], 0
        for bucket in plan.buckets:
            buckets.append(_moved(bucket, start=start))
            start = buckets[-1].padding.start
        return _joined(plan, buckets)


@mutant("M03", "LAYOUT", "PD B2 NP", seen_in="Megatron-LM#561", kill="volume")
def padding_at_the_end_only(patch: Patches) -> None:
    """The whole buffer is padded to the number of shards, but not each bucket."""

    @patch(planner, "_plan_buffer")
    def wrong(right, key, specs, *, policy):
        plan, buckets, start = right(key, specs, policy=policy), [], 0
        for bucket in plan.buckets:
            moved = _moved(bucket, start=start)
            if bucket is not plan.buckets[-1]:
                end = moved.padding.start
                moved = replace(moved, span=Span(start, end), padding=Span(end, end))
            buckets.append(moved)
            start = moved.span.stop
        return _joined(plan, buckets)


@mutant("M05", "LAYOUT", "SP", seen_in="Megatron-LM 4b843668c3", core=True)
def piece_from_the_params_start(patch: Patches) -> None:
    """The rank's piece of a split param is written from the param's start, not the shard's."""

    @patch(Buffer, "write_param_shard")
    def wrong(right, self, param, data):
        fragment = self.memory[param].fragment
        if self.param_data is None or fragment is None or not fragment.in_param.start:
            return right(self, param, data)
        unit = self.unit_of(param)
        unit.finish_gather()
        return param.data.view(-1)[: data.numel()].copy_(data.detach())


@mutant("M07", "LAYOUT", "PD", seen_in="DeepSpeed#3832", core=True)
def padding_of_gradients(patch: Patches) -> None:
    """The padding of the gradient buffer is not zeroed."""

    @patch(Buffer, "zero_grads")
    def wrong(right, self):
        right(self)
        for bucket in self.plan.buckets if self.grad_data is not None else ():
            assert self.grad_data is not None
            self.grad_data[bucket.padding.start : bucket.padding.stop] = torch.nan


@mutant("M09", "EMPTY", "PD FZ", seen_in="DeepSpeed#5652", kill="refusal")
def negative_overlap(patch: Patches) -> None:
    """The length of an overlap is not bounded below by zero."""

    @patch(Span, "intersect")
    def wrong(right, self, other):
        return Span(max(self.start, other.start), min(self.stop, other.stop))


@mutant("M11", "LAYOUT", "NC", seen_in="apex#1794")
def flattened_in_memory_order(patch: Patches) -> None:
    """A transposed param is flattened in the order of its memory and read in its logical one."""

    @patch(Buffer, "_adopt")
    def wrong(right, self, params, **named):
        for param in params.values():
            if not param.is_contiguous():
                strides = torch.empty(param.shape, device="meta").stride()
                param.data = param.detach().as_strided(param.shape, strides)
        return right(self, params, **named)


@mutant("L01", "LAYOUT", "", seen_in="class LAYOUT", core=True)
def shard_one_element_short(patch: Patches) -> None:
    """What the second shard owns ends one element early."""

    @patch(BucketPlan, "fragments")
    def wrong(right, self, shard):
        for fragment in right(self, shard):
            if shard != 1 or fragment.in_shard.stop != self.shard_span(shard).numel:
                yield fragment
            elif fragment.in_param.numel > 1:
                spans = ("in_buffer", "in_param", "in_shard")
                ends = {name: getattr(fragment, name) for name in spans}
                yield replace(
                    fragment, **{name: Span(s.start, s.stop - 1) for name, s in ends.items()}
                )


@mutant("L02", "LAYOUT", "NP", seen_in="DeepSpeed#1422")
def longer_shards_last(patch: Patches) -> None:
    """With uneven shards the collectives take the last ones to be longer, the layout the first."""

    @patch(BucketPlan, "shard_sizes")
    def wrong(right, self):
        return right(self)[::-1]


@mutant("L03", "LAYOUT", "PD", seen_in="DeepSpeed#5105", kill="volume")
def alignment_forgotten(patch: Patches) -> None:
    """Shards are padded to equal length, but not to the alignment that was asked for."""

    @patch(LayoutPolicy, "shard_multiple")
    def wrong(right, self, dtype):
        return 1


@mutant("L04", "LAYOUT", "PD MX", seen_in="DeepSpeed#5105", kill="volume")
def bytes_taken_for_elements(patch: Patches) -> None:
    """An alignment in bytes is applied to elements."""

    @patch(LayoutPolicy, "shard_multiple")
    def wrong(right, self, dtype):
        return math.lcm(self.align_elems, self.align_bytes)


@mutant("L05", "LAYOUT", "", seen_in="class LAYOUT", core=True)
def fragments_at_the_shards_start(patch: Patches) -> None:
    """Every fragment's place in its shard is the shard's start."""

    @patch(BucketPlan, "fragments")
    def wrong(right, self, shard):
        for fragment in right(self, shard):
            yield replace(fragment, in_shard=Span(0, fragment.in_shard.numel))


@mutant("L06", "LAYOUT", "SP", seen_in="class LAYOUT")
def floor_of_the_overlap(patch: Patches) -> None:
    """A param that begins inside a shard is taken to begin at the next one, if it is split."""

    @patch(BucketPlan, "fragments")
    def wrong(right, self, shard):
        starts = {param.name: param.span for param in self.params}
        for fragment in right(self, shard):
            if fragment.in_param.start or fragment.in_param.stop == starts[fragment.param].numel:
                yield fragment


@mutant("L07", "LAYOUT", "PD", seen_in="DeepSpeed#8210")
def padding_of_params(patch: Patches) -> None:
    """The padding of the param buffer is not zeroed."""

    @patch(Buffer, "__init__")
    def wrong(right, self, plan, **named):
        right(self, plan, **named)
        padded = self.param_data
        for bucket in plan.buckets if padded is not None else ():
            padded[bucket.padding.start : bucket.padding.stop] = 1


@mutant("L08", "LAYOUT", "PD", seen_in="DeepSpeed#8210")
def padding_of_masters(patch: Patches) -> None:
    """The padding of the master shards is not zeroed."""

    @patch(optimizer, "_build_masters")
    def wrong(right, ddp, *, device):
        shards, masters = right(ddp, device=device)
        for (index, number), shard in shards.items():
            plan = ddp.buffers[index].plan.buckets[number]
            own = plan.shard_span(ddp.buffers[index].shard)
            if own.stop > plan.padding.start:
                shard[max(0, plan.padding.start - own.start) :] = torch.inf
        return shards, masters


@mutant("L09", "LAYOUT", "PD", seen_in="DeepSpeed#8210")
def padding_of_sums(patch: Patches) -> None:
    """The padding of sums over micro-batches is written with each of them."""

    @patch(Unit, "accumulate_sum")
    def wrong(right, self, *, is_first):
        right(self, is_first=is_first)
        padded = self.plan.padding.start - self.plan.span.start
        self.grad_total[max(0, padded - self.own_span.start) :] = 1


@mutant("M19", "TIED", "TI DR", seen_in="DeepSpeed#7534")
def reduced_once_a_use(patch: Patches) -> None:
    """The bucket of a tied param is reduced once for each of its names."""

    @patch(DistributedDataParallel, "_sum_over_ranks")
    def wrong(right, self):
        right(self)
        for unit in {id(each): each for each in _units_of_tied(self)}.values():
            unit.fill()
            unit.reduce()


def _tied(module: nn.Module) -> list[nn.Parameter]:
    seen: set[int] = set()
    members = (param for _, param in module.named_parameters(remove_duplicate=False))
    return [param for param in members if id(param) in seen or seen.add(id(param))]


def _units_of_tied(ddp: DistributedDataParallel) -> list:
    return [
        buffer.unit_of(param)
        for buffer in ddp.buffers
        for param in _tied(ddp.module)
        if param in buffer.memory
    ]


@mutant("M21", "TIED", "TI DR", seen_in="Megatron-LM#844")
def tied_gradient_twice(patch: Patches) -> None:
    """The gradient of a tied param, already the sum over its uses, is added once for each name."""

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        if any(param is each for each in _tied(self.module)):
            param.grad.mul_(2)
        right(self, memory, param)


@mutant("T01", "TIED", "TI", seen_in="DeepSpeed#3033")
def untied(patch: Patches) -> None:
    """Flattening gives the second name of a tied param memory of its own."""

    @patch(DistributedDataParallel, "__init__")
    def wrong(right, self, module, **named):
        for member in module.modules():
            for name, param in list(member.named_parameters(recurse=False)):
                if any(param is each for each in _tied(module)):
                    member.register_parameter(name, nn.Parameter(param.detach().clone()))
        right(self, module, **named)


@mutant("T02", "TIED", "TI CL", seen_in="torchtitan#2318")
def tied_counts_twice(patch: Patches) -> None:
    """The norm counts a tied param once for each of its names."""

    @patch(DistributedOptimizer, "_measure")
    def wrong(right, self, trained, grads):
        tied = {id(param) for param in _tied(self.ddp.module)}
        pairs = list(zip(trained, grads, strict=True))
        pairs += [pair for pair in pairs if id(pair[0].param) in tied]
        return right(self, [master for master, _ in pairs], [grad for _, grad in pairs])


@mutant("T03", "TIED", "TI", seen_in="DeepSpeed#3149")
def tied_stepped_twice(patch: Patches) -> None:
    """The update of a tied param is written back once for each name: its master moves twice."""

    @patch(DistributedOptimizer, "_step_masters")
    def wrong(right, self, trained, grads):
        tied = {id(param) for param in _tied(self.ddp.module)}
        before = {id(m): m.leaf.detach().clone() for m in trained if id(m.param) in tied}
        right(self, trained, grads)
        for master in trained:
            if id(master) in before:
                leaf = master.leaf.detach()
                leaf.add_(leaf - before[id(master)])


@mutant("M23", "EMPTY", "FZ", seen_in="DeepSpeed#545", core=True)
def followers_shift(patch: Patches) -> None:
    """Params without a gradient are left out when a bucket is flattened, so that others shift."""

    @patch(DistributedDataParallel, "_accumulate")
    def noted(right, self, memory, param):
        self.__dict__.setdefault("_arrived", set()).add(id(param))
        right(self, memory, param)

    @patch(DistributedDataParallel, "_sum_over_ranks")
    def wrong(right, self):
        arrived = self.__dict__.pop("_arrived", set())
        for buffer in () if self.grad_schedule.sums_in_backward else self.buffers:
            for unit in buffer.units:
                members = [p for p in buffer.memory if buffer.unit_of(p) is unit]
                have = [p.main_grad.reshape(-1) for p in members if id(p) in arrived]
                packed = torch.cat([*have, unit.grads.new_zeros(0)])
                unit.grads.zero_()
                unit.grads[: packed.numel()] = packed
        right(self)


@mutant("M25", "EMPTY", "FZ", seen_in="DeepSpeed#8029", kill="memory")
def state_for_frozen_params(patch: Patches) -> None:
    """Frozen params have masters, too."""

    @patch(DistributedOptimizer, "__init__")
    def wrong(right, self, ddp, **named):
        right(self, ddp, **named)
        trained = {id(param) for param in ddp.params.values()}
        frozen = [p for p in ddp.module.parameters() if id(p) not in trained]
        self.__dict__["_frozen"] = [param.detach().float().clone() for param in frozen]


@mutant("E10", "EMPTY", "FZ", seen_in="class EMPTY")
def frozen_params_decay(patch: Patches) -> None:
    """Weight decay shrinks params that are never trained, too."""

    @patch(DistributedOptimizer, "_step_masters")
    def wrong(right, self, trained, grads):
        right(self, trained, grads)
        group, trained_params = self.inner.param_groups[0], set(self.ddp.params.values())
        for param in self.ddp.module.parameters():
            if param not in trained_params:
                param.mul_(1 - group["lr"] * group.get("weight_decay", 0.0))


@mutant("M27", "EMPTY", "GA FZ DR", seen_in="PyTorch#124193", core=True)
def unused_in_the_last_micro_batch(patch: Patches) -> None:
    """A param that the last micro-batch does not use is not reduced, though others used it."""

    @patch(DistributedDataParallel, "_accumulate")
    def noted(right, self, memory, param):
        self.__dict__.setdefault("_uses", {})[id(param)] = self.micro_batches
        right(self, memory, param)

    @patch(DistributedDataParallel, "_sum_over_ranks")
    def wrong(right, self):
        uses = self.__dict__.pop("_uses", {})
        stale = [
            p
            for p in self.params.values()
            if uses.get(id(p), self.micro_batches) != self.micro_batches and p.main_grad is not None
        ]
        kept = [param.main_grad.clone() for param in stale]
        right(self)
        for param, grad in zip(stale, kept, strict=True):
            if param.main_grad is not None:
                param.main_grad.copy_(grad)


@mutant("E01", "EMPTY", "FZ", seen_in="class EMPTY")
def unused_params_not_stepped(patch: Patches) -> None:
    """A param whose gradient is zero is left out of the step, decay and counter included."""

    @patch(DistributedOptimizer, "_step_masters")
    def wrong(right, self, trained, grads):
        pairs = [(m, g) for m, g in zip(trained, grads, strict=True) if g.any()]
        right(self, [master for master, _ in pairs], [grad for _, grad in pairs])


@mutant("E02", "EMPTY", "FZ", seen_in="PyTorch#176076")
def frozen_params_move(patch: Patches) -> None:
    """A param that is frozen for a while is stepped all the same."""

    @patch(DistributedOptimizer, "step")
    def wrong(right, self):
        for param in self.ddp.params.values():
            param.requires_grad_(True)
        return right(self)


@mutant("E03", "EMPTY", "FZ", seen_in="PyTorch#158719", kill="contract")
def owners_of_nothing_do_not_gather(patch: Patches) -> None:
    """A rank that owns nothing takes no part in the gathers."""

    @patch(DistributedDataParallel, "start_param_gather")
    def wrong(right, self):
        if any(m.fragment for buffer in self.buffers for m in buffer.memory.values()):
            right(self)


@mutant("E04", "EMPTY", "FZ", seen_in="DeepSpeed#2343", kill="contract")
def owners_of_nothing_do_not_measure(patch: Patches) -> None:
    """A rank that owns nothing returns early from the norm."""

    @patch(DistributedOptimizer, "_measure")
    def wrong(right, self, trained, grads):
        if not self.masters:
            return torch.zeros(()), 0, False
        return right(self, trained, grads)


@mutant("E05", "EMPTY", "FZ", seen_in="DeepSpeed#5216")
def last_element_of_short_params(patch: Patches) -> None:
    """Of a param with fewer elements than there are shards the gradient is dropped."""

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        if self.config.sharding.state and param.numel() < self.shard_group.size():
            param.grad.zero_()
        right(self, memory, param)


@mutant("E06", "EMPTY", "FZ B2", seen_in="DeepSpeed#5216", kill="volume")
def empty_params_fill_buckets(patch: Patches) -> None:
    """A param without elements counts as one element towards a full bucket."""

    @patch(planner, "_cut_into_buckets")
    def wrong(right, specs, *, bucket_elems):
        buckets, held = [[]], 0
        for spec in specs:
            if bucket_elems is not None and held >= bucket_elems and spec.numel:
                buckets.append([])
                held = 0
            buckets[-1].append(spec)
            held += max(1, spec.numel)
        return buckets


@mutant("E07", "EMPTY", "FZ GA", seen_in="PyTorch#43259")
def gradient_of_an_unused_param_kept(patch: Patches) -> None:
    """What took no part in a step keeps the gradient of the step before."""

    @patch(DistributedDataParallel, "_accumulate")
    def noted(right, self, memory, param):
        self.__dict__.setdefault("_touched", set()).add(id(param))
        right(self, memory, param)

    @patch(DistributedDataParallel, "zero_grad_buffer")
    def wrong(right, self):
        touched = self.__dict__.pop("_touched", set())
        untouched = [p for p in self.params.values() if id(p) not in touched]
        kept = {p: p.main_grad.clone() for p in untouched if p.main_grad is not None}
        right(self)
        if touched:
            for param, grad in kept.items():
                if param.main_grad is not None:
                    param.main_grad.copy_(grad + 1)


@mutant("E08", "EMPTY", "FZ", seen_in="class EMPTY", kill="contract")
def buffer_named_by_its_first_param(patch: Patches) -> None:
    """Params of the dtype of frozen ones are refused, since the buffer counts those, too."""

    @patch(data_parallel, "find_trainable_params")
    def wrong(right, module, **named):
        found = right(module, **named)
        frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        return {**found, **frozen}
