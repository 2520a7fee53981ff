"""`ternary`: a network with the usual layers, in which every number is a small whole number.

Forward replaces each weight with a hash of its bits, -1, 0 or 1, and backward passes the hash's
gradient to the weight. Activations and their gradients are clamped to [-1, 1]. So every product,
every sum inside a layer and every gradient is a small whole number. Results are exact for any batch
split, thread count, processor and reduction order, and gradients still depend on every weight bit.
Softmax, norms and means are omitted, because their results would not be whole.
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
from zero_sim.workloads.exact import Clamped, HashedTernary
from zero_sim.workloads.protocol import Batch

VOCABULARY, EXPERTS, KERNEL = 8, 2, 3


def _hashed(weight: Tensor) -> Tensor:
    hashed = HashedTernary.apply(weight)
    assert isinstance(hashed, Tensor)
    return hashed


def _clamped(x: Tensor) -> Tensor:
    clamped = Clamped.apply(x)
    assert isinstance(clamped, Tensor)
    return clamped


class TernaryLinear(nn.Module):
    """`x @ hash(weight).T + hash(bias)`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.bias = None if bias is None else nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, inputs) to (rows, outputs)."""
        bias = None if self.bias is None else _hashed(self.bias)
        return functional.linear(x, _hashed(self.weight), bias)


class TernaryExperts(nn.Module):
    """Each row goes to the expert with the best score; scores never tie."""

    def __init__(self, gate: Tensor, experts: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.gate = TernaryLinear(gate)
        self.experts = nn.ModuleList(TernaryLinear(weight) for weight in experts)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, width) to the same shape."""
        scores = self.gate(x)
        count = len(self.experts)
        # Whole numbers that differ modulo the number of experts, so that scores never tie.
        ranked = scores.detach() * count + torch.arange(count, dtype=x.dtype, device=x.device)
        chosen = functional.one_hot(ranked.argmax(dim=-1), count).to(x.dtype)
        # Odd, so that no row is multiplied by 0.
        strength = _clamped(2 * scores + 1)
        # [rows, experts, width]
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (outputs * (chosen * strength).unsqueeze(-1)).sum(dim=1)


class TernaryNet(nn.Module):
    """Embedding, convolution over rows, residual layers, experts, and the embedding as head."""

    def __init__(self, bits: dict[str, Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Parameter(bits["embedding"].clone())
        self.kernel = nn.Parameter(bits["kernel"].clone())
        self.up = TernaryLinear(bits["up"], bits["up_bias"])
        self.down = TernaryLinear(bits["down"], bits["down_bias"])
        self.moe = TernaryExperts(
            bits["gate"], tuple(bits[f"expert_{index}"] for index in range(EXPERTS))
        )
        # In no forward.
        self.unused = nn.Parameter(bits["unused"].clone())

    def forward(self, inputs: Tensor, *, tokens: Tensor) -> Tensor:
        """Return logits.

        Args:
            inputs: (rows, width), whole numbers, in the working dtype.
            tokens: (rows,), indices into the embedding.

        Returns:
            (rows, vocabulary), in the working dtype.
        """
        embedding = _hashed(self.embedding)
        # Clamped after each sum, so that activations stay -1, 0 or 1.
        x = _clamped(inputs + functional.embedding(tokens, embedding))
        x = _clamped(x + self._convolve(x))
        x = _clamped(x + self.down(_clamped(functional.relu(self.up(x)))))
        x = _clamped(x + self.moe(x))
        # Tied: the embedding is the output projection.
        return x @ embedding.T

    def _convolve(self, x: Tensor) -> Tensor:
        """Mix each feature with the same feature in the rows before and after."""
        # [1, width, rows]
        columns = x.T.unsqueeze(0)
        mixed = functional.conv1d(
            columns, _hashed(self.kernel), padding=KERNEL // 2, groups=x.shape[1]
        )
        return mixed[0].T


def _draw_bits(scenario: Scenario) -> dict[str, Tensor]:
    """Draw all params, in order: multiples of 1/64 from -2 to 2, equal on every processor."""
    generator, dtype = weight_generator(scenario), working_dtype(scenario.model.dtype)
    width = scenario.model.hidden
    inner = 2 * width

    def draw(*shape: int) -> Tensor:
        # Whole numbers over a power of two are exact in every dtype here.
        return (torch.randint(-128, 129, shape, generator=generator) / 64).to(dtype)

    return {
        "embedding": draw(VOCABULARY, width),
        "kernel": draw(width, 1, KERNEL),
        "up": draw(inner, width),
        "up_bias": draw(inner),
        "down": draw(width, inner),
        "down_bias": draw(width),
        "gate": draw(EXPERTS, width),
        **{f"expert_{index}": draw(width, width) for index in range(EXPERTS)},
        "unused": draw(3),
    }


class TernaryWorkload:
    """The network, with a signed sum of its outputs as loss."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial weights.

        Args:
            scenario: Uses `model.hidden`, `model.dtype`, `data` and `run.seed`.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        self._bits = _draw_bits(scenario)

    def build(self) -> nn.Module:
        """Return a fresh `TernaryNet`."""
        return TernaryNet(self._bits)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return inputs (rows, width) and targets (rows, 1 + vocabulary): tokens, then signs."""
        scenario = self._scenario
        generator = batch_generator(scenario, step=step, rank=rank, micro=micro)
        rows = rows_of(scenario, step=step, rank=rank)
        shape = (rows, scenario.model.hidden)
        # -1, 0 or 1
        inputs = torch.randint(-1, 2, shape, generator=generator).to(self._dtype)
        tokens = torch.randint(VOCABULARY, (rows, 1), generator=generator)
        # -1 or 1
        signs = torch.randint(2, (rows, VOCABULARY), generator=generator) * 2 - 1
        plant_nan(inputs, scenario=scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=inputs, targets=torch.cat([tokens, signs], dim=1))

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the signed sum of the outputs, 0-D fp32."""
        assert batch.targets is not None
        tokens, signs = batch.targets[:, 0], batch.targets[:, 1:]
        # A sum, not a mean, so that the loss stays whole.
        return (module(batch.inputs, tokens=tokens).float() * signs).sum()

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None
