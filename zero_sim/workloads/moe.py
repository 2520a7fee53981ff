"""`moe`: a small mixture of experts between two dense layers, each token sent to one expert.

A rank holds a share of the experts and sends its tokens to those alone. Real systems exchange
tokens, so that each token can reach all experts; that is left out on purpose, since an optimizer
never sees it: what reaches it is that dense params collect gradients from all ranks, experts from
those that hold them, and that some experts get few tokens or none.
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
        """Map `x` (tokens, hidden) to the same shape; there may be no token."""
        return functional.relu(self.linear(x))


class MoeNet(nn.Module):
    """`down(x + expert(x))`, x after a first dense layer, the expert chosen token by token.

    Args:
        first: The layer before the experts.
        last: The layer after them.
        router: 2D (hidden, all experts), fp32.
        experts: Those held here, by their number among all.
        recompute: Checkpoint of each expert.
    """

    router: nn.Parameter  # 2D (hidden, all experts), fp32 whatever the others are

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
        self._numbers = list(experts)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `inputs` (tokens, hidden) to the same shape.

        A token goes to the local expert that the router scores highest (the first of equals), and
        its output is weighed by the softmax over the local scores.
        """
        x = torch.tanh(self.up(inputs))
        gates = (x.float() @ self.router)[:, self._numbers].softmax(dim=-1)
        gate, chosen = gates.max(dim=-1)
        mixed = torch.zeros_like(x)
        for place, expert in enumerate(self.experts.values()):
            # An expert without tokens is called too, as on a rank that got none in an exchange.
            (tokens,) = (chosen == place).nonzero(as_tuple=True)
            output = call_block(expert, x[tokens], recompute=self.recompute)
            weighed = output * gate[tokens].unsqueeze(-1).to(x.dtype)
            mixed = mixed.index_copy(0, tokens, weighed)
        return self.down(x + mixed)


class MoeWorkload:
    """A mixture that regresses random targets from random tokens, all N(0, 1)."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial weights of all experts, once.

        Args:
            scenario: Uses `model.hidden`, `model.experts`, `model.dtype`, `model.recompute`,
                `topology.ep`, `data` and `run.seed`. The weights do not depend on `topology.ep`.

        Raises:
            UsageError: If the experts cannot be dealt out evenly.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        count, ep = scenario.model.experts, scenario.topology.ep
        if count % ep:
            raise UsageError(
                f"expected experts that topology.ep divides, got {count} for ep={ep}. Try {2 * ep}."
            )
        self._share = count // ep
        hidden, generator = scenario.model.hidden, weight_generator(scenario)

        def draw() -> LinearBits:
            return draw_linear(generator, inputs=hidden, outputs=hidden, dtype=self._dtype)

        self._first, self._last = draw(), draw()
        self._router = torch.randn((hidden, count), generator=generator)
        self._experts = [draw() for _ in range(count)]

    def build(self) -> nn.Module:
        """Return the module of expert-parallel index 0: with `ep` = 1 the whole model."""
        return self.build_share(0)

    def build_share(self, expert_index: int) -> nn.Module:
        """Return the module with one share of the experts, `experts.<i>.linear` each."""
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
        shape = (2, rows * TOKENS_PER_ROW, self._scenario.model.hidden)
        inputs, targets = torch.randn(shape, generator=generator).to(self._dtype).unbind()
        plant_nan(inputs, scenario=self._scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=inputs, targets=targets, row_count=rows)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared error, in fp32."""
        assert batch.targets is not None
        return functional.mse_loss(module(batch.inputs).float(), batch.targets.float())

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: random targets have no held-out part."""
        return None
