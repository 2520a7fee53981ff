"""Faults of the step: norm, clipping, overflow, optimizer state and dtypes."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import torch

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.targets import own
from zero_sim.zero import optimizer as optimizers
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.variants.fp8 import ScaleUpdate
from zero_sim.zero.variants.scaler import LossScaler


@mutant("M69", "NORM", "CL SP", seen_in="PyTorch/XLA#4796", core=True)
def norm_of_the_own_shard(patch: Patches) -> None:
    """The norm is that of the rank's own shard."""

    @patch(optimizers, "all_reduce_sum")
    def wrong(right, flat, *, group, async_op=False):
        return None


@mutant("M71", "NORM", "CL PD", seen_in="DeepSpeed#3832")
def padding_in_the_zero_count(patch: Patches) -> None:
    """Padding is counted among the zeros of the gradient."""

    @patch(DistributedOptimizer, "_measure")
    def wrong(right, self, trained, grads):
        norm, zeros, overflowed = right(self, trained, grads)
        padding = sum(buffer.plan.padding_elems for buffer in self.ddp.buffers)
        return norm, zeros + padding, overflowed


@mutant("M73", "NORM", "CL", seen_in="DeepSpeed#5150", core=True)
def greater_for_lesser(patch: Patches) -> None:
    """The coefficient is the greater of 1 and bound over norm."""

    @patch(optimizers, "clip_by_norm_")
    def wrong(right, grads, *, norm, max_norm):
        bound, tiny, one = (torch.full_like(norm, value) for value in (max_norm, 1e-6, 1.0))
        for grad in grads:
            grad.mul_(torch.maximum(one, bound / (norm + tiny)))


def _clipped(self: DistributedOptimizer, grads, norm, right, is_clipped) -> None:
    trained = [master for master in self.masters if master.param.requires_grad]
    pairs = zip(trained, grads, strict=True)
    right(self, [grad for master, grad in pairs if is_clipped(master)], norm=norm)


@mutant("M75", "NORM", "CL K", seen_in="Megatron-LM 6191ff593f", core=True)
def only_what_counts_is_clipped(patch: Patches) -> None:
    """Copies that the norm leaves out are left out of the scaling, too."""

    @patch(DistributedOptimizer, "_clip")
    def wrong(right, self, grads, *, norm):
        _clipped(self, grads, norm, right, self._counts)


@mutant("M77", "NORM", "CL", seen_in="class NORM")
def norm_before_the_mean(patch: Patches) -> None:
    """The norm is that of the sum, taken before the division."""

    @patch(DistributedOptimizer, "_measure")
    def wrong(right, self, trained, grads):
        norm, zeros, overflowed = right(self, trained, grads)
        is_after = self.ddp.config.divide == "post"
        return norm * self.ddp.divisor if is_after else norm, zeros, overflowed


@mutant("M79", "NORM", "CL MX", seen_in="DeepSpeed#3790")
def one_dtype_unclipped(patch: Patches) -> None:
    """Gradients of 16-bit params are not clipped."""

    @patch(DistributedOptimizer, "_clip")
    def wrong(right, self, grads, *, norm):
        _clipped(self, grads, norm, right, lambda master: master.param.dtype != torch.bfloat16)


@mutant("N01", "NORM", "K", seen_in="VeOmni#184", core=True)
def replicas_counted_each(patch: Patches) -> None:
    """The norm counts every copy of what is held in copies."""

    @patch(DistributedDataParallel, "is_first_copy")
    def wrong(right, self, kind):
        return True


@mutant("N02", "NORM", "", seen_in="Megatron-LM#3478")
def squares_summed_in_fp32(patch: Patches) -> None:
    """Sums of squares are rounded to fp32 before they are exchanged."""

    @patch(optimizers, "measure_grads")
    def wrong(right, grads, *, device):
        return right(grads, device=device).to(torch.float32).to(torch.float64)


@mutant("N03", "NORM", "CL", seen_in="class NORM")
def no_epsilon(patch: Patches) -> None:
    """The coefficient is bound over norm, without the small term in the denominator."""

    @patch(optimizers, "clip_by_norm_")
    def wrong(right, grads, *, norm, max_norm):
        for grad in grads:
            grad.mul_(torch.clamp(torch.full_like(norm, max_norm) / norm, max=1.0))


