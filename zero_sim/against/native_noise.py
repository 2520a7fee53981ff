"""Rounding noise in one rank's stack of modes while it runs a script in its own dtypes."""

from __future__ import annotations

from typing import Any

import torch

from zero_sim.against.noise import Noise
from zero_sim.against.wide_operations import RankMode, plan_of
from zero_sim.sim.dispatch import has_own_dispatch, is_fake


class NativeNoise(RankMode):
    """Moves the results of one rank's operations in the script's own dtypes.

    Args:
        seed: Seed of the movements.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._noise = Noise(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for each in types:
            if has_own_dispatch(each) and not is_fake(each):
                return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and not any(map(is_fake, types)):
            plan = plan_of(func)
            if not plan.is_exact and not plan.is_factory:
                self._noise.move(result)
        return result
