"""`multi-token`: a language model with a second loss, for the token after the next.

Both terms are means over the rank's own tokens. Context parallelism splits both alike, because each
rank has its own part of every sequence. So a mean over all ranks weights both terms as a single
device does. A system that scales the main loss by the number of context-parallel ranks must scale
the second loss too. Megatron-LM does not (issues 3943 and 3959).

Multi-token prediction follows "DeepSeek-V3 Technical Report", section 2.2: a further layer on top
of the trunk, the same head, and a weighted loss.
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
from zero_sim.workloads.linear import LinearBits, build_linear, draw_linear
from zero_sim.workloads.protocol import Batch, total_loss

VOCABULARY, POSITIONS = 5, 3
SECOND_WEIGHT = 0.5
"""Factor for the second loss; a power of two, so it does not round."""


class MultiToken(nn.Module):
    """An embedding, a layer, a further layer after it, and a head that reads both layers."""

    def __init__(self, tokens: Tensor, layers: tuple[LinearBits, LinearBits, LinearBits]) -> None:
        super().__init__()
        # With given weights, no initial values are drawn from the global generator.
        self.tokens = nn.Embedding(VOCABULARY, tokens.shape[1], _weight=tokens)
        self.trunk, self.further, self.head = map(build_linear, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `tokens` (rows, positions) to logits (2, rows, positions, vocabulary)."""
        x = torch.tanh(self.trunk(self.tokens(tokens)))
        # [2, rows, positions, hidden]: one head for both predictions
        return self.head(torch.stack((x, torch.tanh(self.further(x)))))


class MultiTokenWorkload:
    """A language model that predicts two random tokens from each token."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial weights.

        Args:
            scenario: Uses `model.hidden`, `model.dtype`, `data` and `run.seed`.
        """
        self._scenario = scenario
        dtype = working_dtype(scenario.model.dtype)
        hidden, generator = scenario.model.hidden, weight_generator(scenario)
        self._tokens = torch.randn((VOCABULARY, hidden), generator=generator).to(dtype)

        def draw(outputs: int) -> LinearBits:
            return draw_linear(generator, inputs=hidden, outputs=outputs, dtype=dtype)

        self._layers = (draw(hidden), draw(hidden), draw(VOCABULARY))

    def build(self) -> nn.Module:
        """Return a fresh `MultiToken`."""
        return MultiToken(self._tokens.clone(), self._layers)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return input tokens (rows, positions), target tokens, and loss weights in fp32.

        Targets and weights are (2, rows, positions): the next token, and the token after it.
        """
        generator = batch_generator(self._scenario, step=step, rank=rank, micro=micro)
        shape = (rows_of(self._scenario, rank=rank, step=step), POSITIONS)
        # [3, rows, positions]: input, next token, token after it
        drawn = torch.randint(VOCABULARY, (3, *shape), generator=generator)
        weights = torch.rand((2, *shape), generator=generator)
        plant_nan(weights, scenario=self._scenario, step=step, rank=rank, micro=micro)
        # Clones, because views would share storage.
        return Batch(inputs=drawn[0].clone(), targets=drawn[1:].clone(), extra=(weights,))

    def terms(self, module: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Return the mean weighted cross-entropy for each of both tokens, in fp32."""
        assert batch.targets is not None
        logits = module(batch.inputs).float().flatten(0, 2)
        # Like the logits: all next tokens, then all second tokens.
        losses = functional.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        first, second = (losses * batch.extra[0].flatten()).chunk(2)
        return first.mean(), second.mean() * SECOND_WEIGHT

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of both terms."""
        return total_loss(self.terms(module, batch))

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None
