"""`gpt`: a small language model from torch's layers, with a tied head and a block used twice."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_sim.scenario.spec import Recompute, Scenario
from zero_sim.workloads.draws import (
    batch_generator,
    plant_nan,
    rows_of,
    weight_generator,
    working_dtype,
)
from zero_sim.workloads.linear import build_linear, draw_linear
from zero_sim.workloads.protocol import Batch
from zero_sim.workloads.recompute import call_block

VOCABULARY, POSITIONS = 7, 3


class Attention(nn.Module):
    """Causal attention with a single head."""

    def __init__(self, qkv: nn.Linear, out: nn.Linear) -> None:
        super().__init__()
        self.qkv = qkv
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (rows, positions, hidden) to the same shape."""
        # [rows, positions, hidden] each
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        # [rows, positions, positions]
        scores = query @ key.mT / x.shape[-1] ** 0.5
        # [positions, positions], True for later positions
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        return self.out(scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ value)


class Block(nn.Module):
    """Attention, then a layer, each after a norm and with a residual connection."""

    def __init__(self, attention: Attention, layer: nn.Linear, norms: Iterable[nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norms
        self.attention = attention
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (rows, positions, hidden) to the same shape."""
        x = x + self.attention(self.norm_1(x))
        return x + functional.gelu(self.layer(self.norm_2(x)))


class Gpt(nn.Module):
    """Embeddings, blocks (the first is used twice), a norm, and the embedding as head."""

    def __init__(
        self,
        tokens: Tensor,
        positions: Tensor,
        layers: Iterable[Block],
        norm: nn.LayerNorm,
        *,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.recompute: Recompute = recompute
        # With given weights, no initial values are drawn from the global generator.
        self.tokens = nn.Embedding(VOCABULARY, tokens.shape[1], _weight=tokens)
        self.positions = nn.Embedding(POSITIONS, tokens.shape[1], _weight=positions)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        # On the meta device, because the next line replaces its weight with the embedding's.
        self.head = nn.Linear(tokens.shape[1], len(tokens), bias=False, device="meta")
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `tokens` (rows, positions) to logits (rows, positions, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(POSITIONS, device=tokens.device))
        # The first block is used twice.
        for block in (self.layers[0], *self.layers):
            # A reentrant checkpoint would give a block's gradient in two parts, one per use.
            keeps = self.recompute == "reentrant" and block is self.layers[0]
            x = call_block(block, x, recompute="none" if keeps else self.recompute)
        return self.head(self.norm(x))


class GptWorkload:
    """A language model that predicts random tokens from random tokens."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial weights.

        Args:
            scenario: Uses `model.hidden`, `model.blocks`, `model.dtype`, `model.recompute`, `data`
                and `run.seed`.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        self._hidden = hidden = scenario.model.hidden
        generator = weight_generator(scenario)
        # Token and position embeddings, from a single draw.
        shape = (VOCABULARY + POSITIONS, hidden)
        embeddings = torch.randn(shape, generator=generator).to(self._dtype)
        self._embeddings = embeddings.split([VOCABULARY, POSITIONS])
        # Layers per block: query-key-value, output, inner.
        self._blocks = tuple(
            tuple(
                draw_linear(generator, inputs=hidden, outputs=outputs, dtype=self._dtype)
                for outputs in (3 * hidden, hidden, hidden)
            )
            for _ in range(scenario.model.blocks)
        )

    def build(self) -> nn.Module:
        """Return a fresh `Gpt`."""
        blocks = []
        for qkv, out, layer in self._blocks:
            attention = Attention(build_linear(qkv), build_linear(out))
            norms = (self._norm(), self._norm())
            blocks.append(Block(attention, build_linear(layer), norms))
        tokens, positions = (bits.clone() for bits in self._embeddings)
        recompute = self._scenario.model.recompute
        return Gpt(tokens, positions, blocks, self._norm(), recompute=recompute)

    def _norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self._hidden, dtype=self._dtype)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return input and target tokens, both (rows, positions), and loss weights in fp32."""
        generator = batch_generator(self._scenario, step=step, rank=rank, micro=micro)
        rows = rows_of(self._scenario, step=step, rank=rank)
        shape = (rows, POSITIONS)
        inputs, targets = torch.randint(VOCABULARY, (2, *shape), generator=generator).unbind()
        weights = torch.rand(shape, generator=generator)
        # Into the weights, because tokens are whole numbers.
        plant_nan(weights, scenario=self._scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=inputs.clone(), targets=targets, extra=(weights,))

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean weighted cross-entropy, in fp32."""
        assert batch.targets is not None
        # [rows x positions, vocabulary]
        logits = module(batch.inputs).float().flatten(0, 1)
        losses = functional.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        return (losses * batch.extra[0].flatten()).mean()

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None
