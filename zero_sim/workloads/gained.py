"""`model.buffer`: a workload with a module whose forward reads a buffer."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zero_sim.scenario.spec import Scenario
from zero_sim.workloads.draws import generator_of, named_seed, working_dtype
from zero_sim.workloads.protocol import Batch, Workload


class GainedWorkload:
    """Another workload, whose module's outputs are multiplied by a buffer `gain`."""

    def __init__(self, workload: Workload, scenario: Scenario) -> None:
        """Draw the buffer once: 0-D, from 0.5 to 1.5.

        Args:
            workload: Workload to wrap; its module must return a single tensor.
            scenario: Uses `model.buffer`, `model.dtype` and `run.seed`.
        """
        self._inner = workload
        self._persistent = scenario.model.buffer == "saved"
        # Its own generator, so that weights do not depend on `model.buffer`.
        drawn = torch.rand((), generator=generator_of(named_seed(scenario.run.seed, "gain")))
        self._gain = (drawn + 0.5).to(working_dtype(scenario.model.dtype))

    def build(self) -> nn.Module:
        """Return a fresh module of the same class, except for its forward."""
        # A subclass, not a wrapper, so that param names stay the same.
        module = self._inner.build()
        module.__class__ = _gained(type(module))
        module.register_buffer("gain", self._gain.clone(), persistent=self._persistent)
        return module

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return the wrapped workload's batch."""
        return self._inner.batch(step=step, rank=rank, micro=micro)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the loss on the multiplied outputs."""
        return self._inner.loss(module, batch)

    def accuracy(self, module: nn.Module) -> float | None:
        """Return the accuracy on the multiplied outputs."""
        return self._inner.accuracy(module)


@cache
def _gained(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a module class's subclass that multiplies outputs by `gain`."""

    # Cached, so that all modules of a class share their subclass.
    class Gained(kind):
        gain: Tensor

        def forward(self, *args: Any, **named: Any) -> Tensor:
            return super().forward(*args, **named) * self.gain

    return Gained
