"""`bit-hash`: bare params with gradients that are small multiples of one unit.

The loss adds `c * p` over all elements, so the gradient is `c`, a hash of the param's bits and the
micro-batch. A single wrong bit in a param changes its next gradient.
"""

from __future__ import annotations

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
from zero_sim.workloads.exact import budget_units, hash_bits
from zero_sim.workloads.protocol import Batch

# A power of two, so multiples of it add without rounding.
UNIT = 2.0**-6


class HashedParams(nn.Module):
    """Params `p0`, `p1`, ... and nothing else; forward is the loss itself."""

    def __init__(self, bits: tuple[Tensor, ...], *, units_max: int) -> None:
        super().__init__()
        self._units_max = units_max
        self._elems = {f"p{index}": initial.numel() for index, initial in enumerate(bits)}
        for name, initial in zip(self._elems, bits, strict=True):
            # A clone, so that each module has its own storage.
            self.register_parameter(name, nn.Parameter(initial.clone()))

    def forward(self, factors: Tensor) -> Tensor:
        """Return the 0-D loss for `factors`, (1,) fp64: the salt of the hashes."""
        # By name, because a wrapper may replace a param by a plain tensor.
        params = [getattr(self, name).reshape(-1) for name in self._elems]
        flat = torch.cat([param.detach() for param in params])
        # A planted NaN must not stop the hash, so replace it here and bring it back below.
        salt = int(factors.nan_to_num(0.0, 0.0, 0.0).item())
        # [elements], whole numbers from -units_max to units_max
        units = hash_bits(flat, salt=salt) % (2 * self._units_max + 1) - self._units_max
        # A salt that is not finite makes all factors NaN.
        hashed = (units * UNIT + (factors - factors)).to(flat.dtype)
        total = hashed.new_zeros(())
        for param, c in zip(params, hashed.split(list(self._elems.values())), strict=True):
            total = total + (param * c).sum()
        return total


class BitHashWorkload:
    """Bare params, and a loss with hashes of their bits as factors."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial params, N(0, 1), once.

        Args:
            scenario: Uses `model.shapes`, `model.dtype`, `data`, `world.size`,
                `pair.world_size`, `run.micro_batches` and `run.seed`.
        """
        self._scenario = scenario
        generator, dtype = weight_generator(scenario), working_dtype(scenario.model.dtype)
        # A tensor per param, in registration order.
        self._bits = tuple(
            torch.randn(shape, generator=generator).to(dtype)
            for shape in scenario.model.shapes or ()
        )

    def build(self) -> nn.Module:
        """Return a fresh `HashedParams`, with an equal budget share for every rank."""
        pair, ranks = self._scenario.pair, self._scenario.world.size
        if pair is not None:
            # Both layouts need the same factors.
            ranks = max(ranks, pair.world_size or ranks)
        # Each contribution gets an equal part, so that their sum stays within budget.
        shares = ranks * self._scenario.run.micro_batches
        units_max = max(1, budget_units(self._scenario) // shares)
        return HashedParams(self._bits, units_max=units_max)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return `inputs` (1,) fp64: a salt; no targets."""
        scenario = self._scenario
        generator = batch_generator(scenario, step=step, rank=rank, micro=micro)
        # fp64 holds all 31 bits, and a planted NaN.
        salt = torch.randint(2**31, (1,), generator=generator).double()
        plant_nan(salt, scenario=scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=salt, targets=None, row_count=rows_of(scenario, step=step, rank=rank))

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the module's output, 0-D fp32."""
        return module(batch.inputs).float()

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None, because nothing is classified."""
        return None
