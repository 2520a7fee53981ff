"""Faults in the step: norm, clipping, overflow, optimizer state, dtypes and fp8 scales."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.targets import own
from zero_sim.targets.own import ZeroSimEngine
from zero_sim.zero import norm
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.groups import Holders
from zero_sim.zero.optimizer import AllAtOnce, DistributedOptimizer
from zero_sim.zero.schedule import AtEnd
from zero_sim.zero.variants.fp8 import Fp8Cast, ScaleUpdate
from zero_sim.zero.variants.scaler import LossScaler


@mutant("M69", "NORM", "CL SP", seen_in="PyTorch/XLA#4796", core=True)
def norm_of_the_own_shard(patch: Patches) -> None:
    """The norm covers only the rank's own shard."""
    patch[DistributedOptimizer._agree_on, "all_reduce_sum(measured, group=self.ddp.group)"] = "pass"


@mutant("M71", "NORM", "CL PD", seen_in="DeepSpeed#3832")
def padding_in_the_zero_count(patch: Patches) -> None:
    """Padding is counted among the zeros of the gradient."""
    patch[DistributedOptimizer._agree_on, "int(zeros)"] = """
        ... + sum(buffer.plan.padding_elems for buffer in self.ddp.buffers)"""


@mutant("M73", "NORM", "CL", seen_in="DeepSpeed#5150", core=True)
def greater_for_lesser(patch: Patches) -> None:
    """The clip coefficient is the maximum of 1 and bound over norm, not the minimum."""
    patch[norm.clip_by_norm_, "torch.minimum"] = "torch.maximum"


@mutant("M75", "NORM", "CL K", seen_in="Megatron-LM 6191ff593f", core=True)
def only_what_counts_is_clipped(patch: Patches) -> None:
    """Replicas that the norm does not count are not clipped either."""
    patch[AllAtOnce.step, "self._grads, norm=norm"] = """
        [g for m, g in zip(trained, self._grads) if self._optimizer._counts(m)], norm=norm"""


@mutant("M77", "NORM", "CL", seen_in="class NORM")
def norm_before_the_mean(patch: Patches) -> None:
    """The norm is taken before the division."""
    # If the division comes before the sum, the norm is right.
    patch[DistributedOptimizer._agree_on, "root_of_squares(measured[0])"] = """
        ... * (self.ddp.divisor if self.ddp.config.divide == "post" else 1)"""


@mutant("M79", "NORM", "CL MX", seen_in="DeepSpeed#3790")
def one_dtype_unclipped(patch: Patches) -> None:
    """Gradients of 16-bit params are not clipped."""
    patch[AllAtOnce.step, "self._grads, norm=norm"] = """
        [g for m, g in zip(trained, self._grads) if m.param.dtype != torch.bfloat16], norm=norm"""


@mutant("N01", "NORM", "K", seen_in="VeOmni#184", core=True)
def replicas_counted_each(patch: Patches) -> None:
    """The norm counts every replica."""
    patch[Holders.is_first_replica, "replicas is None"] = "True"


@mutant("N02", "NORM", "", seen_in="Megatron-LM#3478")
def squares_summed_in_fp32(patch: Patches) -> None:
    """Sums of squares are rounded to fp32 before they are exchanged."""
    # fp32 keeps 24 of fp64's 53 significant bits.
    patch[norm.measure_grads, "dtype=torch.float64, device=device)"] = """
        dtype=torch.float32, device=device).to(torch.float64)"""


@mutant("N03", "NORM", "CL", seen_in="class NORM")
def no_epsilon(patch: Patches) -> None:
    """The clip coefficient lacks the epsilon in its denominator."""
    patch[norm.clip_by_norm_, "(norm + tiny)"] = "norm"


@mutant("N04", "NORM", "CL", seen_in="class NORM")
def clamped_on_one_side(patch: Patches) -> None:
    """Clipping by value bounds elements only from above."""
    patch[norm.clip_by_value_, "clamp_(-max_value, max_value)"] = "clamp_(max=max_value)"