@mutant("N04", "NORM", "CL", seen_in="class NORM")
def clamped_on_one_side(patch: Patches) -> None:
    """Clipping by value bounds elements from above alone."""

    @patch(optimizers, "clip_by_value_")
    def wrong(right, grads, *, max_value):
        for grad in grads:
            grad.clamp_(max=max_value)


@mutant("N05", "NORM", "", seen_in="torchtitan#2318")
def norm_of_one_part(patch: Patches) -> None:
    """The norm leaves out the other parts of a model that is split over ranks."""

    @patch(DistributedOptimizer, "_measure")
    def wrong(right, self, trained, grads):
        group, self._model_parallel_group = self._model_parallel_group, None
        try:
            return right(self, trained, grads)
        finally:
            self._model_parallel_group = group


@mutant("N06", "NORM", "ME", seen_in="Megatron-LM#5916")
def experts_left_out_of_the_norm(patch: Patches) -> None:
    """The norm counts experts on the first rank alone, though each rank holds others."""

    @patch(DistributedDataParallel, "is_first_copy")
    def wrong(right, self, kind):
        return right(self, kind) and (kind == "dense" or self.rank == 0)


@mutant("N07", "NORM", "", seen_in="Megatron-LM#3478")
def shared_params_counted_in_each_part(patch: Patches) -> None:
    """Params that several parts of a model hold count in each of them."""

    @patch(own, "is_counted")
    def wrong(right, spec, name, *, place):
        return True


@mutant("N08", "NORM", "", seen_in="fairscale#517")
def norms_added(patch: Patches) -> None:
    """Ranks exchange norms and add them, where they should add squares."""

    @patch(optimizers, "measure_grads")
    def rooted(right, grads, *, device):
        measured = right(grads, device=device)
        measured[0] = measured[0].sqrt()
        return measured

    @patch(optimizers, "root_of_squares")
    def plain(right, squares):
        return squares.to(torch.float32)


@mutant("M81", "INF", "IN AS", seen_in="PyTorch#115710", kill="race")
def overflow_read_too_early(patch: Patches) -> None:
    """The overflow flag is read before its reduction has completed."""

    @patch(optimizers, "all_reduce_sum")
    def wrong(right, flat, *, group, async_op=False):
        right(flat, group=group, async_op=True)


@mutant("M83", "INF", "IN S2", seen_in="Megatron-LM 33111c9c9a")
def gather_lost_with_a_skipped_step(patch: Patches) -> None:
    """A skipped step marks the gathers as done, and the next step's are left out."""

    @patch(DistributedOptimizer, "step")
    def noted(right, self):
        result = right(self)
        self.ddp.__dict__["_after_a_skip"] = result.skipped
        return result

    @patch(DistributedDataParallel, "start_param_gather")
    def wrong(right, self):
        if not self.__dict__.get("_after_a_skip"):
            right(self)


@mutant("I01", "INF", "IN", seen_in="DeepSpeed#7580", core=True)
def overflow_not_shared(patch: Patches) -> None:
    """Each rank skips by what it owns itself."""

    @patch(DistributedOptimizer, "_measure")
    def wrong(right, self, trained, grads):
        norm, zeros, _ = right(self, trained, grads)
        return norm, zeros, any(not bool(grad.isfinite().all()) for grad in grads)


@mutant("I02", "INF", "IN", seen_in="class INF")
def nan_is_no_overflow(patch: Patches) -> None:
    """Only infinities count as an overflow, a NaN does not."""

    @patch(optimizers, "measure_grads")
    def wrong(right, grads, *, device):
        measured = right(grads, device=device)
        measured[2] = float(torch.isinf(measured[0]))
        return measured


@mutant("I03", "INF", "IN", seen_in="class INF")
def scale_never_shrinks(patch: Patches) -> None:
    """The loss scale does not shrink after an overflow."""

    @patch(LossScaler, "update")
    def wrong(right, self, *, found_inf):
        scale = self.scale
        right(self, found_inf=found_inf)
        self.scale = max(scale, self.scale)


@mutant("I04", "INF", "IN S2", seen_in="class INF")
def good_steps_survive_a_skip(patch: Patches) -> None:
    """An overflow does not reset the count of good steps."""

    @patch(LossScaler, "update")
    def wrong(right, self, *, found_inf):
        good_steps = self.good_steps
        right(self, found_inf=found_inf)
        if found_inf:
            self.good_steps = good_steps


