"""`moe`: a small mixture of experts between two dense layers, with one expert per token.

Each rank has a share of the experts and routes its tokens only to these. Real systems exchange
tokens, so that each token can reach all experts. This is omitted, because it does not affect the
optimizer. The optimizer sees dense gradients from all ranks, expert gradients from the ranks that
have the expert, and experts with few tokens or none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import Recompute, Scenario
from zero_sim.workloads.draws import (
    batch_generator,
    plant_nan,
    rows_of,
    weight_generator,
    working_dtype,
)
from zero_sim.workloads.linear import LinearBits, build_linear, draw_linear
from zero_sim.workloads.protocol import Batch
from zero_sim.workloads.recompute import call_block

TOKENS_PER_ROW = 4


class Expert(nn.Module):
    """A linear layer and a ReLU."""

    def __init__(self, bits: LinearBits) -> None:
        super().__init__()
        self.linear = build_linear(bits)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (tokens, hidden) to the same shape; tokens may be 0."""
        return functional.relu(self.linear(x))


class MoeNet(nn.Module):
    """`down(x + expert(x))`, after a first dense layer, with an expert chosen per token.

    Args:
        first: Layer before the experts.
        last: Layer after the experts.
        router: 2D (hidden, all experts), fp32.
        experts: Local experts by global index.
        recompute: Checkpoint kind for each expert.
    """

    router: nn.Parameter  # 2D (hidden, all experts), always fp32

    def __init__(
        self,
        *,
        first: LinearBits,
        last: LinearBits,
        router: Tensor,
        experts: dict[int, LinearBits],
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.recompute: Recompute = recompute
        self.up = build_linear(first)
        self.register_parameter("router", nn.Parameter(router.clone()))
        self.experts = nn.ModuleDict({str(i): Expert(bits) for i, bits in experts.items()})
        self.down = build_linear(last)
        # The router's columns for the local experts.
        self._numbers = list(experts)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `inputs` (tokens, hidden) to the same shape.

        A token goes to the local expert with the highest score (the first if scores tie). The
        expert's output is weighted by the softmax over local scores.
        """
        x = torch.tanh(self.up(inputs))
        # In fp32, as routers usually are.
        gates = (x.float() @ self.router)[:, self._numbers].softmax(dim=-1)
        gate, chosen = gates.max(dim=-1)
        # [tokens, hidden]; exactly one expert writes each row.
        mixed = torch.zeros_like(x)
        for place, expert in enumerate(self.experts.values()):
            # Experts without tokens are called too, as after an exchange that left them none.
            (tokens,) = (chosen == place).nonzero(as_tuple=True)
            output = call_block(expert, x[tokens], recompute=self.recompute)
            weighed = output * gate[tokens].unsqueeze(-1).to(x.dtype)
            mixed = mixed.index_copy(0, tokens, weighed)
        return self.down(x + mixed)


class MoeWorkload:
    """A mixture that regresses random targets on random tokens, all N(0, 1)."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw all experts' initial weights, once.

        Args:
            scenario: Uses `model.hidden`, `model.experts`, `model.dtype`, `model.recompute`,
                `topology.ep`, `data` and `run.seed`. The weights do not depend on `topology.ep`.

        Raises:
            UsageError: `topology.ep` does not divide the number of experts.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        count, ep = scenario.model.experts, scenario.topology.ep
        if count % ep:
            raise UsageError(
                f"expected a number of experts that topology.ep divides, got {count} for ep={ep}. "
                f"Try {2 * ep}."
            )
        # Experts per rank
        self._share = count // ep
        hidden, generator = scenario.model.hidden, weight_generator(scenario)

        def draw() -> LinearBits:
            return draw_linear(generator, inputs=hidden, outputs=hidden, dtype=self._dtype)

        self._first, self._last = draw(), draw()
        self._router = torch.randn((hidden, count), generator=generator)
        self._experts = [draw() for _ in range(count)]

    def build(self) -> nn.Module:
        """Return the module for expert-parallel index 0; with `ep` = 1, the whole model."""
        return self.build_share(0)

    def build_share(self, expert_index: int) -> nn.Module:
        """Return the module with one share of the experts, `experts.<i>.linear`."""
        start = expert_index * self._share
        return MoeNet(
            first=self._first,
            last=self._last,
            router=self._router,
            experts={i: self._experts[i] for i in range(start, start + self._share)},
            recompute=self._scenario.model.recompute,
        )

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return inputs and targets, both (tokens, hidden) in the working dtype."""
        generator = batch_generator(self._scenario, step=step, rank=rank, micro=micro)
        rows = rows_of(self._scenario, step=step, rank=rank)
        # [2, tokens, hidden]: inputs and targets
        shape = (2, rows * TOKENS_PER_ROW, self._scenario.model.hidden)
        inputs, targets = torch.randn(shape, generator=generator).to(self._dtype).unbind()
        plant_nan(inputs, scenario=self._scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=inputs, targets=targets, row_count=rows)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared error, in fp32."""
        assert batch.targets is not None
        return functional.mse_loss(module(batch.inputs).float(), batch.targets.float())

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None
