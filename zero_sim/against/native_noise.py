"""Rounding noise in one rank's stack of modes while it runs a script in its own dtypes."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zero_sim.against.noise import Noise
from zero_sim.against.wide_operations import plan_of
from zero_sim.sim.dispatch import has_own_dispatch, is_fake


class NativeNoise(TorchDispatchMode):
    """Moves the results of one rank's operations in the script's own dtypes.

    Args:
        seed: Seed of the movements.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._noise = Noise(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        # Not as the base class does it, which sets flags of the whole process.
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        torch._C._pop_torch_dispatch_stack(None)

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
