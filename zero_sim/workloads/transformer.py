"""`transformer-260`: the 260-parameter transformer of the ZeRO-1 walkthrough.

Activations are rows and weights multiply from the right, `y = x @ W`; `W_q[0, 0]` is 0.12. There is
one pre-LN block (width 4, 2 heads of width 2, no mask, a ReLU FFN of width 16), then a projection
to 8 tokens. Without an embedding, inputs are vectors, 3 per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_sim.scenario.spec import Recompute, Scenario
from zero_sim.workloads.draws import (
    batch_generator,
    data_rank,
    plant_nan,
    rows_of,
    weight_generator,
    working_dtype,
)
from zero_sim.workloads.protocol import Batch
from zero_sim.workloads.recompute import call_block

WIDTH, HEADS, INNER, VOCABULARY, TOKENS = 4, 2, 16, 8, 3

SHAPES: dict[str, tuple[int, ...]] = {
    "ln1_weight": (WIDTH,),
    "ln1_bias": (WIDTH,),
    "W_q": (WIDTH, WIDTH),
    "W_k": (WIDTH, WIDTH),
    "W_v": (WIDTH, WIDTH),
    "W_o": (WIDTH, WIDTH),
    "ln2_weight": (WIDTH,),
    "ln2_bias": (WIDTH,),
    "W_1": (WIDTH, INNER),
    "b_1": (INNER,),
    "W_2": (INNER, WIDTH),
    "b_2": (WIDTH,),
    "W_vocab": (WIDTH, VOCABULARY),
}
"""Param shapes by name, in flat buffer order."""

INPUT = (
    (0.5, -0.3, 0.8, 0.1),
    (0.2, 0.7, -0.1, 0.4),
    (-0.6, 0.3, 0.5, -0.2),
)
"""Rank 0's three tokens in the walkthrough. Row 0 has mean 0.275, standard deviation 0.4146."""

W_Q = (
    (0.12, 0.34, -0.21, 0.05),
    (-0.15, 0.22, 0.11, -0.08),
    (0.30, -0.10, 0.18, 0.27),
    (-0.05, 0.14, -0.33, 0.09),
)

GIVEN: Mapping[str, Sequence[Sequence[float]]] = {
    "W_q": W_Q,
    "W_k": (
        (0.20, -0.11, 0.07, 0.15),
        (0.03, 0.28, -0.14, 0.10),
        (-0.22, 0.06, 0.31, -0.05),
        (0.17, -0.09, 0.02, 0.24),
    ),
    "W_v": (
        (0.08, 0.19, -0.12, 0.25),
        (-0.07, 0.33, 0.04, -0.16),
        (0.21, -0.03, 0.15, 0.11),
        (-0.14, 0.08, 0.26, -0.02),
    ),
    "W_vocab": (
        (0.11, -0.05, 0.18, 0.03, -0.14, 0.22, -0.09, 0.07),
        (-0.06, 0.13, 0.02, -0.17, 0.08, 0.04, 0.20, -0.11),
        (0.15, -0.02, 0.09, 0.21, -0.08, 0.12, -0.03, 0.16),
        (-0.10, 0.07, -0.13, 0.05, 0.19, -0.06, 0.14, 0.01),
    ),
}
"""Initial weights that the walkthrough lists."""

W_Q_GRADS = (
    (
        (0.023, -0.011, 0.045, -0.008),
        (-0.031, 0.019, -0.007, 0.014),
        (0.012, -0.028, 0.033, -0.005),
        (-0.016, 0.009, -0.021, 0.038),
    ),
    (
        (0.017, -0.025, 0.031, -0.013),
        (-0.009, 0.041, -0.018, 0.006),
        (0.028, -0.014, 0.022, -0.035),
        (-0.020, 0.016, -0.012, 0.027),
    ),
)
"""The walkthrough's `W_q` gradients on ranks 0 and 1; listed there, not derived from a loss."""

W_Q_GRAD_MEAN = (
    (0.020, -0.018, 0.038, -0.0105),
    (-0.020, 0.030, -0.0125, 0.010),
    (0.020, -0.021, 0.0275, -0.020),
    (-0.018, 0.0125, -0.0165, 0.0325),
)
"""Mean of `W_Q_GRADS` over the two ranks."""

W_Q_AFTER_ADAM = (
    (0.119, 0.341, -0.211, 0.051),
    (-0.149, 0.219, 0.111, -0.081),
    (0.299, -0.099, 0.179, 0.271),
    (-0.049, 0.139, -0.329, 0.089),
)
"""`W_q` after one Adam step (lr 1e-3, betas 0.9 / 0.999, eps 1e-8) on that mean, to 3 decimals."""


