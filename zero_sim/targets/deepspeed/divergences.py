"""Divergences of DeepSpeed 0.19.8 that are known, as cases that its targets refuse.

Universal checkpoints have some of their own; see `engine` for what is in one.
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
    """Yield settings that DeepSpeed lacks, and those with no rule that can be declared.

    Args:
        scenario: As the target is given it.
        stage: Of ZeRO.
        universal: Whether its checkpoints are made universal ones.
    """
    scale = scenario.optimizer.loss_scale
    yield from _reloaded(scenario, stage=stage, universal=universal)
    is_vector = scenario.model.name == "mlp" and scenario.data.rows == 1
    if stage == 3 and scenario.world.size == 1 and is_vector and scenario.model.dtype == "fp32":
        yield Problem(
            path="data.rows",
            message="on one rank DeepSpeed's stage 3 uses params where they lie in one gathered "
            "buffer, which decides the bits of fp32 products with one row and is not told, "
            "expected 2 rows or more, got 1.",
            suggestion="Try 2, or as many ranks.",
        )
    skips = scenario.data.nan is not None or scale is not None
    if stage == 3 and skips and scenario.optimizer.clip_norm is not None:
        yield Problem(
            path="optimizer.clip_norm",
            message="DeepSpeed says inf of the norm of a step that it skips, whatever it is, and "
            "at stage 3 norms are compared.",
            suggestion="Leave it out, or what overflows.",
        )
    if scale is None:
        return
    if scenario.model.dtype != "fp16":
        yield Problem(
            path="optimizer.loss_scale",
            message="DeepSpeed scales losses in fp16 alone, got "
            f"model.dtype = {scenario.model.dtype!r}.",
            suggestion="Leave it out, or try fp16.",
        )
    if scale.initial < 2**scenario.run.steps:
        yield Problem(
            path="optimizer.loss_scale.initial",
            message="DeepSpeed raises at an overflow at a scale of 1, expected one that "
            f"{scenario.run.steps} steps cannot halve to that, got {scale.initial:g}.",
            suggestion=f"Try {2**scenario.run.steps}.",
        )
    if scale.growth_interval < 2:
        yield Problem(
            path="optimizer.loss_scale.growth_interval",
            message="DeepSpeed's scale first grows after one step more than its window, expected "
            f"2 or more, got {scale.growth_interval}.",
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
            f"{reload.world_size}: DeepSpeed's elastic checkpoints load with its own optimizers "
            "alone.",
            suggestion="Leave it out" + (", or try option universal." if stage else "."),
        )
    if reload.weights_only and scenario.model.dtype != "fp32":
        yield Problem(
            path="reload.weights_only",
            message="DeepSpeed makes masters of the params where it loads no optimizer state, "
            f"expected fp32, got {scenario.model.dtype}.",
            suggestion="Leave it out, or try fp32.",
        )
    if reload.weights_only and stage == 3:
        yield Problem(
            path="reload.weights_only",
            message="DeepSpeed's stage 3 then makes the weights of all ranks' files by its script "
            "zero_to_fp32, which is not judged.",
            suggestion="Leave it out, or try stage 2.",
        )


def known_to_go_wrong(scenario: Scenario, *, stage: int) -> Iterator[Problem]:
    """Cases that are known to go wrong at a stage."""
    is_loss = scenario.model.name not in ("mlp", "transformer-260")
    if stage == 0 and is_loss and scenario.run.micro_batches > 1:
        yield Problem(
            path="run.micro_batches",
            message="DeepSpeed 0.19.8 divides the gradient by their number where the module's "
            f"output is the loss, whatever scale_wrt_gas says. {UPSTREAM}",
            suggestion="Try the model mlp.",
        )
    scale, steps = scenario.optimizer.loss_scale, scenario.run.steps
    if scale is not None and scale.growth_interval <= steps:
        yield Problem(
            path="optimizer.loss_scale.growth_interval",
            message="DeepSpeed 0.19.8 divides gradients by the scale of the next step where it "
            f"grows, expected an interval of more than {steps} steps, got "
            f"{scale.growth_interval}. {UPSTREAM}",
            suggestion=f"Try {steps + 1}.",
        )
    if stage == 0 and scenario.model.dtype != "fp32":
        yield from _whole_halves(scenario)


def _whole_halves(scenario: Scenario) -> Iterator[Problem]:
    """Yield problems of stage 0 in bf16 and fp16."""
    spec = scenario.optimizer
    if spec.loss_scale is not None:
        yield Problem(
            path="optimizer.loss_scale",
            message="DeepSpeed 0.19.8 divides gradients by it at stage 0 and does not multiply "
            f"the loss with it. {UPSTREAM}",
            suggestion="Leave it out, or try stage 1.",
        )
    decays = decays_weights(spec)
    if spec.name != "sgd" or decays:
        yield Problem(
            path="optimizer.name",
            message="DeepSpeed 0.19.8 steps once with gradients of zero when it begins in "
            f"{scenario.model.dtype} at stage 0, which counts as a step and decays weights. "
            f"{UPSTREAM}",
            suggestion="Try sgd without weight decay, or stage 1.",
        )


_ADAMS = ("adamw", "adam", "radam")
"""Optimizers whose state is exp_avg and exp_avg_sq."""
_ALIGNED = 2
"""What stages 1 and 2 round a rank's part of a group up to."""


