"""Drawn optimizers, param groups, clipping and loss scales."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

from zero_sim.fuzz.choices import Choices
from zero_sim.fuzz.swarm import Swarm
from zero_sim.scenario.applies import USED_BY, WITH_FOREACH
from zero_sim.scenario.names import matching_groups
from zero_sim.scenario.spec import (
    AnyModelName,
    LossScaleSpec,
    ModelSpec,
    OptimizerName,
    OptimizerSpec,
    ParamGroupSpec,
)
from zero_sim.workloads import EXACT_MODELS, params_of

OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
# Suffixes of param names by model. Other models have biases and weights.
_ENDINGS: dict[AnyModelName, tuple[str, str]] = {
    "params": ("0", "1"),
    "bit-hash": ("0", "1"),
    "moe": ("1.linear.weight", "bias"),
    "unusual": ("twice", "unused"),
}
# In steps without overflow. Short, so that the scale grows within the few steps of a case.
_GROWTH_INTERVALS = (2, 2, 1, 3)
# With None, a group keeps the optimizer's value.
_SETTINGS = (None, None, 0.0, 0.01)
_DIFFERENT = tuple(itertools.permutations((0.01, 0.0, 0.05)))
_ONE_IN_FOUR = (False, False, False, True)


def drawn_optimizer(
    choices: Choices,
    *,
    model: ModelSpec,
    swarm: Swarm,
) -> OptimizerSpec:
    """Draw an optimizer with settings.

    Args:
        choices: Source of choices.
        model: The model, whose param names the groups match.
        swarm: Features of the case.
    """
    able = [each for each in OPTIMIZERS if each in swarm.able.optimizers] or swarm.able.optimizers
    # The first optimizer is the usual choice, and cases shrink to it.
    others = [name for name in able if name in swarm.theme.optimizers] or able[1:]
    is_other = len(able) > 1 and swarm.on("any optimizer", often=True)
    name = choices.among(others) if is_other else able[0]
    clips = [way for way in ("norm", "value") if swarm.follows(f"optimizer.clip_{way}")]
    clip = choices.among(clips) if clips and swarm.on("clip") else None
    momentum = swarm.on("momentum", fits=name in USED_BY["optimizer.momentum"])
    return OptimizerSpec(
        name=name,
        lr=choices.among([1e-3, 0.1]),
        betas=(0.5, 0.75)
        if swarm.on("betas", fits=name in USED_BY["optimizer.betas"])
        else (0.9, 0.999),
        momentum=0.9 if momentum else 0.0,
        nesterov=swarm.on("nesterov", fits=name in USED_BY["optimizer.nesterov"] and momentum),
        amsgrad=swarm.on("amsgrad", fits=name in USED_BY["optimizer.amsgrad"]),
        eps=1.0 if swarm.on("large eps", fits=name in USED_BY["optimizer.eps"]) else 1e-8,
        weight_decay=0.1 if swarm.on("decay", fits=name != "rprop") else 0.0,
        foreach=swarm.on("foreach", fits=name in WITH_FOREACH),
        warmup_steps=3 if swarm.on("warmup") else 0,
        groups=drawn_groups(choices, model=model, decay=name != "rprop")
        if swarm.on("groups")
        else (),
        clip_norm=choices.among([0.1, 1e-3, 100.0]) if clip == "norm" else None,
        clip_value=1e-3 if clip == "value" else None,
        loss_scale=_drawn_loss_scale(choices, model)
        if swarm.on("loss scale", often=model.dtype == "fp16")
        else None,
    )


def _drawn_loss_scale(choices: Choices, model: ModelSpec) -> LossScaleSpec:
    """Draw a loss scale that keeps gradients finite; for fp16, also scales that overflow."""
    initials = [64.0]
    # Not for exact models, because a sum near overflow depends on its order.
    if model.dtype == "fp16" and model.name not in EXACT_MODELS:
        initials += [2.0**12, 2.0**10, 2.0**14, 2.0**16]
    return LossScaleSpec(
        initial=choices.among(initials), growth_interval=choices.among(_GROWTH_INTERVALS)
    )


def drawn_groups(choices: Choices, *, model: ModelSpec, decay: bool) -> tuple[ParamGroupSpec, ...]:
    """Draw one or two param groups for some params, or a few groups for all params.

    Args:
        choices: Source of choices.
        model: The model.
        decay: True if the optimizer has weight decay.
    """
    names = [name for name, _ in params_of(model)]
    chosen = _ENDINGS.get(model.name, ("bias", "weight"))[: choices.integer(1, 2)]
    if choices.among(_ONE_IN_FOUR):
        return _covering(choices, chosen, names=names, decay=decay)
    groups = tuple(
        ParamGroupSpec(
            match=ending,
            lr=choices.among(_SETTINGS),
            weight_decay=choices.among(_SETTINGS) if decay else None,
        )
        for ending in chosen
    )
    return matching_groups(groups, names)


def _covering(
    choices: Choices, endings: Sequence[str], *, names: Sequence[str], decay: bool
) -> tuple[ParamGroupSpec, ...]:
    """Return groups with different settings that cover all params."""
    # No param keeps the optimizer's settings, so a wrong group always shows.
    rates, decays = choices.among(_DIFFERENT), choices.among(_DIFFERENT)
    groups = tuple(
        ParamGroupSpec(match=ending, lr=lr, weight_decay=weight_decay if decay else None)
        for ending, lr, weight_decay in zip((*endings, ""), rates, decays, strict=False)
    )
    return matching_groups(groups, names)
