"""`lattice` and `bit-hash`: bare params whose gradients are small whole numbers of one unit.

The loss is the sum over all elements of `c * p`, so the gradient is `c`. For `lattice`, `c` is data
and does not depend on the params: exact with every optimizer for ever, but blind to a param that is
stale. For `bit-hash` it is a hash of the param's bits and of the micro-batch: one wrong bit in one
param changes the next gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zero_sim.scenario.spec import Scenario
from zero_sim.workloads.draws import (
    batch_generator,
    data_rank,
    generator_of,
    named_seed,
    plant_nan,
    rows_of,
    weight_generator,
    working_dtype,
)
from zero_sim.workloads.exact import budget_units, hash_bits
from zero_sim.workloads.protocol import Batch

UNIT = 2.0**-6


class LinearParams(nn.Module):
    """Params `p0`, `p1`, ... and nothing else; forward is the loss itself."""

    def __init__(self, bits: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._elems = [initial.numel() for initial in bits]
        for index, initial in enumerate(bits):
            self.register_parameter(f"p{index}", nn.Parameter(initial.clone()))

    def forward(self, factors: Tensor) -> Tensor:
        """Return the 0-D loss for `factors`, (elements,): `c` of all params, in order."""
        total = factors.new_zeros(())
        for param, c in zip(self.parameters(), factors.split(self._elems), strict=True):
            total = total + (param.reshape(-1) * c).sum()
        return total


class HashedParams(LinearParams):
    """The same with `c` a hash of the params' own bits."""

    def __init__(self, bits: tuple[Tensor, ...], *, units_max: int) -> None:
        super().__init__(bits)
        self._units_max = units_max

    def forward(self, factors: Tensor) -> Tensor:
        """Return the 0-D loss for `factors`, (1,) fp64: the salt of the hashes."""
        params = [param.detach().reshape(-1) for param in self.parameters()]
        flat = torch.cat(params)
        salt = int(factors.nan_to_num(0.0, 0.0, 0.0).item())
        units = hash_bits(flat, salt=salt) % (2 * self._units_max + 1) - self._units_max
        # A salt that is not finite makes all of them NaN.
        return super().forward((units * UNIT + (factors - factors)).to(flat.dtype))


def _draw_bits(scenario: Scenario) -> tuple[Tensor, ...]:
    generator, dtype = weight_generator(scenario), working_dtype(scenario.model.dtype)
    return tuple(
        torch.randn(shape, generator=generator).to(dtype) for shape in scenario.model.shapes or ()
    )


class LatticeWorkload:
    """Bare params under a linear loss with whole numbers of a unit as factors."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial params, N(0, 1), once.

        Args:
            scenario: Uses `model.shapes`, `model.dtype`, `data`, `world.size`,
                `run.micro_batches` and `run.seed`.
        """
        self._scenario = scenario
        self._bits = _draw_bits(scenario)
        self._elems = sum(math.prod(shape) for shape in scenario.model.shapes or ())

    def build(self) -> nn.Module:
        """Return a fresh `LinearParams`."""
        return LinearParams(self._bits)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return `inputs` (elements,): the factors; no targets."""
        scenario = self._scenario
        table = self._draw_units(step)
        units = table[data_rank(scenario, rank=rank), micro]
        factors = (units * UNIT).to(working_dtype(scenario.model.dtype))
        plant_nan(factors, scenario=scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=factors, targets=None, row_count=rows_of(scenario, rank=rank))

    def _draw_units(self, step: int) -> Tensor:
        """Draw the units of all ranks and micro-batches, (ranks, micro-batches, elements) fp64.

        Most elements get exactly the budget of one sign, spread at random over ranks and
        micro-batches, so that any accumulator narrower than promised shows: one in four of both
        signs, so that they cancel, two of one sign and less of the other. One in four gets less of
        both. Each rank's is of one sign.
        """
        scenario = self._scenario
        same = scenario.data.ranks == "same"
        rank_count = 1 if same else scenario.world.size
        budget = budget_units(scenario) // (scenario.world.size if same else 1)
        generator = generator_of(named_seed(scenario.run.seed, "lattice", step))
        slots, elems = rank_count * scenario.run.micro_batches, self._elems
        positive = torch.rand((slots, elems), generator=generator) < 0.5
        weights = torch.rand((slots, elems), generator=generator, dtype=torch.float64).pow(3)
        less = torch.rand((2, elems), generator=generator, dtype=torch.float64).mul(budget).floor()
        kind = torch.arange(elems) % 4
        plus = torch.where((kind == 0) | (kind == 1), budget, less[0])
        minus = torch.where((kind == 0) | (kind == 2), budget, less[1])
        units = _spread(weights * positive, plus) - _spread(weights * ~positive, minus)
        return units.view(rank_count, scenario.run.micro_batches, elems)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return what the module returns, 0-D, in fp32."""
        return module(batch.inputs).float()

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: there is nothing to classify."""
        return None


def _spread(weights: Tensor, totals: Tensor) -> Tensor:
    """Spread each column's whole total over its rows by weight, in whole numbers."""
    ends = weights.cumsum(0)
    ends = (ends / ends[-1].clamp(min=2.0**-60) * totals).floor()
    return ends.diff(dim=0, prepend=torch.zeros_like(ends[:1]))


class BitHashWorkload:
    """Bare params under a loss whose factors are hashes of the params' bits."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial params, N(0, 1), once.

        Args:
            scenario: As for `LatticeWorkload`.
        """
        self._scenario = scenario
        self._bits = _draw_bits(scenario)

    def build(self) -> nn.Module:
        """Return a fresh `HashedParams`, whose share of the budget is the same for all ranks."""
        shares = self._scenario.world.size * self._scenario.run.micro_batches
        units_max = max(1, budget_units(self._scenario) // shares)
        return HashedParams(self._bits, units_max=units_max)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return `inputs` (1,) fp64: a salt; no targets."""
        scenario = self._scenario
        generator = batch_generator(scenario, step=step, rank=rank, micro=micro)
        salt = torch.randint(2**31, (1,), generator=generator).double()
        plant_nan(salt, scenario=scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=salt, targets=None, row_count=rows_of(scenario, rank=rank))

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return what the module returns, 0-D, in fp32."""
        return module(batch.inputs).float()

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: there is nothing to classify."""
        return None
