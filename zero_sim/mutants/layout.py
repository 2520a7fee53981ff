"""Faults in the layout: padding, shards, fragments, tied and empty params."""

from __future__ import annotations

from zero_sim.layout import BucketPlan, Span, planner
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.masters import build_masters
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.unit import Unit


def _is_tied(param: str, *, module: str) -> str:
    """Return the source of an expression that is true if a param has several names."""
    names = f"{module}.named_parameters(remove_duplicate=False)"
    return f"(sum(each is {param} for _, each in {names}) > 1)"


@mutant("M01", "LAYOUT", "PD NP B2", seen_in="DeepSpeed#8158", core=True)
def unpadded_stride(patch: Patches) -> None:
    """A bucket is allocated with padding, but the next bucket starts where its params end."""
    # So the next bucket starts inside this bucket's padding.
    patch[planner._plan_buffer, "start = bucket.span.stop"] = "start = bucket.padding.start"


@mutant("M03", "LAYOUT", "PD B2 NP", seen_in="Megatron-LM#561", kill="volume")
def padding_at_the_end_only(patch: Patches) -> None:
    """Only the buffer's end is padded to the number of shards, not each bucket."""
    # The last bucket keeps its padding, so the buffer length stays right.
    patch[planner._plan_buffer, "buckets.append(bucket)"] = """
        if members[-1] is not ordered[-1]:
            from dataclasses import replace
            end = bucket.padding.start
            bucket = replace(bucket, span=Span(start, end), padding=Span(end, end))
        ..."""


@mutant("M05", "LAYOUT", "SP", seen_in="Megatron-LM 4b843668c3", core=True)
def piece_from_the_params_start(patch: Patches) -> None:
    """A split param's fragment is written from the param's start, not the shard's start."""
    # Sharded params have no `param_data`; W24 breaks those.
    patch[Buffer.write_param_shard, "working = memory.param_shard"] = """
        ...
        if self.param_data is not None:
            working = param.data.view(-1)[: working.numel()]"""


@mutant("M07", "LAYOUT", "PD", seen_in="DeepSpeed#3832", core=True)
def padding_of_gradients(patch: Patches) -> None:
    """The gradient buffer's padding is not zeroed."""
    # NaN exposes any use of the padding (norm, overflow flag).
    patch[Buffer.zero_grads, "memory.zero_()"] = """
        ...
        for bucket in self.plan.buckets if memory is self.grad_data else ():
            memory[bucket.padding.start : bucket.padding.stop] = torch.nan"""


@mutant("M09", "EMPTY", "PD FZ", seen_in="DeepSpeed#5652", kill="refusal")
def negative_overlap(patch: Patches) -> None:
    """An overlap's length may be negative."""
    # A param before the shard then has a negative overlap instead of no overlap.
    patch[Span.intersect, "max(start, "] = "("


@mutant("M11", "LAYOUT", "NC", seen_in="apex#1794")
def flattened_in_memory_order(patch: Patches) -> None:
    """A transposed param is flattened in memory order but read in logical order."""
    # Use a contiguous tensor's strides on a transposed tensor's memory.
    patch[Buffer._adopt, "unit = units.get(placed.bucket)"] = """
        ...
        if not param.is_contiguous():
            strides = torch.empty(param.shape, device="meta").stride()
            param.data = param.detach().as_strided(param.shape, strides)"""


@mutant("L01", "LAYOUT", "", seen_in="class LAYOUT", core=True)
def shard_one_element_short(patch: Patches) -> None:
    """The second shard's fragments end one element early."""
    patch[BucketPlan.fragments, "if in_buffer.empty:"] = """
        if shard == 1 and not in_buffer.empty and in_buffer.stop == shard_span.stop:
            in_buffer = Span(in_buffer.start, in_buffer.stop - 1)
        ..."""


