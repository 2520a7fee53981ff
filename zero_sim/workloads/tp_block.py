"""`tp-block`: transformer blocks whose heads and inner features split over ranks, exactly.

A block is attention, then two layers, each with a residual connection. Query, key, value and the
first layer are column-parallel: a rank computes some of their outputs, in whole heads. The output
projection and the second layer are row-parallel: a rank takes the matching inputs, and results are
summed over ranks. A single device has all parts, and computes each layer as one matrix product.

[Note: splitting without rounding]
As in `ternary`, weights enter as hashes of their bits, -1, 0 or 1. Activations and their gradients
are clamped to [-1, 1] after every sum, and this clamp replaces softmax. So every product is -1, 0
or 1. Splitting cuts sums over inner features in forward, and over outputs in backward. These sums
are whole numbers, at most as large as their number of terms. A dtype with p significand bits
represents all whole numbers up to 2**p. With at most that many terms, no addition rounds, in any
order and with any cut. So adding the parts gives the same bits as the whole
(`reference.certificate` applies the same argument to sums over ranks). `terms_max` is the resulting
limit for a block's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_sim.scenario.spec import Scenario
from zero_sim.scenario.tp_block import HEAD_ELEMS, INNER, POSITIONS
from zero_sim.workloads.draws import (
    batch_generator,
    plant_nan,
    rows_of,
    weight_generator,
    working_dtype,
)
from zero_sim.workloads.exact import Clamped, HashedTernary
from zero_sim.workloads.protocol import Batch


class Parallel(Protocol):
    """A system's operations around the layers that it splits."""

    def enter(self, x: Tensor) -> Tensor:
        """Return the input for column-parallel layers; backward sums its gradient over ranks."""
        ...

    def leave(self, y: Tensor) -> Tensor:
        """Sum a row-parallel layer's output over ranks."""
        ...

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run a block."""
        ...


class OneDevice:
    """All parts on a single device, so no operations are needed."""

    def enter(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def leave(self, y: Tensor) -> Tensor:
        """Return `y`."""
        return y

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run the block, with all activations kept."""
        return block(x)


class SplitLinear(nn.Module):
    """`x @ hash(weight).T`, with all parts of the weight (`part0`, `part1`, ...) or a single part.

    Args:
        parts: By index; each part is (outputs, inputs).
        dim: Dimension along which parts are joined: 0 for outputs, 1 for inputs.
    """

    def __init__(self, parts: dict[int, Tensor], *, dim: int) -> None:
        super().__init__()
        self._names = tuple(f"part{index}" for index in parts)
        self._dim = dim
        for name, part in zip(self._names, parts.values(), strict=True):
            self.register_parameter(name, nn.Parameter(part.clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        hashed = [HashedTernary.apply(getattr(self, name)) for name in self._names]
        # With all parts, this is the whole weight.
        return functional.linear(x, torch.cat(hashed, dim=self._dim))  # pyrefly: ignore


class Positions(nn.Module):
    """Values added to each position; every rank has them all."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Add to (rows, positions, width)."""
        return _clamped(x + HashedTernary.apply(self.weight))  # pyrefly: ignore


class Block(nn.Module):
    """Attention over the local heads, then two layers."""

    def __init__(self, layers: dict[str, SplitLinear]) -> None:
        super().__init__()
        self.parallel: Parallel = OneDevice()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, positions, width) to the same shape."""
        # `leave` sums outputs over ranks in forward, `enter` sums gradients in backward.
        x = _clamped(x + self.parallel.leave(self._attend(self.parallel.enter(x))))
        inner = _clamped(functional.relu(self.get_submodule("up")(self.parallel.enter(x))))
        return _clamped(x + self.parallel.leave(self.get_submodule("down")(inner)))

    def _attend(self, x: Tensor) -> Tensor:
        rows, positions, _ = x.shape
        # [rows, local heads, positions, HEAD_ELEMS]
        q, k, v = (
            self.get_submodule(name)(x).view(rows, positions, -1, HEAD_ELEMS).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        # A clamp instead of softmax; see [Note: splitting without rounding].
        mixed = _clamped(_clamped(q @ k.transpose(2, 3)) @ v)
        return self.get_submodule("out")(mixed.transpose(1, 2).reshape(rows, positions, -1))


class Blocks(nn.Module):
    """Positions, then blocks: the whole model, or one rank's parts."""

    def __init__(self, bits: dict[str, Tensor], parts: dict[int, dict[str, Tensor]]) -> None:
        super().__init__()
        self.positions = Positions(bits["positions"])
        # Names are `block.layer`.
        count = max(int(name.split(".")[0]) for name in next(iter(parts.values()))) + 1
        self.blocks = nn.ModuleList(
            Block(
                {
                    layer: SplitLinear(
                        {index: part[f"{block}.{layer}"] for index, part in parts.items()}, dim=dim
                    )
                    for layer, dim in LAYERS.items()
                }
            )
            for block in range(count)
        )
        self.parallel: Parallel = OneDevice()

    def be_parallel(self, parallel: Parallel) -> None:
        """Run as one of several ranks from now on, with `parallel` around the split layers."""
        self.parallel = parallel
        for block in self.blocks:
            assert isinstance(block, Block)
            block.parallel = parallel

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, positions, width), whole numbers, to the same shape."""
        x = self.positions(inputs)
        for block in self.blocks:
            x = self.parallel.run(block, x)
        return x


LAYERS = {"query": 0, "key": 0, "value": 0, "out": 1, "up": 0, "down": 1}
"""A block's layers, each with the dimension along which it is split."""