class Transformer260(nn.Module):
    """A transformer block and a vocabulary projection. All params are direct, in flat order."""

    ln1_weight: nn.Parameter  # 1D (width,)
    ln1_bias: nn.Parameter  # 1D (width,)
    W_q: nn.Parameter  # 2D (width, width)
    W_k: nn.Parameter  # 2D (width, width)
    W_v: nn.Parameter  # 2D (width, width)
    W_o: nn.Parameter  # 2D (width, width)
    ln2_weight: nn.Parameter  # 1D (width,)
    ln2_bias: nn.Parameter  # 1D (width,)
    W_1: nn.Parameter  # 2D (width, inner)
    b_1: nn.Parameter  # 1D (inner,)
    W_2: nn.Parameter  # 2D (inner, width)
    b_2: nn.Parameter  # 1D (width,)
    W_vocab: nn.Parameter  # 2D (width, vocabulary)

    note: Callable[[str, Tensor], Tensor]
    """Receives and returns each activation, by name. Replace it to copy activations."""

    def __init__(self, bits: dict[str, Tensor], *, recompute: Recompute = "none") -> None:
        super().__init__()
        self.recompute: Recompute = recompute
        # Only a walkthrough copies activations.
        self.note = _unnoted
        # Registration order decides the flat buffer's order.
        for name, initial in bits.items():
            self.register_parameter(name, nn.Parameter(initial.clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (rows, tokens, width) to logits (rows, tokens, vocabulary)."""
        # The projection is not part of the checkpoint.
        x = call_block(self._block, x, recompute=self.recompute)
        return self.note("logits", x @ self.W_vocab)

    def _block(self, x: Tensor) -> Tensor:
        # Pre-LN: norms come before attention and before the FFN.
        note = self.note
        normal = note("norm 1", normalise(x, weight=self.ln1_weight, bias=self.ln1_bias))
        x = note("residual 1", x + self._attend(normal))
        normal = note("norm 2", normalise(x, weight=self.ln2_weight, bias=self.ln2_bias))
        inner = note("inner", normal @ self.W_1 + self.b_1)
        hidden = note("relu", functional.relu(inner))
        return note("residual 2", x + note("FFN", hidden @ self.W_2 + self.b_2))

    def _attend(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        # [rows, heads, tokens, width / heads]
        q, k, v = (
            self.note(name, x @ weight).view(rows, tokens, HEADS, WIDTH // HEADS).transpose(1, 2)
            for name, weight in (("Q", self.W_q), ("K", self.W_k), ("V", self.W_v))
        )
        # [rows, heads, tokens, tokens]
        scores = self.note("scores", q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS))
        mixed = self.note("softmax", scores.softmax(dim=-1)) @ v
        # Heads side by side again.
        joined = self.note("mix", mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return self.note("W_o", joined @ self.W_o)


def _unnoted(name: str, activation: Tensor) -> Tensor:
    return activation


def normalise(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply layer norm over the last dimension, with torch's eps of 1e-5."""
    return functional.layer_norm(x, (WIDTH,), weight, bias)


def _draw_bits(scenario: Scenario) -> dict[str, Tensor]:
    """Draw all 260 elements: norms 1, biases 0, some weights given, the rest random."""
    generator, dtype = weight_generator(scenario), working_dtype(scenario.model.dtype)
    bits: dict[str, Tensor] = {}
    for name, shape in SHAPES.items():
        if name in GIVEN:
            initial = torch.tensor(GIVEN[name])
        elif name.endswith("_weight"):
            initial = torch.ones(shape)
        elif len(shape) == 1:
            initial = torch.zeros(shape)
        else:
            # Scaled by fan-in, which is the first dimension here.
            initial = torch.randn(shape, generator=generator) / math.sqrt(shape[0])
        bits[name] = initial.to(dtype)
    return bits


class TransformerWorkload:
    """The 260-parameter transformer, which predicts random target tokens."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial weights.

        Args:
            scenario: Uses `model.dtype`, `model.recompute`, `data` (a row is a sequence of 3
                tokens) and `run.seed`.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        self._bits = _draw_bits(scenario)

    def build(self) -> nn.Module:
        """Return a fresh `Transformer260`."""
        return Transformer260(self._bits, recompute=self._scenario.model.recompute)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return inputs (rows, 3, 4) and target tokens (rows, 3).

        The first row of rank 0's first batch is the walkthrough's; the rest is from N(0, 1).
        """
        generator = batch_generator(self._scenario, step=step, rank=rank, micro=micro)
        rows = rows_of(self._scenario, step=step, rank=rank)
        drawn = torch.randn((rows, TOKENS, WIDTH), generator=generator)
        # The walkthrough's input.
        if (step, data_rank(self._scenario, rank=rank), micro) == (0, 0, 0):
            drawn[0] = torch.tensor(INPUT)
        inputs = drawn.to(self._dtype)
        targets = torch.randint(VOCABULARY, (rows, TOKENS), generator=generator)
        plant_nan(inputs, scenario=self._scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=inputs, targets=targets)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over all tokens, in fp32."""
        assert batch.targets is not None
        logits = module(batch.inputs).float()
        return functional.cross_entropy(logits.view(-1, VOCABULARY), batch.targets.view(-1))

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None