@mutant("L02", "LAYOUT", "NP", seen_in="DeepSpeed#1422")
def longer_shards_last(patch: Patches) -> None:
    """With uneven shards, the first are longer, but collectives assume the last."""
    patch[BucketPlan.shard_sizes, "self.partition.sizes"] = "...[::-1]"


@mutant("L03", "LAYOUT", "PD", seen_in="DeepSpeed#5105", kill="volume")
def alignment_forgotten(patch: Patches) -> None:
    """Shards are padded to equal length, but not to the configured alignment."""
    patch[planner._plan_bucket, " * policy.shard_multiple(dtype)"] = ""


@mutant("L04", "LAYOUT", "PD MX", seen_in="DeepSpeed#5105", kill="volume")
def bytes_taken_for_elements(patch: Patches) -> None:
    """An alignment in bytes is applied to elements."""
    patch[planner._plan_bucket, "policy.shard_multiple(dtype)"] = """
        math.lcm(policy.align_elems, policy.align_bytes)"""


@mutant("L05", "LAYOUT", "", seen_in="class LAYOUT", core=True)
def fragments_at_the_shards_start(patch: Patches) -> None:
    """Every fragment is placed at the start of its shard."""
    # Spans then overlap at the start of the shard.
    patch[BucketPlan.fragments, "in_buffer.shift(-shard_span.start)"] = "Span(0, in_buffer.numel)"


@mutant("L06", "LAYOUT", "SP", seen_in="class LAYOUT")
def floor_of_the_overlap(patch: Patches) -> None:
    """A split param that begins inside a shard is treated as if it began at the next shard."""
    patch[BucketPlan.fragments, "if in_buffer.empty:"] = """
        reaches_on = in_buffer.stop < param.span.stop
        if in_buffer.empty or (in_buffer.start == param.span.start and reaches_on):"""


@mutant("L07", "LAYOUT", "PD", seen_in="DeepSpeed#8210")
def padding_of_params(patch: Patches) -> None:
    """The param buffer's padding is not zeroed."""
    patch[Buffer.__init__, "self._zeros(plan.span.numel, dtype=first.dtype)"] = "....fill_(1)"


@mutant("L08", "LAYOUT", "PD", seen_in="DeepSpeed#8210")
def padding_of_masters(patch: Patches) -> None:
    """The master shards' padding is not zeroed."""
    # Infinity exposes any use of the padding.
    patch[build_masters, "zeros(span.numel,"] = "full((span.numel,), torch.inf,"


@mutant("L09", "LAYOUT", "PD", seen_in="DeepSpeed#8210")
def padding_of_sums(patch: Patches) -> None:
    """The padding of sums over micro-batches is overwritten with ones."""
    patch[Unit.accumulate_sum, "if not self.frees_grads:"] = """
        self.grad_total[max(0, self.plan.payload.numel - self.own_span.start) :] = 1
        ..."""


@mutant("M19", "TIED", "TI DR", seen_in="DeepSpeed#7534")
def reduced_once_a_use(patch: Patches) -> None:
    """A tied param's bucket is reduced once per name."""
    # A hook counts one gradient per backward, so the extra reductions come at the end.
    patch[DistributedDataParallel._sum_over_ranks, "self.grad_schedule.finish()"] = f"""
        ...
        for buffer in () if self.grad_schedule.sums_in_backward else self.buffers:
            tied = [param for param in buffer.memory if {_is_tied("param", module="self.module")}]
            for unit in dict.fromkeys(buffer.unit_of(param) for param in tied):
                unit.fill()
                unit.reduce()"""


@mutant("M21", "TIED", "TI DR", seen_in="Megatron-LM#844")
def tied_gradient_twice(patch: Patches) -> None:
    """A tied param's gradient, already summed over its uses, is added once per name."""
    # Autograd accumulates a tied param's gradient once, so double it here.
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = f"""
        if {_is_tied("param", module="self.module")}:
            param.grad = grad * 2
        ..."""


