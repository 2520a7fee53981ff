"""Distance of a target's own update rule from the reference's optimizers.

The judge trusts such a rule. The distance is only a note: it shows the reader how close the rule is
to a known optimizer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import get_args

import torch
from torch import Tensor

from zero_sim.findings.compare import relative_difference
from zero_sim.reference import Rules
from zero_sim.reference.replay import isolated
from zero_sim.reference.stepping import Stepper
from zero_sim.scenario.spec import OptimizerName, OptimizerSpec

_STEPS = 3
_ELEMS_MAX = 1 << 14
"""Largest model to measure, in elements."""
_LR = 0.1
"""Learning rate: large enough that updates change the leading bits of params."""
Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Name, shape and dtype of each param."""


def trust_in_words(
    rules: Rules, *, spec: OptimizerSpec, params: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Return a note about a trusted update rule and its distance; empty without such a rule.

    Args:
        rules: The reference's rules.
        spec: The case's optimizer.
        params: Initial params by name.
    """
    if rules.own is None:
        return ()
    trusted = f"the update rule is trusted, not judged: {rules.own.name}"
    if sum(param.numel() for param in params.values()) > _ELEMS_MAX:
        return (trusted,)
    shapes = tuple((name, tuple(param.shape), param.dtype) for name, param in params.items())
    # Without warmup, clipping and scaling, to compare the bare update rules.
    plain = replace(spec, lr=_LR, warmup_steps=0, clip_norm=None, clip_value=None, loss_scale=None)
    # The target's own rule reads its settings from the scenario.
    own = replace(rules.own, scenario=replace(rules.own.scenario, optimizer=plain))
    name, ulp = _nearest(replace(rules, own=own), plain, shapes)
    return (
        f"{trusted}. Nearest is {name!r}, up to {ulp:,} ulp of the largest value away after "
        f"{_STEPS} steps",
    )


# Cached, because cases of one target have the same params.
@lru_cache(maxsize=64)
def _nearest(rules: Rules, spec: OptimizerSpec, shapes: Shapes) -> tuple[str, int]:
    params, grads = _drawn(shapes)
    # Only the largest param, to save time in every case.
    largest = max(shapes, key=lambda each: params[each[0]].numel())
    # Isolated, because stepping must not change the thread's random state.
    with isolated():
        own = _stepped(rules, spec, params, grads)[largest[0]]
        known = _known(replace(rules, own=None), replace(spec, groups=()), largest)
    distances = {name: _ulp_between(master, own) for name, master in known.items()}
    return min(distances.items(), key=lambda each: each[1])


@lru_cache(maxsize=64)
def _known(
    rules: Rules, spec: OptimizerSpec, shape: tuple[str, tuple[int, ...], torch.dtype]
) -> Mapping[str, Tensor]:
    """Step a param by each of the reference's optimizers; return masters by optimizer name."""
    params, grads = _drawn((shape,))
    return {
        name: _stepped(rules, replace(spec, name=name), params, grads)[shape[0]]
        for name in get_args(OptimizerName)
        if name != "own"
    }


def _drawn(shapes: Shapes) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Draw params, and their gradients for each step."""
    params: dict[str, Tensor] = {}
    grads: list[dict[str, Tensor]] = [{} for _ in range(_STEPS)]
    for name, shape, dtype in shapes:
        # Seed each param separately, so that `_known` can draw the same param alone.
        draws = torch.Generator().manual_seed(0)
        params[name] = torch.randn(shape, generator=draws).to(dtype)
        for each in grads:
            drawn = torch.randn(shape, generator=draws)
            # Magnitude of at least 1, because near zero optimizers mostly differ in how they add
            # eps.
            each[name] = drawn + drawn.sign()
    return params, grads


def _stepped(
    rules: Rules,
    spec: OptimizerSpec,
    params: Mapping[str, Tensor],
    grads: Sequence[Mapping[str, Tensor]],
) -> Mapping[str, Tensor]:
    stepper = Stepper(spec, params=params, rules=rules)
    for each in grads:
        stepper.step(each, repeated=False)
    return stepper.masters


def _ulp_between(first: Tensor, second: Tensor) -> int:
    """Return the largest difference, in ulp of the largest magnitude."""
    # Each element's own ulp would mislead near zero, where a rounding spans many of them.
    apart = relative_difference(first, second)
    if not math.isfinite(apart):
        # NaN or infinity on either side.
        return sys.maxsize
    most = max(float(each.abs().max()) for each in (first, second)) if first.numel() else 0.0
    # mantissa is in [0.5, 1), so the largest magnitude is 2 * mantissa / eps ulp.
    mantissa, _ = math.frexp(most)
    return math.ceil(apart * 2 * mantissa / torch.finfo(first.dtype).eps)