@mutant("N05", "NORM", "", seen_in="torchtitan#2318")
def norm_of_one_part(patch: Patches) -> None:
    """The norm omits a split model's other parts."""
    patch[DistributedOptimizer._agree_on, "self.seams.model_parallel_group is not None"] = "False"


@mutant("N06", "NORM", "ME", seen_in="Megatron-LM#5916")
def experts_left_out_of_the_norm(patch: Patches) -> None:
    """The norm counts experts only on the first rank, although other ranks hold other experts."""
    patch[Holders.is_first_replica, "replicas ="] = """
        if kind != "dense" and self.dense.group.rank() > 0:
            return False
        ..."""


@mutant("N07", "NORM", "", seen_in="Megatron-LM#3478")
def shared_params_counted_in_each_part(patch: Patches) -> None:
    """If several parts of a model share a param, the norm counts it in each part."""
    patch[own.is_counted, "not is_copy and"] = "True or"


@mutant("N08", "NORM", "", seen_in="fairscale#517")
def norms_added(patch: Patches) -> None:
    """Ranks add norms instead of squares."""
    # Sum norms, and take no root.
    patch[norm.measure_grads, "tensor([squares"] = "tensor([math.sqrt(squares)"
    patch[norm.root_of_squares, ".sqrt()"] = ""


@mutant("M81", "INF", "IN AS", seen_in="PyTorch#115710", kill="race")
def overflow_read_too_early(patch: Patches) -> None:
    """The overflow flag is read before its reduction has completed."""
    # Issue the reduction asynchronously and drop its handle.
    patch[DistributedOptimizer._agree_on, "group=self.ddp.group"] = "..., async_op=True"


@mutant("M83", "INF", "IN S2", seen_in="Megatron-LM 33111c9c9a")
def gather_lost_with_a_skipped_step(patch: Patches) -> None:
    """A skipped step marks the gathers as done, so the next step omits its gathers."""
    # `_after_a_skip` passes the mark to the next step.
    patch[DistributedOptimizer.step, "self.ddp.start_param_gather()"] = """
        if not getattr(self, "_after_a_skip", False):
            ..."""
    patch[DistributedOptimizer.step, "return StepResult("] = """
        self._after_a_skip = skipped
        ..."""


@mutant("I01", "INF", "IN", seen_in="DeepSpeed#7580", core=True)
def overflow_not_shared(patch: Patches) -> None:
    """Each rank decides by its own overflow count to skip the step."""
    # Take the count before the sum.
    patch[DistributedOptimizer._agree_on, "all_reduce_sum(measured, group=self.ddp.group)"] = """
        own_count = measured[2].item()
        ..."""
    patch[DistributedOptimizer._agree_on, "overflow_count > 0"] = "own_count > 0"


@mutant("I02", "INF", "IN", seen_in="class INF")
def nan_is_no_overflow(patch: Patches) -> None:
    """Only infinities count as an overflow; NaN does not."""
    # With a NaN, the sum of squares is NaN, which is not infinite.
    patch[norm.measure_grads, "not math.isfinite(squares)"] = "math.isinf(squares)"


@mutant("I03", "INF", "IN", seen_in="class INF")
def scale_never_shrinks(patch: Patches) -> None:
    """The loss scale does not shrink after an overflow."""
    patch[LossScaler.update, "self.scale / 2"] = "self.scale"


@mutant("I04", "INF", "IN S2", seen_in="class INF")
def good_steps_survive_a_skip(patch: Patches) -> None:
    """An overflow does not reset the good step count."""
    # Without the reset, the scale grows too early.
    patch[LossScaler.update, "self.good_steps = 0\nreturn"] = "return"


@mutant("I05", "INF", "S2", seen_in="class INF")
def grows_one_step_late(patch: Patches) -> None:
    """The loss scale grows one good step later than it should."""
    patch[LossScaler.update, "== self.growth_interval"] = "> self.growth_interval"


@mutant("I06", "INF", "IN", seen_in="class INF")
def overflow_steps_all_the_same(patch: Patches) -> None:
    """A step with an overflow is taken."""
    patch[DistributedOptimizer._agree_on, "overflow_count > 0"] = "False"