@mutant("I05", "INF", "S2", seen_in="class INF")
def grows_one_step_late(patch: Patches) -> None:
    """The loss scale grows one good step later than it should."""

    @patch(LossScaler, "update")
    def wrong(right, self, *, found_inf):
        self.growth_interval += 1
        right(self, found_inf=found_inf)
        self.growth_interval -= 1


@mutant("I06", "INF", "IN", seen_in="class INF")
def overflow_steps_all_the_same(patch: Patches) -> None:
    """A step that overflowed is taken."""

    @patch(DistributedOptimizer, "_measure")
    def wrong(right, self, trained, grads):
        return (*right(self, trained, grads)[:2], False)


@mutant("I07", "INF", "IN", seen_in="DeepSpeed#7580")
def overflow_unseen_in_other_parts(patch: Patches) -> None:
    """An overflow in one part of a split model is not told to the others."""

    @patch(DistributedOptimizer, "_measure")
    def wrong(right, self, trained, grads):
        norm, zeros, overflowed = right(self, trained, grads)
        if self._model_parallel_group is not None:
            overflowed = any(
                not bool(memory.own_grad.float().isfinite().all())
                for buffer in self.ddp.buffers
                for memory in buffer.memory.values()
            )
        return norm, zeros, overflowed


@mutant("M85", "OPTST", "B2 S2", seen_in="PyTorch#96313")
def counter_per_bucket(patch: Patches) -> None:
    """The step counter advances once for each bucket of which a rank owns pieces."""

    @patch(DistributedOptimizer, "_step_masters")
    def wrong(right, self, trained, grads):
        right(self, trained, grads)
        extra = len({(m.buffer_index, m.fragment.bucket) for m in trained}) - 1
        for master in trained:
            step = self.inner.state.get(master.leaf, {}).get("step")
            if isinstance(step, torch.Tensor) and extra:
                step += extra


@mutant("M87", "OPTST", "PG SP", seen_in="class OPTST")
def neighbours_group(patch: Patches) -> None:
    """A param that begins a shard gets the settings of the next group."""

    @patch(DistributedOptimizer, "_build_inner")
    def wrong(right, self, optim_factory, *, group_of, declared):
        first = {m.fragment.param for m in self.masters if not m.fragment.in_shard.start}
        if group_of is None or not first:
            return right(self, optim_factory, group_of=group_of, declared=declared)
        count = 1 + max(group_of(name) for name in self.ddp.params)
        return right(
            self,
            optim_factory,
            group_of=lambda name: (group_of(name) + (name in first)) % count,
            declared=declared,
        )


@mutant("P01", "OPTST", "PG", seen_in="DeepSpeed#7050", core=True)
def groups_merged(patch: Patches) -> None:
    """All params get the settings of the first group."""

    @patch(own, "group_index")
    def wrong(right, spec, name):
        return 0


@mutant("P02", "OPTST", "S2", seen_in="nanotron 4cc62ae8")
def warm_up_compounds(patch: Patches) -> None:
    """The factor of a schedule multiplies the last learning rate, not the first."""

    @patch(DistributedOptimizer, "set_lr_factor")
    def wrong(right, self, factor):
        for group in self.inner.param_groups:
            group["lr"] = group["lr"] * factor


@mutant("P03", "OPTST", "S2", seen_in="class OPTST")
def learning_rate_one_step_late(patch: Patches) -> None:
    """A step runs with the learning rate of the step before."""

    @patch(DistributedOptimizer, "set_lr_factor")
    def wrong(right, self, factor):
        right(self, self.__dict__.get("_factor", factor))
        self.__dict__["_factor"] = factor


@mutant("P04", "OPTST", "", seen_in="DeepSpeed#5104")
def dummy_step(patch: Patches) -> None:
    """State is made by a step on zero gradients, which decays and counts."""

    @patch(DistributedOptimizer, "_build_inner")
    def wrong(right, self, optim_factory, *, group_of, declared):
        inner = right(self, optim_factory, group_of=group_of, declared=declared)
        for master in self.masters:
            master.leaf.grad = torch.zeros_like(master.leaf)
        with torch.no_grad(), suppress(Exception):
            inner.step()
        for master in self.masters:
            master.leaf.grad = None
        return inner


