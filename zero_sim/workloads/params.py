"""`params`: bare params of any shapes, zero-element ones and scalars included.

The loss is a sum over params of `c * p * p / 2 + d * p` with random `c` and `d`. Its gradient,
`c * p + d`, depends on the param itself and on step, rank and micro-batch: what is stale or
misplaced shows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zero_sim.scenario.spec import Scenario
from zero_sim.workloads.draws import (
    batch_generator,
    plant_nan,
    rows_of,
    weight_generator,
    working_dtype,
)
from zero_sim.workloads.losses import share_of
from zero_sim.workloads.protocol import Batch


class BareParams(nn.Module):
    """Params `p0`, `p1`, ... and nothing else; forward is the loss itself."""

    def __init__(self, bits: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._elems = [initial.numel() for initial in bits]
        for index, initial in enumerate(bits):
            self.register_parameter(f"p{index}", nn.Parameter(initial.clone()))

    def forward(self, factors: Tensor) -> Tensor:
        """Return the 0-D loss for `factors`, (2, elements): `c` and `d` of all params, in order."""
        total = factors.new_zeros(())
        square, linear = (row.split(self._elems) for row in factors)
        for param, c, d in zip(self.parameters(), square, linear, strict=True):
            flat = param.reshape(-1)
            total = total + ((0.5 * c * flat + d) * flat).sum()
        return total


class ParamsWorkload:
    """Bare params under a loss that is quadratic in each of them."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial params, N(0, 1), once.

        Args:
            scenario: Uses `model.shapes`, `model.dtype`, `data` and `run.seed`. All rows of a
                micro-batch share its factors, so their number only counts.
                No shapes make a module without params: who trains it must say that it cannot.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        shapes = scenario.model.shapes or ()
        generator = weight_generator(scenario)
        self._bits = tuple(
            torch.randn(shape, generator=generator).to(self._dtype) for shape in shapes
        )
        self._elems = sum(math.prod(shape) for shape in shapes)

    def build(self) -> nn.Module:
        """Return a fresh `BareParams`."""
        return BareParams(self._bits)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return `inputs` (2, elements): the factors `c` and `d`, N(0, 1); no targets."""
        generator = batch_generator(self._scenario, step=step, rank=rank, micro=micro)
        factors = torch.randn((2, self._elems), generator=generator).to(self._dtype)
        plant_nan(factors, scenario=self._scenario, step=step, rank=rank, micro=micro)
        rows = rows_of(self._scenario, rank=rank)
        return Batch(inputs=factors, targets=None, row_count=rows)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return what the module returns, 0-D, in fp32: the mean over rows; or the rows' sum."""
        loss = module(batch.inputs).float()
        if self._scenario.data.loss == "sum":
            return loss * batch.rows
        return share_of(loss, scenario=self._scenario)

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: there is nothing to classify."""
        return None
