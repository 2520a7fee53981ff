"""Distance of a target's own update rule from the optimizers that the reference knows.

Nothing is judged by it: a reader sees whether a rule that is trusted is close to what it is called.
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
"""Most elements of a model whose distance is measured."""
_LR = 0.1
"""Learning rate, so large that updates change the leading bits of params."""
Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Name, shape and dtype of each param."""


def trust_in_words(
    rules: Rules, *, spec: OptimizerSpec, params: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Return a note that an update rule is trusted, with its distance; empty if there is none.

    Args:
        rules: The rules of the reference.
        spec: The optimizer of the case.
        params: Initial values of all params by name.
    """
    if rules.own is None:
        return ()
    trusted = f"the update rule is trusted, not judged: {rules.own.name}"
    if sum(param.numel() for param in params.values()) > _ELEMS_MAX:
        return (trusted,)
    shapes = tuple((name, tuple(param.shape), param.dtype) for name, param in params.items())
    plain = replace(spec, lr=_LR, warmup_steps=0, clip_norm=None, clip_value=None, loss_scale=None)
    # A class of the target reads its settings there.
    own = replace(rules.own, scenario=replace(rules.own.scenario, optimizer=plain))
    name, ulp = _nearest(replace(rules, own=own), plain, shapes)
    return (
        f"{trusted}. Nearest is {name!r}, up to {ulp:,} ulp of the largest value away after "
        f"{_STEPS} steps",
    )


@lru_cache(maxsize=64)
def _nearest(rules: Rules, spec: OptimizerSpec, shapes: Shapes) -> tuple[str, int]:
    params, grads = _drawn(shapes)
    # One alone, since each takes time in every case.
    largest = max(shapes, key=lambda each: params[each[0]].numel())
    with isolated():
        own = _stepped(rules, spec, params, grads)[largest[0]]
        known = _known(replace(rules, own=None), replace(spec, groups=()), largest)
    distances = {name: _ulp_between(master, own) for name, master in known.items()}
    return min(distances.items(), key=lambda each: each[1])


@lru_cache(maxsize=64)
def _known(
    rules: Rules, spec: OptimizerSpec, shape: tuple[str, tuple[int, ...], torch.dtype]
) -> Mapping[str, Tensor]:
    """Step one param by each optimizer that the reference knows."""
    params, grads = _drawn((shape,))
    return {
        name: _stepped(rules, replace(spec, name=name), params, grads)[shape[0]]
        for name in get_args(OptimizerName)
        if name != "own"
    }


def _drawn(shapes: Shapes) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Draw params, and gradients of them for each step; those of a param depend on it alone."""
    params: dict[str, Tensor] = {}
    grads: list[dict[str, Tensor]] = [{} for _ in range(_STEPS)]
    for name, shape, dtype in shapes:
        draws = torch.Generator().manual_seed(0)
        params[name] = torch.randn(shape, generator=draws).to(dtype)
        for each in grads:
            drawn = torch.randn(shape, generator=draws)
            # Far from zero, where what counts is how an optimizer adds its eps.
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
    """Return the largest difference, in units in the last place of the largest magnitude.

    Units of each element would be tiny near zero, where a difference of one rounding spans many.
    """
    apart = relative_difference(first, second)
    if not math.isfinite(apart):
        return sys.maxsize
    most = max(float(each.abs().max()) for each in (first, second)) if first.numel() else 0.0
    mantissa, _ = math.frexp(most)
    # A number is 2 x mantissa units of its eps.
    return math.ceil(apart * 2 * mantissa / torch.finfo(first.dtype).eps)