@mutant("I07", "INF", "IN", seen_in="DeepSpeed#7580")
def overflow_unseen_in_other_parts(patch: Patches) -> None:
    """An overflow in one part of a split model is not shared with the other parts."""
    # Take the count before the sum over the parts.
    patch[DistributedOptimizer._agree_on, "if self.seams.model_parallel_group is not None:"] = """
        own_count = measured[2].item()
        ..."""
    patch[DistributedOptimizer._agree_on, "overflow_count > 0"] = "own_count > 0"


@mutant("M85", "OPTST", "B2 S2", seen_in="PyTorch#96313")
def counter_per_bucket(patch: Patches) -> None:
    """The step counter advances once per bucket with a fragment of the rank."""
    # Buckets after the first add further counts.
    patch[DistributedOptimizer._step_masters, "self._write_back(trained)"] = """
        buckets = {(master.buffer_index, master.fragment.bucket) for master in trained}
        for state in self.inner.state.values():
            if "step" in state and len(buckets) > 1:
                state["step"] += len(buckets) - 1
        ..."""


@mutant("M87", "OPTST", "PG SP", seen_in="class OPTST")
def neighbours_group(patch: Patches) -> None:
    """A param at a shard's start gets the next group's settings."""
    patch[DistributedOptimizer._build_inner, "group_of(master.fragment.param)"] = """
        (... + (master.fragment.in_shard.start == 0)) % len(leaves)"""


@mutant("P01", "OPTST", "PG", seen_in="DeepSpeed#7050", core=True)
def groups_merged(patch: Patches) -> None:
    """All params get the first group's settings."""
    patch[ZeroSimEngine.__init__, "partial(group_index, spec)"] = "(lambda name: 0)"


@mutant("P02", "OPTST", "S2", seen_in="nanotron 4cc62ae8")
def warm_up_compounds(patch: Patches) -> None:
    """The schedule's factor multiplies the last learning rate, not the initial rate."""
    # The factor then compounds from step to step.
    patch[DistributedOptimizer.set_lr_factor, "base_lr * factor"] = 'group["lr"] * factor'


@mutant("P04", "OPTST", "", seen_in="DeepSpeed#5104")
def dummy_step(patch: Patches) -> None:
    """Optimizer state is created by a step on zero gradients, which decays and counts."""
    # Optimizers with `attach` need unsharded params and cannot step this early.
    patch[DistributedOptimizer._build_inner, "return inner"] = """
        if not hasattr(inner, "attach"):
            for master in self.masters:
                master.leaf.grad = torch.zeros_like(master.leaf)
            inner.step()
            inner.zero_grad()
        ..."""


@mutant("P05", "OPTST", "S2", seen_in="class OPTST")
def moments_of_the_first_fragment(patch: Patches) -> None:
    """After a step, the first two neighbouring fragments of equal length exchange state."""
    # State only fits fragments of equal length.
    patch[DistributedOptimizer._step_masters, "self._write_back(trained)"] = """
        state, leaves = self.inner.state, [master.leaf for master in trained]
        for first, second in zip(leaves, leaves[1:]):
            if first.numel() == second.numel() and first in state:
                state[first], state[second] = state[second], state[first]
                break
        ..."""


@mutant("M89", "DTYPE", "MX SP", seen_in="Megatron-LM#6336")
def split_param_not_refreshed(patch: Patches) -> None:
    """A split param's 16-bit copy is not refreshed."""
    # If the data is shorter than the param, the param is split.
    patch[Buffer.write_param_shard, "self._cast.write_("] = """
        if data.numel() < param.numel() and param.dtype is torch.bfloat16:
            return
        ..."""


@mutant("M91", "DTYPE", "MX B2", seen_in="DeepSpeed#8073")
def gathered_in_the_first_dtype(patch: Patches) -> None:
    """All buffers are gathered in the first buffer's dtype."""
    # fp8 params have a scale, so only round wider dtypes.
    patch[DistributedDataParallel.finish_param_gather, "self.param_schedule.finish()"] = """
        ...
        first = self.buffers[0].param_data
        for data in [buffer.param_data for buffer in self.buffers[1:] if first is not None]:
            if data.element_size() > 1 and first.element_size() > 1:
                data.copy_(data.to(first.dtype))"""