def _clamped(x: Tensor) -> Tensor:
    clamped = Clamped.apply(x)
    assert isinstance(clamped, Tensor)
    return clamped


class TpBlockWorkload:
    """Blocks, with a signed sum of their outputs as loss."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial weights.

        Args:
            scenario: Uses `model.hidden`, `model.blocks`, `model.dtype`, `topology.tp`, `data` and
                `run.seed`.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        self._bits = self._draw_bits()

    def build(self) -> nn.Module:
        """Return the whole model with all parts, as on a single device."""
        return self._build(range(self._scenario.topology.tp))

    def build_part(self, tp_index: int) -> nn.Module:
        """Return the module of a tensor-parallel index. Call `be_parallel` on it.

        Args:
            tp_index: Index, from 0.
        """
        return self._build([tp_index])

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return inputs and signs, both (rows, positions, width)."""
        scenario = self._scenario
        generator = batch_generator(scenario, step=step, rank=rank, micro=micro)
        shape = (rows_of(scenario, step=step, rank=rank), POSITIONS, scenario.model.hidden)
        # Inputs are -1, 0 or 1, and signs -1 or 1.
        inputs = torch.randint(-1, 2, shape, generator=generator).to(self._dtype)
        signs = torch.randint(2, shape, generator=generator) * 2 - 1
        plant_nan(inputs, scenario=scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=inputs, targets=signs)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the signed sum of the outputs, 0-D fp32."""
        assert batch.targets is not None
        return (module(batch.inputs).float() * batch.targets).sum()

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None

    def _build(self, indices: Sequence[int]) -> nn.Module:
        tp = self._scenario.topology.tp
        # Positions have no "." in their name and are not split.
        parts = {
            index: {
                name: bits.chunk(tp, dim=LAYERS[name.split(".")[1]])[index]
                for name, bits in self._bits.items()
                if "." in name
            }
            for index in indices
        }
        return Blocks(self._bits, parts)

    def _draw_bits(self) -> dict[str, Tensor]:
        generator, width = weight_generator(self._scenario), self._scenario.model.hidden
        # (outputs, inputs) for each layer in a block
        shapes = {
            **dict.fromkeys(("query", "key", "value", "out"), (width, width)),
            "up": (INNER * width, width),
            "down": (width, INNER * width),
        }

        def draw(*shape: int) -> Tensor:
            # Whole numbers over a power of two are exact in every dtype here.
            return (torch.randint(-128, 129, shape, generator=generator) / 64).to(self._dtype)

        return {
            "positions": draw(POSITIONS, width),
            **{
                f"{block}.{layer}": draw(*shape)
                for block in range(self._scenario.model.blocks)
                for layer, shape in shapes.items()
            },
        }
