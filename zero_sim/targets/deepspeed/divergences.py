"""Known divergences of DeepSpeed 0.19.8: cases that its targets refuse.

Some concern universal checkpoints, which `engine` describes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import UPSTREAM
from zero_sim.targets.torch.optim import decays_weights, group_index
from zero_sim.workloads import params_of


def never(scenario: Scenario, *, stage: int, universal: bool) -> Iterator[Problem]:
    """Yield settings that DeepSpeed lacks, and settings for which no rule can be declared."""
    scale = scenario.optimizer.loss_scale
    yield from _reloaded(scenario, stage=stage, universal=universal)
    is_vector = scenario.model.name == "mlp" and scenario.data.rows == 1
    if stage == 3 and scenario.world.size == 1 and is_vector and scenario.model.dtype == "fp32":
        yield Problem(
            path="data.rows",
            message="expected 2 rows or more, got 1: on one rank, DeepSpeed's stage 3 reads params "
            "at unknown offsets in a gathered buffer, on which fp32 products with one row depend.",
            suggestion="Try 2 rows, or 2 ranks.",
        )
    skips = scenario.data.nan is not None or scale is not None
    # Below stage 3 the norm is not compared.
    if stage == 3 and skips and scenario.optimizer.clip_norm is not None:
        yield Problem(
            path="optimizer.clip_norm",
            message="DeepSpeed reports an infinite norm for each step that it skips, but at stage "
            "3 norms are compared.",
            suggestion="Remove it, or the overflow.",
        )
    # The rest concerns loss scales.
    if scale is None:
        return
    if scenario.model.dtype != "fp16":
        yield Problem(
            path="optimizer.loss_scale",
            message="DeepSpeed scales losses only in fp16, got "
            f"model.dtype = {scenario.model.dtype!r}.",
            suggestion="Remove it, or try fp16.",
        )
    # Each overflow halves the scale, and any step of the run may overflow.
    if scale.initial < 2**scenario.run.steps:
        yield Problem(
            path="optimizer.loss_scale.initial",
            message=f"expected a scale that {scenario.run.steps} steps cannot halve to 1, because "
            f"DeepSpeed raises if a gradient overflows at 1, got {scale.initial:g}.",
            suggestion=f"Try {2**scenario.run.steps}.",
        )
    if scale.growth_interval < 2:
        yield Problem(
            path="optimizer.loss_scale.growth_interval",
            message="expected 2 or more, because DeepSpeed's scale first grows one step after its "
            f"window, got {scale.growth_interval}.",
            suggestion="Try 2.",
        )


def _reloaded(scenario: Scenario, *, stage: int, universal: bool) -> Iterator[Problem]:
    """Yield problems of cases with a reload; arguments as for `never`."""
    reload = scenario.reload
    if reload is None:
        return
    elsewhere = reload.world_size not in (None, scenario.world.size)
    if elsewhere and not universal:
        yield Problem(
            path="reload.world_size",
            message=f"expected as many ranks as before, {scenario.world.size}, got "
            f"{reload.world_size}: DeepSpeed's elastic checkpoints only work with its own "
            "optimizers.",
            suggestion="Remove it" + (", or try option universal." if stage else "."),
        )
    # The reference loads fp32 masters from the checkpoint.
    if reload.weights_only and scenario.model.dtype != "fp32":
        yield Problem(
            path="reload.weights_only",
            message="expected fp32, because DeepSpeed makes masters from the params if it loads no "
            f"optimizer state, got {scenario.model.dtype}.",
            suggestion="Remove it, or try fp32.",
        )
    if reload.weights_only and stage == 3:
        yield Problem(
            path="reload.weights_only",
            message="DeepSpeed's stage 3 would build the weights from all ranks' files with its "
            "script zero_to_fp32, which is not judged.",
            suggestion="Remove it, or try stage 2.",
        )


def known_to_go_wrong(scenario: Scenario, *, stage: int) -> Iterator[Problem]:
    """Yield fields of a case that are known to go wrong at a stage."""
    # scenarios/upstream/deepspeed-loss-scaled. These two models return predictions from forward,
    # the others return the loss.
    is_loss = scenario.model.name not in ("mlp", "transformer-260")
    if stage == 0 and is_loss and scenario.run.micro_batches > 1:
        yield Problem(
            path="run.micro_batches",
            message="DeepSpeed 0.19.8 divides gradients by the number of micro-batches if the "
            f"module returns the loss, even if scale_wrt_gas is False. {UPSTREAM}",
            suggestion="Try the model mlp.",
        )
    # scenarios/upstream/deepspeed-scale-growth.
    scale, steps = scenario.optimizer.loss_scale, scenario.run.steps
    if scale is not None and scale.growth_interval <= steps:
        yield Problem(
            path="optimizer.loss_scale.growth_interval",
            message=f"expected an interval of more than {steps} steps, because DeepSpeed 0.19.8 "
            "divides gradients by the next step's scale if the scale grows, got "
            f"{scale.growth_interval}. {UPSTREAM}",
            suggestion=f"Try {steps + 1}.",
        )
    if stage == 0 and scenario.model.dtype != "fp32":
        yield from _whole_halves(scenario)


def _whole_halves(scenario: Scenario) -> Iterator[Problem]:
    # scenarios/upstream/deepspeed-loss-not-scaled and deepspeed-initial-step.
    spec = scenario.optimizer
    if spec.loss_scale is not None:
        yield Problem(
            path="optimizer.loss_scale",
            message="DeepSpeed 0.19.8 divides gradients by it at stage 0, but does not multiply "
            f"the loss by it. {UPSTREAM}",
            suggestion="Remove it, or try stage 1.",
        )
    # In plain SGD, a step with zero gradients changes nothing.
    decays = decays_weights(spec)
    if spec.name != "sgd" or decays:
        yield Problem(
            path="optimizer.name",
            message=f"in {scenario.model.dtype} at stage 0, DeepSpeed 0.19.8 starts with a step on "
            "zero gradients, which counts as a step and decays weights. "
            f"{UPSTREAM}",
            suggestion="Try sgd without weight decay, or stage 1.",
        )


_ADAMS = ("adamw", "adam", "radam")
"""Optimizers whose state is exp_avg and exp_avg_sq."""
_ALIGNED = 2
"""Alignment, in elements, of a rank's part of a param group in stages 1 and 2."""


