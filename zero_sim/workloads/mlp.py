"""`mlp`: residual MLP blocks on random data, the usual toy model for sharded optimizers."""

from __future__ import annotations

from dataclasses import dataclass

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
from zero_sim.workloads.linear import LinearBits, build_linear, draw_linear
from zero_sim.workloads.protocol import Batch, share_of
from zero_sim.workloads.recompute import RecomputedBlocks

_EXPANSION = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBits:
    """A block's initial weights."""

    up: LinearBits
    down: LinearBits


class ResidualBlock(nn.Module):
    """`x + down(relu(up(x)))`, with an inner layer four times as wide: 8h^2 + 5h params."""

    def __init__(self, bits: BlockBits) -> None:
        super().__init__()
        self.up = build_linear(bits.up)
        self.down = build_linear(bits.down)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (rows, hidden) to the same shape."""
        return x + self.down(functional.relu(self.up(x)))


class MlpWorkload:
    """Residual blocks that regress random targets on random inputs, all N(0, 1)."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial weights.

        Args:
            scenario: Uses `model.hidden`, `model.blocks`, `model.dtype`, `model.recompute`, `data`
                and `run.seed`.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        hidden, generator = scenario.model.hidden, weight_generator(scenario)
        inner = _EXPANSION * hidden
        self._blocks = tuple(
            BlockBits(
                up=draw_linear(generator, inputs=hidden, outputs=inner, dtype=self._dtype),
                down=draw_linear(generator, inputs=inner, outputs=hidden, dtype=self._dtype),
            )
            for _ in range(scenario.model.blocks)
        )

    def build(self) -> nn.Module:
        """Return the blocks in order; the params start with `0.up.weight`, `0.up.bias`."""
        # Param names are the same with and without checkpoints, because both are block sequences.
        blocks = map(ResidualBlock, self._blocks)
        how = self._scenario.model.recompute
        return nn.Sequential(*blocks) if how == "none" else RecomputedBlocks(*blocks, recompute=how)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return inputs and targets, both (rows, hidden) in the working dtype."""
        generator = batch_generator(self._scenario, step=step, rank=rank, micro=micro)
        rows = rows_of(self._scenario, step=step, rank=rank)
        # [2, rows, hidden]: inputs and targets
        shape = (2, rows, self._scenario.model.hidden)
        inputs, targets = torch.randn(shape, generator=generator).to(self._dtype).unbind()
        plant_nan(inputs, scenario=self._scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=inputs, targets=targets)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the squared error in fp32: mean over the width, and mean or sum over rows."""
        assert batch.targets is not None
        outputs, targets = module(batch.inputs).float(), batch.targets.float()
        if self._scenario.data.loss != "sum":
            return share_of(functional.mse_loss(outputs, targets), scenario=self._scenario)
        return functional.mse_loss(outputs, targets, reduction="sum") / targets.shape[1]

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None
