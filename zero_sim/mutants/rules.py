"""Clips, norms, sums and means by another rule than the declared rule.

Each rule is right for a library that declares it (`zero_sim.targets.numerics`). Otherwise results
are wrong by a few ulps.
"""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import division, norm
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants.grad_unit import GradUnit

_COEFFICIENT = "torch.minimum(one, bound / (norm + tiny))"


@mutant("N09", "NORM", "CL", seen_in="PyTorch's clip_grad_norm_")
def bound_times_a_reciprocal(patch: Patches) -> None:
    """Gradients are clipped by the bound times the norm's rounded reciprocal."""
    patch[norm.clip_by_norm_, _COEFFICIENT] = "((norm + tiny).reciprocal() * bound).clamp(max=1.0)"


@mutant("N10", "NORM", "CL", seen_in="Megatron-LM's clip_grad_by_total_norm_fp32")
def coefficient_in_fp64(patch: Patches) -> None:
    """The clip coefficient is computed in fp64 and rounded once."""
    # `item()` returns a Python float, so the division runs in fp64.
    patch[norm.clip_by_norm_, _COEFFICIENT] = """
        torch.full_like(norm, min(1.0, max_norm / (norm.item() + 1e-6)))"""


@mutant("N11", "NORM", "CL", seen_in="DeepSpeed's unscale_and_clip_grads")
def inverse_of_a_quotient(patch: Patches) -> None:
    """Gradients are clipped by the reciprocal of norm over bound."""
    patch[norm.clip_by_norm_, _COEFFICIENT] = "((norm + tiny) / bound).clamp(min=1.0).reciprocal()"


@mutant("N12", "NORM", "CL", seen_in="apex's FusedLAMB")
def divided_by_a_quotient(patch: Patches) -> None:
    """Gradients are clipped by dividing by norm over bound."""
    patch[norm.clip_by_norm_, _COEFFICIENT] = "((norm + tiny) / bound).clamp(min=1.0)"
    patch[norm.clip_by_norm_, "grad.mul_(coefficient)"] = "grad.div_(coefficient)"


@mutant("N13", "NORM", "", seen_in="fairscale's OSS.clip_grad_norm")
def norm_of_norms(patch: Patches) -> None:
    """The norm combines the fragments' fp32 norms, not their squares."""
    # Like torch's clip_grad_norm_: a norm per tensor, then the norm of these norms.
    patch[norm.measure_grads, "return torch.tensor([squares"] = """
        norms = [torch.linalg.vector_norm(grad) for grad in grads]
        if norms:
            squares = torch.linalg.vector_norm(torch.stack(norms)).square().item()
        ..."""


@mutant("S09", "SCALE", "NP", seen_in="DDP's default communication hook")
def divided_before_for_after(patch: Patches) -> None:
    """Gradients are divided before the sum, although the sum should be divided."""
    # Only if the sum itself is divided, by ranks, once per step.
    patch[DistributedDataParallel.__init__, "self.config = config"] = """
        if (config.divide, config.sync, config.divide_by) == ("post", "last", "ranks"):
            from dataclasses import replace
            config = replace(config, divide="pre")
        ..."""


@mutant("S10", "SCALE", "NP", seen_in="Megatron-LM's gradient_scaling_factor")
def product_for_a_quotient_before(patch: Patches) -> None:
    """A division before the sum is replaced by multiplying with the rounded reciprocal."""
    patch[division.scale_before_sum_, "divide_(values, divisor=divisor)"] = """
        values.mul_(divisor.reciprocal())"""


@mutant("S11", "SCALE", "MX NP", seen_in="FSDP2 with force_sum_reduction_for_comms")
def divided_in_the_dtype_of_the_sum(patch: Patches) -> None:
    """A 16-bit sum is divided and rounded in 16 bits before it becomes fp32."""
    # torch divides 16-bit tensors in fp32 and rounds, which gives the same bits.
    patch[DistributedOptimizer._upcast_grad, "divide_(grad, divisor=self.ddp.divisor"] = """
        divide_(grad, divisor=self.ddp.divisor)
        grad.copy_(grad.to(reduced.dtype)"""


@mutant("D13", "DTYPE", "", seen_in="DDP's bf16_compress_hook")
def contributions_of_bf16(patch: Patches) -> None:
    """Each rank's contribution to an fp32 sum is rounded to bf16."""
    # Units with and without reduce buffers.
    for each in (Unit, GradUnit):
        patch[each.scale_grads, "scale_before_sum_(self.grads, divide, divisor=divisor)"] = """
            ...
            self.grads.copy_(self.grads.bfloat16())"""


@mutant("D14", "DTYPE", "CL", seen_in="class DTYPE")
def gradients_as_stepped(patch: Patches) -> None:
    """The gradient buffer keeps the optimizer's divided and clipped gradients."""
    # Copy them over the shard in the gradient buffer.
    patch[DistributedOptimizer._step_masters, "self.inner.step()"] = """
        for master, grad in zip(trained, grads):
            master.buffer.get_grad_shard(master.param).copy_(grad)
        ..."""


@mutant("E09", "EMPTY", "FZ", seen_in="torch.optim with grad None")
def zeros_left_alone(patch: Patches) -> None:
    """A param with an all-zero gradient is not stepped: no decay, no step count."""
    patch[DistributedOptimizer._step_masters, "master.leaf.grad = grad"] = (
        "... if grad.any() else None"
    )