def why_not_universal(scenario: Scenario) -> Iterator[Problem]:
    """Yield fields that universal checkpoints do not support."""
    if scenario.reload is None:
        return
    if scenario.optimizer.name not in _ADAMS:
        yield Problem(
            path="optimizer.name",
            message="DeepSpeed's universal checkpoints contain only exp_avg and exp_avg_sq, "
            f"expected one of {', '.join(_ADAMS)}, got {scenario.optimizer.name!r}.",
            suggestion="Try adamw.",
        )
    if scenario.reload.weights_only:
        yield Problem(
            path="reload.weights_only",
            message="DeepSpeed always loads the optimizer's state from a universal checkpoint.",
            suggestion="Remove it.",
        )


def universal_goes_wrong(scenario: Scenario, *, stage: int) -> Iterator[Problem]:
    """Yield fields of a case whose universal checkpoints are known to go wrong at a stage."""
    spec, reload = scenario.optimizer, scenario.reload
    if reload is None:
        return
    # scenarios/upstream/deepspeed-universal-amsgrad, -steps, -no-step and -no-part, in this order.
    if spec.amsgrad:
        yield Problem(
            path="optimizer.amsgrad",
            message=f"DeepSpeed 0.19.8 omits max_exp_avg_sq from universal checkpoints. {UPSTREAM}",
            suggestion="Remove it.",
        )
    ranks = reload.world_size or scenario.world.size
    elems = _elems_of_groups(scenario)
    if stage == 3 and len(elems) > 1:
        yield Problem(
            path="optimizer.groups",
            message="when stage 3 loads a universal checkpoint, DeepSpeed 0.19.8 gives all param "
            f"groups the first group's settings and a single step counter. {UPSTREAM}",
            suggestion="Remove them, or try stage 2.",
        )
    if stage == 3 and _may_be_before_all_steps(scenario, step=reload.step):
        yield Problem(
            path="reload.step",
            message="DeepSpeed 0.19.8 raises when it makes a universal checkpoint at stage 3 if "
            "all steps before it were skipped, as any step may be in fp16. "
            f"{UPSTREAM}",
            suggestion="Try more steps before it, or bf16.",
        )
    # The smallest group runs out of parts first.
    few = min(elems.values())
    if stage < 3 and _has_none(few, ranks=ranks):
        yield Problem(
            path="reload.world_size",
            message=f"expected fewer than {ranks} ranks for a param group of {few} elements, "
            "because DeepSpeed 0.19.8 raises if a rank that loads a universal checkpoint has no "
            f"part of a group. {UPSTREAM}",
            suggestion="Try fewer ranks or larger params.",
        )


def _may_be_before_all_steps(scenario: Scenario, *, step: int) -> bool:
    # In fp16 any step may overflow.
    nan = scenario.data.nan
    return scenario.model.dtype == "fp16" or (nan is not None and nan.step == 0 and step == 1)


def _elems_of_groups(scenario: Scenario) -> dict[int, int]:
    elems: dict[int, int] = {}
    for name, shape in params_of(scenario.model):
        index = group_index(scenario.optimizer, name)
        elems[index] = elems.get(index, 0) + math.prod(shape)
    return elems


def _has_none(elems: int, *, ranks: int) -> bool:
    """Return True if the last rank's part of a group of `elems` elements is only padding."""
    # Elements of each rank's part, rounded up.
    part = -(-elems // (_ALIGNED * ranks)) * _ALIGNED
    return (ranks - 1) * part >= elems
