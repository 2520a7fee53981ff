"""How far a target's own update rule is from the optimizers that the reference knows.

Nothing is judged by it: a reader sees whether a rule that is trusted is close to what it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import get_args

import torch
from torch import Tensor

from zero_sim.findings.compare import places_of
from zero_sim.reference import Rules
from zero_sim.reference.replay import isolated
from zero_sim.reference.stepping import Stepper
from zero_sim.scenario.spec import OptimizerName, OptimizerSpec

_STEPS = 3
_ELEMS_MAX = 1 << 14
"""Most elements of a model whose distance is measured."""
_COMPARED = 2
"""Params, the largest ones, that the other optimizers step, too: each takes time in every case."""
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
    plain = replace(spec, warmup_steps=0, clip_norm=None, clip_value=None, loss_scale=None)
    name, ulp = _nearest(rules, plain, shapes)
    return (f"{trusted}. Nearest is {name!r}, up to {ulp:,} ulp away after {_STEPS} steps",)


@lru_cache(maxsize=64)
def _nearest(rules: Rules, spec: OptimizerSpec, shapes: Shapes) -> tuple[str, int]:
    plain = replace(rules, own=None)
    params, grads = _drawn(shapes)
    largest = sorted(params, key=lambda name: params[name].numel())[-_COMPARED:]
    with isolated():
        own = _stepped(rules, spec, params, grads)
        params = {name: params[name] for name in largest}
        distances = {
            name: _ulp_between(_stepped(plain, replace(spec, name=name), params, grads), own)
            for name in get_args(OptimizerName)
            if name != "own"
        }
    return min(distances.items(), key=lambda each: each[1])


def _drawn(shapes: Shapes) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Draw params, and gradients of them for each step."""
    draws = torch.Generator().manual_seed(0)

    def draw() -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=draws) for name, shape, _ in shapes}

    first = draw()
    params = {name: first[name].to(dtype) for name, _, dtype in shapes}
    return params, [draw() for _ in range(_STEPS)]


def _stepped(
    rules: Rules,
    spec: OptimizerSpec,
    params: Mapping[str, Tensor],
    grads: Sequence[Mapping[str, Tensor]],
) -> Mapping[str, Tensor]:
    stepper = Stepper(spec, params=params, rules=rules)
    for each in grads:
        stepper.step({name: each[name] for name in params})
    return stepper.masters


def _ulp_between(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> int:
    return max(
        (
            int((places_of(tensor) - places_of(second[name])).abs().max())
            for name, tensor in first.items()
            if tensor.numel()
        ),
        default=0,
    )
