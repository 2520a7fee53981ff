"""`positional`: `weight * x + position`, for which autograd passes one gradient to two terms.

There is no batch dimension, so nothing is broadcast. So `position` and `weight * x` get the sum's
gradient in the same memory. A hook that changes it in place changes both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_sim.scenario.spec import Scenario
from zero_sim.workloads.draws import (
    batch_generator,
    plant_nan,
    rows_of,
    weight_generator,
    working_dtype,
)
from zero_sim.workloads.protocol import Batch

POSITIONS = 3


class Positional(nn.Module):
    """A learned factor and a learned position for each sequence element."""

    def __init__(self, weight: Tensor, position: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.position = nn.Parameter(position.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (positions, hidden) to the same shape."""
        return self.weight * x + self.position


class PositionalWorkload:
    """Regression of a random sequence on another."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial params, N(0, 1), once.

        Args:
            scenario: Uses `model.hidden`, `model.dtype`, `data` and `run.seed`. A micro-batch's
                rows share a sequence, so only their number matters.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        # [inputs or targets, positions, hidden]
        self._shape = (2, POSITIONS, scenario.model.hidden)
        bits = torch.randn(self._shape, generator=weight_generator(scenario)).to(self._dtype)
        self._weight, self._position = bits.unbind()

    def build(self) -> nn.Module:
        """Return a fresh `Positional`."""
        return Positional(self._weight, self._position)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return inputs and targets, both (positions, hidden) in the working dtype."""
        generator = batch_generator(self._scenario, step=step, rank=rank, micro=micro)
        inputs, targets = torch.randn(self._shape, generator=generator).to(self._dtype).unbind()
        plant_nan(inputs, scenario=self._scenario, step=step, rank=rank, micro=micro)
        rows = rows_of(self._scenario, step=step, rank=rank)
        return Batch(inputs=inputs, targets=targets, row_count=rows)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared error, in fp32."""
        assert batch.targets is not None
        return functional.mse_loss(module(batch.inputs).float(), batch.targets.float())

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None