def why_not_universal(scenario: Scenario) -> Iterator[Problem]:
    """Yield parts of a case for which universal checkpoints are not made."""
    if scenario.reload is None:
        return
    if scenario.optimizer.name not in _ADAMS:
        yield Problem(
            path="optimizer.name",
            message="DeepSpeed's universal checkpoints are made of exp_avg and exp_avg_sq, "
            f"expected one of {', '.join(_ADAMS)}, got {scenario.optimizer.name!r}.",
            suggestion="Try adamw.",
        )
    if scenario.reload.weights_only:
        yield Problem(
            path="reload.weights_only",
            message="DeepSpeed loads the optimizer's state from a universal checkpoint, whatever "
            "it is told.",
            suggestion="Leave it out.",
        )


def universal_goes_wrong(scenario: Scenario, *, stage: int) -> Iterator[Problem]:
    """Cases with universal checkpoints that are known to go wrong at a stage."""
    spec, reload = scenario.optimizer, scenario.reload
    if reload is None:
        return
    if spec.amsgrad:
        yield Problem(
            path="optimizer.amsgrad",
            message="DeepSpeed 0.19.8 leaves max_exp_avg_sq out of universal checkpoints. "
            f"{UPSTREAM}",
            suggestion="Leave it out.",
        )
    ranks = reload.world_size or scenario.world.size
    elems = _elems_of_groups(scenario)
    if stage == 3 and len(elems) > 1:
        yield Problem(
            path="optimizer.groups",
            message="DeepSpeed 0.19.8 gives all param groups the settings of the first one, and "
            f"one counter of steps, where stage 3 loads a universal checkpoint. {UPSTREAM}",
            suggestion="Leave them out, or try stage 2.",
        )
    if stage == 3 and _may_be_before_all_steps(scenario, step=reload.step):
        yield Problem(
            path="reload.step",
            message="DeepSpeed 0.19.8 raises where it makes a universal checkpoint of stage 3 that "
            "no step came before but skipped ones, which in fp16 any can be. "
            f"{UPSTREAM}",
            suggestion="Try more steps before it, or bf16.",
        )
    few = min(elems.values())
    if stage < 3 and _has_none(few, ranks=ranks):
        yield Problem(
            path="reload.world_size",
            message="DeepSpeed 0.19.8 raises where a rank that loads a universal checkpoint has no "
            f"part of a param group, expected fewer than {ranks} ranks for one of {few} elements. "
            f"{UPSTREAM}",
            suggestion="Try fewer ranks or larger params.",
        )


def _may_be_before_all_steps(scenario: Scenario, *, step: int) -> bool:
    """Return True if all steps before one may be skipped."""
    nan = scenario.data.nan
    return scenario.model.dtype == "fp16" or (nan is not None and nan.step == 0 and step == 1)


def _elems_of_groups(scenario: Scenario) -> dict[int, int]:
    """Elements of each param group that has any params."""
    elems: dict[int, int] = {}
    for name, shape in params_of(scenario.model):
        index = group_index(scenario.optimizer, name)
        elems[index] = elems.get(index, 0) + math.prod(shape)
    return elems


def _has_none(elems: int, *, ranks: int) -> bool:
    """Return True if the last rank's part of so many elements is padding alone."""
    part = -(-elems // (_ALIGNED * ranks)) * _ALIGNED
    return (ranks - 1) * part >= elems