@mutant("P05", "OPTST", "S2", seen_in="class OPTST")
def moments_of_the_first_fragment(patch: Patches) -> None:
    """After the first step a rank's two first fragments of one length trade their state."""

    @patch(DistributedOptimizer, "_step_masters")
    def wrong(right, self, trained, grads):
        right(self, trained, grads)
        state = self.inner.state
        for first, second in pairwise(trained):
            if first.leaf.numel() == second.leaf.numel() and first.leaf in state:
                state[first.leaf], state[second.leaf] = state[second.leaf], state[first.leaf]
                return


@mutant("M89", "DTYPE", "MX SP", seen_in="Megatron-LM#6336")
def split_param_not_refreshed(patch: Patches) -> None:
    """The 16-bit copy of a split param is not refreshed."""

    @patch(Buffer, "write_param_shard")
    def wrong(right, self, param, data):
        is_split = data.numel() < param.numel()
        if not (is_split and param.dtype is torch.bfloat16):
            right(self, param, data)


@mutant("M91", "DTYPE", "MX B2", seen_in="DeepSpeed#8073")
def gathered_in_the_first_dtype(patch: Patches) -> None:
    """All buffers are gathered in the dtype of the first one."""

    @patch(DistributedDataParallel, "finish_param_gather")
    def wrong(right, self):
        right(self)
        first = self.buffers[0].param_data
        for buffer in self.buffers[1:] if first is not None else ():
            data = buffer.param_data
            if data.element_size() > 1 and first.element_size() > 1:
                data.copy_(data.to(first.dtype))


@mutant("D01", "DTYPE", "MX", seen_in="PyTorch/XLA#6857", core=True)
def masters_in_low_precision(patch: Patches) -> None:
    """Masters are rounded to the dtype of their params after every step."""

    @patch(DistributedOptimizer, "_step_masters")
    def wrong(right, self, trained, grads):
        right(self, trained, grads)
        for master in trained:
            if master.param.element_size() == 2:
                master.leaf.copy_(master.leaf.to(master.param.dtype))


@mutant("D02", "DTYPE", "MX", seen_in="DeepSpeed#4540")
def truncated(patch: Patches) -> None:
    """Masters are cut off, not rounded, where they become 16-bit params."""

    @patch(Buffer, "write_param_shard")
    def wrong(right, self, param, data):
        if param.dtype is torch.bfloat16:
            bits = data.detach().contiguous().view(torch.int32)
            data = (bits & -0x10000).view(torch.float32)
        right(self, param, data)


@mutant("D03", "DTYPE", "MX GA", seen_in="class DTYPE")
def accumulated_in_low_precision(patch: Patches) -> None:
    """The fp32 gradient buffer is rounded to the dtype of its params after every micro-batch."""

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        dtype = param.grad.dtype
        right(self, memory, param)
        if memory.main_grad is not None:
            memory.main_grad.copy_(memory.main_grad.to(dtype))


@mutant("D04", "DTYPE", "SP", seen_in="class DTYPE")
def scale_of_the_own_part(patch: Patches) -> None:
    """The scale of an fp8 param is that of the rank's own part of it."""

    @patch(ScaleUpdate, "__init__")
    def wrong(right, self, scales, *, group):
        right(self, scales, group=None)


@mutant("D05", "DTYPE", "MX", seen_in="DeepSpeed#4540")
def gradients_rounded_on_the_way_in(patch: Patches) -> None:
    """The reduced gradient is rounded to bf16 before it reaches the optimizer."""

    @patch(DistributedOptimizer, "_upcast_grad")
    def wrong(right, self, master):
        grad = right(self, master)
        return grad.to(torch.bfloat16).to(torch.float32)


@mutant("D06", "DTYPE", "S2", seen_in="class DTYPE")
def scale_of_the_step_before(patch: Patches) -> None:
    """An fp8 param is written at the scale of the step before."""

    @patch(ScaleUpdate, "run")
    def wrong(right, self, masters):
        before = {param: scale.clone() for param, scale in self._scales.items()}
        right(self, masters)
        for param, scale in self._scales.items():
            last = self.__dict__.setdefault("_last", before)
            now = scale.clone()
            scale.copy_(last[param])
            last[param] = now


@mutant("P06", "OPTST", "", seen_in="class OPTST", core=True)
def nothing_stepped(patch: Patches) -> None:
    """Masters are not stepped."""

    @patch(DistributedOptimizer, "_step_masters")
    def wrong(right, self, trained, grads):
        return None
