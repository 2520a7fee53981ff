"""`unusual`: a small network with one param of each awkward kind.

A token model with an embedding that is also the output projection, a layer used twice, and two
paths mixed by a router. Params that only some micro-batches use add small terms.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_sim.scenario.spec import Scenario
from zero_sim.workloads.draws import (
    batch_generator,
    data_rank,
    plant_nan,
    rows_of,
    weight_generator,
    working_dtype,
)
from zero_sim.workloads.protocol import Batch

WIDTH, VOCABULARY, PATHS = 5, 7, 2

RANK_ZERO, MICRO_ZERO = "rank_zero", "micro_zero"
"""Params that only rank 0, or only micro-batch 0, uses; `Batch.uses` names them."""


class TiedHead(nn.Module):
    """The projection to the vocabulary, with the embedding's weight."""

    weight: nn.Parameter  # 2D (vocabulary, width)

    def __init__(self, embedding: nn.Parameter) -> None:
        super().__init__()
        self.register_parameter("weight", embedding)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (rows, width) to logits (rows, vocabulary)."""
        return x @ self.weight.T


class UnusualNet(nn.Module):
    """A network with awkward params; `head.weight` is `embedding` under a second name."""

    frozen: nn.Parameter  # 1D (width,), never trained
    embedding: nn.Parameter  # 2D (vocabulary, width), tied to the head
    twice: nn.Parameter  # 2D (width, width), used twice in a forward
    unused: nn.Parameter  # 1D (3,), in no forward
    rank_zero: nn.Parameter  # 1D (width,)
    micro_zero: nn.Parameter  # 1D (width,)
    empty: nn.Parameter  # 2D (0, width)
    strided: nn.Parameter  # 2D (width, width), a transposed view of its storage
    router: nn.Parameter  # 2D (width, paths), always fp32
    scale: nn.Parameter  # 0D

    def __init__(self, bits: dict[str, Tensor]) -> None:
        super().__init__()
        for name, initial in bits.items():
            trained = name != "frozen"
            # clone() keeps the strides.
            self.register_parameter(name, nn.Parameter(initial.clone(), requires_grad=trained))
        self.head = TiedHead(self.embedding)

    def forward(self, inputs: Tensor, *, tokens: Tensor, uses: Collection[str]) -> Tensor:
        """Return logits.

        Args:
            inputs: (rows, width), in the working dtype.
            tokens: (rows,), indices into the embedding.
            uses: Params to use, among `rank_zero` and `micro_zero`.

        Returns:
            (rows, vocabulary), in the working dtype.
        """
        # The frozen param takes part in forward, but is not trained.
        x = inputs * self.frozen + functional.embedding(tokens, self.embedding)
        # Adds 0, so that a param without elements gets a gradient.
        x = x + self.empty.sum()
        # Used twice in a forward, so its gradient has two terms.
        hidden = torch.tanh(torch.tanh(x @ self.twice) @ self.twice)
        # [rows, width, paths]
        paths = torch.stack([hidden, torch.tanh(x @ self.strided)], dim=-1)
        # The router computes in fp32, and gates return to the working dtype.
        gates = (x.float() @ self.router).softmax(dim=-1).to(paths.dtype)
        x = x + (paths * gates.unsqueeze(1)).sum(dim=-1)
        # Terms for params that only some micro-batches use.
        for name in (RANK_ZERO, MICRO_ZERO):
            if name in uses:
                x = x + torch.tanh(inputs * self.get_parameter(name))
        return self.head(x * self.scale)


def _draw_bits(scenario: Scenario) -> dict[str, Tensor]:
    """Draw all params in registration order, from N(0, 1) over the root of the width."""
    generator, dtype = weight_generator(scenario), working_dtype(scenario.model.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(WIDTH)

    bits = {
        "frozen": draw(WIDTH) + 1.0,
        "embedding": draw(VOCABULARY, WIDTH),
        "twice": draw(WIDTH, WIDTH),
        "unused": draw(3),
        RANK_ZERO: draw(WIDTH),
        MICRO_ZERO: draw(WIDTH),
        "empty": draw(0, WIDTH),
        # Transposed, so its strides are not contiguous.
        "strided": draw(WIDTH, WIDTH).T,
        "router": draw(WIDTH, PATHS),
        "scale": draw() + 1.0,
    }
    # The router stays in fp32.
    return {
        name: initial if name == "router" else initial.to(dtype) for name, initial in bits.items()
    }


class UnusualWorkload:
    """A network that predicts random target tokens."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial weights.

        Args:
            scenario: Uses `model.dtype`, `data` and `run.seed`.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        self._bits = _draw_bits(scenario)

    def build(self) -> nn.Module:
        """Return a fresh `UnusualNet`."""
        return UnusualNet(self._bits)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return inputs (rows, width), and input and target tokens, (rows, 2)."""
        scenario = self._scenario
        generator = batch_generator(scenario, step=step, rank=rank, micro=micro)
        rows = rows_of(scenario, step=step, rank=rank)
        inputs = torch.randn((rows, WIDTH), generator=generator).to(self._dtype)
        tokens = torch.randint(VOCABULARY, (rows, 2), generator=generator)
        plant_nan(inputs, scenario=scenario, step=step, rank=rank, micro=micro)
        # By the data's rank, because ranks that share rank 0's data use the same params.
        conditions = {RANK_ZERO: data_rank(scenario, rank=rank) == 0, MICRO_ZERO: micro == 0}
        uses = frozenset(name for name, used in conditions.items() if used)
        return Batch(inputs=inputs, targets=tokens, uses=uses)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy, in fp32."""
        assert batch.targets is not None
        tokens, wanted = batch.targets.unbind(dim=1)
        logits = module(batch.inputs, tokens=tokens, uses=batch.uses)
        return functional.cross_entropy(logits.float(), wanted)

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None
