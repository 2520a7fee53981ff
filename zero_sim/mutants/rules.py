"""Faults of a rule: arithmetic by another one than is declared, of clips, norms, sums and means.

Each is right in a library that declares so (`zero_sim.targets.numerics`), and wrong by a few units
in the last place where it does not.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import division
from zero_sim.zero import optimizer as optimizers
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer


@mutant("N09", "NORM", "CL", seen_in="PyTorch's clip_grad_norm_")
def bound_times_a_reciprocal(patch: Patches) -> None:
    """Gradients are clipped by the bound times the rounded reciprocal of the norm."""

    @patch(optimizers, "clip_by_norm_")
    def wrong(right, grads, *, norm, max_norm):
        coefficient = ((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0)
        for grad in grads:
            grad.mul_(coefficient)


@mutant("N10", "NORM", "CL", seen_in="Megatron-LM's clip_grad_by_total_norm_fp32")
def coefficient_in_fp64(patch: Patches) -> None:
    """The coefficient of a clip is computed in fp64 and rounded once."""

    @patch(optimizers, "clip_by_norm_")
    def wrong(right, grads, *, norm, max_norm):
        coefficient = min(1.0, max_norm / (norm.item() + 1e-6))
        for grad in grads:
            grad.mul_(torch.full_like(norm, coefficient))


@mutant("N11", "NORM", "CL", seen_in="DeepSpeed's unscale_and_clip_grads")
def inverse_of_a_quotient(patch: Patches) -> None:
    """Gradients are clipped by one over the quotient of norm and bound."""

    @patch(optimizers, "clip_by_norm_")
    def wrong(right, grads, *, norm, max_norm):
        factor = ((norm + 1e-6) / torch.full_like(norm, max_norm)).clamp(min=1.0).reciprocal()
        for grad in grads:
            grad.mul_(factor)


@mutant("N12", "NORM", "CL", seen_in="apex's FusedLAMB")
def divided_by_a_quotient(patch: Patches) -> None:
    """Gradients are clipped by a division by the quotient of norm and bound."""

    @patch(optimizers, "clip_by_norm_")
    def wrong(right, grads, *, norm, max_norm):
        divisor = ((norm + 1e-6) / torch.full_like(norm, max_norm)).clamp(min=1.0)
        for grad in grads:
            grad.div_(divisor)


@mutant("N13", "NORM", "", seen_in="fairscale's OSS.clip_grad_norm")
def norm_of_norms(patch: Patches) -> None:
    """The norm is that of the fp32 norms of what each rank owns of each param."""

    @patch(optimizers, "measure_grads")
    def wrong(right, grads, *, device):
        pieces = list(grads)
        measured = right(pieces, device=device)
        if pieces:
            norms = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces])
            measured[0] = torch.linalg.vector_norm(norms).square().to(torch.float64)
        return measured


@mutant("S09", "SCALE", "NP", seen_in="DDP's default communication hook")
def divided_before_for_after(patch: Patches) -> None:
    """Ranks divide before the sum, where the sum is to be divided."""

    @patch(DistributedDataParallel, "__init__")
    def wrong(right, self, module, **named):
        config = named["config"]
        if config.divide == "post" and config.sync == "last" and config.divide_by == "ranks":
            named["config"] = replace(config, divide="pre")
        right(self, module, **named)


@mutant("S10", "SCALE", "NP", seen_in="Megatron-LM's gradient_scaling_factor")
def product_for_a_quotient_before(patch: Patches) -> None:
    """Where each rank is to divide before the sum, it multiplies by the rounded reciprocal."""

    @patch(division, "divide_")
    def wrong(right, values, *, divisor):
        values.mul_(divisor.reciprocal())


@mutant("S11", "SCALE", "MX NP", seen_in="FSDP2 with force_sum_reduction_for_comms")
def divided_in_the_dtype_of_the_sum(patch: Patches) -> None:
    """A sum of 16 bits is divided, and rounded to them, before it becomes fp32."""

    @patch(DistributedOptimizer, "_upcast_grad")
    def wrong(right, self, master):
        grad = right(self, master)
        if self.ddp.config.divide != "post":
            return grad
        return grad.copy_(grad.to(master.buffer.get_grad_shard(master.param).dtype))


@mutant("D13", "DTYPE", "", seen_in="DDP's bf16_compress_hook")
def contributions_of_bf16(patch: Patches) -> None:
    """What each rank brings to a sum of fp32 is rounded to bf16."""
    from zero_sim.zero import unit
    from zero_sim.zero.variants import grad_unit

    for module in (unit, grad_unit):

        @patch(module, "scale_before_sum_")
        def wrong(right, values, divide, *, divisor):
            right(values, divide, divisor=divisor)
            values.copy_(values.to(torch.bfloat16))


@mutant("D14", "DTYPE", "CL", seen_in="class DTYPE")
def gradients_as_stepped(patch: Patches) -> None:
    """The gradient buffer is left with what the optimizer was given, divided and clipped."""

    @patch(DistributedOptimizer, "_step_masters")
    def wrong(right, self, trained, grads):
        for master, grad in zip(trained, grads, strict=True):
            shard = master.buffer.get_grad_shard(master.param)
            shard.copy_(grad.to(shard.device).reshape(shard.shape))
        right(self, trained, grads)


@mutant("E09", "EMPTY", "FZ", seen_in="torch.optim with grad None")
def zeros_left_alone(patch: Patches) -> None:
    """What has a gradient of zeros alone is not stepped: it neither decays nor counts the step."""

    @patch(DistributedOptimizer, "_step_masters")
    def wrong(right, self, trained, grads):
        used = [pair for pair in zip(trained, grads, strict=True) if bool(pair[1].any())]
        right(self, [master for master, _ in used], [grad for _, grad in used])