@mutant("D01", "DTYPE", "MX", seen_in="PyTorch/XLA#6857", core=True)
def masters_in_low_precision(patch: Patches) -> None:
    """Masters are rounded to their params' dtype after every step."""
    patch[DistributedOptimizer._write_back, "master.leaf.grad = None"] = """
        if master.param.element_size() == 2:
            master.leaf.copy_(master.leaf.to(master.param.dtype))
        ..."""


@mutant("D02", "DTYPE", "MX", seen_in="DeepSpeed#4540")
def truncated(patch: Patches) -> None:
    """Masters are truncated, not rounded, to bf16 params."""
    # bf16 is the upper half of fp32, so masking the lower 16 bits truncates.
    patch[Buffer.write_param_shard, "self._cast.write_("] = """
        if param.dtype is torch.bfloat16:
            data = (data.contiguous().view(torch.int32) & -0x10000).view(torch.float32)
        ..."""


@mutant("D03", "DTYPE", "MX GA", seen_in="class DTYPE")
def accumulated_in_low_precision(patch: Patches) -> None:
    """The fp32 gradient buffer is rounded to the param dtype after every micro-batch."""
    patch[AtEnd.take, "unit.add_grad(memory, param.grad.detach())"] = """
        ...
        memory.main_grad.copy_(memory.main_grad.to(param.grad.dtype))"""


@mutant("D04", "DTYPE", "SP", seen_in="class DTYPE")
def scale_of_the_own_part(patch: Patches) -> None:
    """An fp8 param's scale covers only the rank's own fragment."""
    patch[ScaleUpdate.run, "self._group is not None"] = "False"


@mutant("D05", "DTYPE", "MX", seen_in="DeepSpeed#4540")
def gradients_rounded_on_the_way_in(patch: Patches) -> None:
    """The reduced gradient is rounded to bf16 before it reaches the optimizer."""
    # bf16 keeps 8 of fp32's 24 significant bits.
    patch[DistributedOptimizer._upcast_grad, "return grad"] = (
        "....to(torch.bfloat16).to(grad.dtype)"
    )


@mutant("P06", "OPTST", "", seen_in="class OPTST", core=True)
def nothing_stepped(patch: Patches) -> None:
    """Masters are not stepped."""
    patch[DistributedOptimizer._step_masters, "self.inner.step()"] = "pass"


@mutant("D07", "DTYPE", "", seen_in="class DTYPE")
def scale_never_updated(patch: Patches) -> None:
    """An fp8 param's scale keeps its initial value."""
    patch[ScaleUpdate.run, "if not self._scales:"] = "if True:"


@mutant("D08", "DTYPE", "K SP", seen_in="class DTYPE")
def greatest_over_the_copies(patch: Patches) -> None:
    """An fp8 param's greatest magnitude is exchanged over the replica group."""
    patch[Fp8Cast.prepare, "self._holders.owners_of(kind)"] = """
        self._holders.groups_of(kind).replica_group or ..."""


@mutant("D10", "DTYPE", "", seen_in="class DTYPE")
def one_format_for_the_other(patch: Patches) -> None:
    """Scales are chosen for e4m3, even for e5m2 values."""
    patch[ScaleUpdate.run, "dtype=param.dtype"] = "dtype=torch.float8_e4m3fn"


@mutant("D11", "DTYPE", "", seen_in="class DTYPE", kill="values")
def stale_scale_on_odd_ranks(patch: Patches) -> None:
    """Odd ranks exchange magnitudes but keep their old scales."""
    patch[ScaleUpdate.run, "if param.requires_grad"] = "... and dist.get_rank() % 2 == 0"


@mutant("D12", "DTYPE", "", seen_in="class DTYPE")
def values_of_another_scale(patch: Patches) -> None:
    """fp8 values are rounded for twice the stored scale."""
    patch[Fp8Cast.write_, "quantize_(working, master"] = "... / 2"