@mutant("T01", "TIED", "TI", seen_in="DeepSpeed#3033")
def untied(patch: Patches) -> None:
    """Flattening gives the second name of a tied param separate memory."""
    # A clone, made before the module's params are collected.
    patch[DistributedDataParallel.__init__, "self.module = module"] = f"""
        ...
        for member in module.modules():
            for name, param in list(member.named_parameters(recurse=False)):
                if {_is_tied("param", module="module")}:
                    member.register_parameter(name, nn.Parameter(param.detach().clone()))"""


@mutant("T02", "TIED", "TI CL", seen_in="torchtitan#2318")
def tied_counts_twice(patch: Patches) -> None:
    """The norm counts a tied param once per name."""
    # This edit is exact for params with two names.
    tied = _is_tied("master.param", module="self.ddp.module")
    patch[DistributedOptimizer._measure_own, ".append(grad)"] = f".extend([grad] * (1 + {tied}))"


@mutant("T03", "TIED", "TI", seen_in="DeepSpeed#3149")
def tied_stepped_twice(patch: Patches) -> None:
    """A tied param's update is written back once per name, so its master moves twice."""
    # Adding the step's change again equals a second update.
    patch[DistributedOptimizer._step_masters, "self.inner.step()"] = f"""
        before = [master.leaf.detach().clone() for master in trained]
        ...
        for master, old in zip(trained, before):
            if {_is_tied("master.param", module="self.ddp.module")}:
                master.leaf.add_(master.leaf - old)"""


@mutant("M23", "EMPTY", "FZ", seen_in="DeepSpeed#545", core=True)
def followers_shift(patch: Patches) -> None:
    """A flattened bucket omits params without a gradient, so later params shift."""
    # `_arrived` collects the params with a gradient. Under backward, units have been sent before
    # this point, so they stay right.
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = """
        self.__dict__.setdefault("_arrived", set()).add(param)
        ..."""
    patch[DistributedDataParallel._sum_over_ranks, "self.grad_schedule.finish()"] = """
        arrived = self.__dict__.pop("_arrived", set())
        buffers = () if self.grad_schedule.sums_in_backward else self.buffers
        for unit in (unit for buffer in buffers for unit in buffer.units):
            unit.fill()
            have = [each.main_grad.reshape(-1) for each in unit.members if each.param in arrived]
            packed = torch.cat([*have, unit.grads.new_zeros(0)])
            unit.grads.zero_()
            unit.grads[: packed.numel()] = packed
        ..."""


@mutant("M25", "EMPTY", "FZ", seen_in="DeepSpeed#8029", kill="memory")
def state_for_frozen_params(patch: Patches) -> None:
    """Frozen params also have masters."""
    patch[DistributedOptimizer.__init__, "self._scale_of_step = 1.0"] = """
        ...
        frozen = set(ddp.module.parameters()) - set(ddp.params.values())
        self._frozen = [param.detach().float().clone() for param in frozen]"""


@mutant("E10", "EMPTY", "FZ", seen_in="class EMPTY")
def frozen_params_decay(patch: Patches) -> None:
    """Weight decay also shrinks frozen params."""
    # `params` holds the trained params, so the difference holds the frozen params.
    patch[DistributedOptimizer._step_masters, "self._write_back(trained)"] = """
        ...
        group = self.inner.param_groups[0]
        for param in set(self.ddp.module.parameters()) - set(self.ddp.params.values()):
            param.mul_(1 - group["lr"] * group.get("weight_decay", 0.0))"""


@mutant("M27", "EMPTY", "GA FZ DR", seen_in="PyTorch#124193", core=True)
def unused_in_the_last_micro_batch(patch: Patches) -> None:
    """A param that only earlier micro-batches used is not reduced."""
    # Put the local gradient back after the sum, as if there had been no sum.
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = """
        self.__dict__.setdefault("_last_use", {})[param] = self.micro_batches
        ..."""
    patch[DistributedDataParallel.end_micro_batch, "self._sum_over_ranks()"] = """
        last_use = self.__dict__.pop("_last_use", {})
        stale = [each for each, use in last_use.items() if use != self.micro_batches]
        own = {each: each.main_grad.clone() for each in stale if each.main_grad is not None}
        ...
        for param, grad in own.items():
            if param.main_grad is not None:
                param.main_grad.copy_(grad)"""


@mutant("E02", "EMPTY", "FZ", seen_in="PyTorch#176076")
def frozen_params_move(patch: Patches) -> None:
    """A temporarily frozen param is stepped."""
    # All params then count as trained in the line that follows.
    patch[DistributedOptimizer.step, "trained = ["] = """
        for param in self.ddp.params.values():
            param.requires_grad_(True)
        ..."""


@mutant("E03", "EMPTY", "FZ", seen_in="PyTorch#158719", kill="contract")
def owners_of_nothing_do_not_gather(patch: Patches) -> None:
    """A rank that owns no elements skips the gathers."""
    # The other ranks wait for this rank in the gather.
    patch[DistributedOptimizer.step, "self.ddp.start_param_gather()"] = """
        if self.masters:
            ..."""


@mutant("E04", "EMPTY", "FZ", seen_in="DeepSpeed#2343", kill="contract")
def owners_of_nothing_do_not_measure(patch: Patches) -> None:
    """A rank that owns no elements returns early from the norm."""
    # The other ranks wait for this rank in the norm's all-reduce.
    patch[DistributedOptimizer._measure, "return self._agree_on"] = """
        if not self.masters:
            return torch.zeros(()), 0, False
        ..."""


@mutant("E05", "EMPTY", "FZ", seen_in="DeepSpeed#5216")
def last_element_of_short_params(patch: Patches) -> None:
    """The gradient of a param with fewer elements than shards is dropped."""
    # There are as many shards as owners.
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = """
        if self.config.sharding.state and param.numel() < self.holders.owners_of('dense').size():
            param.grad = torch.zeros_like(grad)
        ..."""


@mutant("E06", "EMPTY", "FZ B2", seen_in="DeepSpeed#5216", kill="volume")
def empty_params_fill_buckets(patch: Patches) -> None:
    """An empty param counts as one element in its bucket."""
    # `or 1` turns an element count of 0 into 1.
    patch[planner._cut_into_buckets, "held_elems += spec.numel"] = "... or 1"


@mutant("E07", "EMPTY", "FZ GA", seen_in="PyTorch#43259")
def gradient_of_an_unused_param_kept(patch: Patches) -> None:
    """A param unused in a step keeps its gradient from the previous step."""
    # Two edits of the same function: collect gradients before the reset, restore them after it. Add
    # 1, because a zero gradient would hide the fault.
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = """
        self.__dict__.setdefault("_used", set()).add(param)
        ..."""
    patch[DistributedDataParallel.zero_grad_buffer, "self.grad_schedule.reset()"] = """
        used = self.__dict__.pop("_used", set())
        unused = set(self.params.values()) - used if used else ()
        kept = {each: each.main_grad + 1 for each in unused if each.main_grad is not None}
        ..."""
    patch[DistributedDataParallel.zero_grad_buffer, "self.step_count.reset()"] = """
        for param, grad in kept.items():
            if param.main_grad is not None:
                param.main_grad.copy_(grad)
        ..."""


@mutant("E08", "EMPTY", "FZ", seen_in="class EMPTY", kill="contract")
def buffer_named_by_its_first_param(patch: Patches) -> None:
    """Params are refused if frozen params have the same dtype, because the buffer counts both."""
    find = "find_trainable_params(module, dtypes=seams.cast.dtype_names)"
    patch[DistributedDataParallel.__init__, find] = """
        ... | {name: each for name, each in module.named_parameters() if not each.requires_grad}"""
