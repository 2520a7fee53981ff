"""A step buffer: fp32 gradients pass through memory of fixed length, for any model size.

Unscaling, dividing, measuring and clipping need gradients in fp32, which take as much memory as the
masters. With a step buffer, gradients are converted in turns that fit into it (ZeRO, arXiv
1910.02054, section 6.2, C_B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.zero.masters import Master
from zero_sim.zero.norm import measure_grads
from zero_sim.zero.optimizer import AllAtOnce, DistributedOptimizer


class _WithLeaf(Protocol):
    @property
    def leaf(self) -> Tensor: ...


AnyMaster = TypeVar("AnyMaster", bound=_WithLeaf)


class StepBuffer(AllAtOnce):
    """A stepper that converts gradients in turns, each as long as fits into the buffer.

    Args:
        optimizer: Holds the masters to step.
        elems: Buffer length in elements.

    Raises:
        UsageError: If `elems` is not a positive integer.
    """

    def __init__(self, optimizer: DistributedOptimizer, *, elems: int) -> None:
        if type(elems) is not int or elems < 1:
            raise UsageError(f"expected elems to be an integer of at least 1, got {elems!r}.")
        super().__init__(optimizer)
        self.elems = elems
        self._memory: Tensor | None = None  # 1D fp32
        self._used = 0
        self._turns: list[list[Master]] = []

    def measure(self, trained: list[Master]) -> tuple[Tensor, int, bool]:
        """Convert and measure gradients turn by turn; return the totals over all ranks."""
        self._turns = self.turns(trained)
        return self._measure_in_turns(self._turns)

    def step(self, trained: list[Master], *, norm: Tensor) -> None:
        """Convert gradients again and step their masters, turn by turn. Then write all masters."""
        # Convert again, because the norm is known only after the last turn. Each element's
        # computation is the same and sums of squares are fp64, so no bit depends on the turns.
        self._step_in_turns(self._turns, norm=norm)

    def copy(self, reduced: Tensor) -> Tensor:
        """Return an fp32 copy, 1D: in the buffer until the next turn, or separate if too long."""
        # A long fragment cannot be split, because torch's optimizers keep a step count per tensor.
        if reduced.numel() > self.elems:
            return super().copy(reduced)
        if self._memory is None:
            self._memory = torch.empty(
                self.elems, dtype=torch.float32, device=self._optimizer.state_device
            )
        start, self._used = self._used, self._used + reduced.numel()
        # A view into the buffer, 1D fp32, after this turn's earlier gradients.
        return self._memory[start : self._used].copy_(reduced)

    def release(self) -> None:
        """Free the memory after the step."""
        self._memory = None

    def turns(self, masters: Sequence[AnyMaster]) -> list[list[AnyMaster]]:
        """Split masters into turns that fit the buffer; a longer master gets its own turn."""
        made: list[list[AnyMaster]] = []
        # Above the limit, so that the first master opens a turn.
        held = self.elems + 1
        for master in masters:
            elems = master.leaf.numel()
            if held + elems > self.elems:
                made.append([])
                held = 0
            made[-1].append(master)
            held += elems
        return made

    def _measure_in_turns(self, turns: list[list[Master]]) -> tuple[Tensor, int, bool]:
        optimizer = self._optimizer
        measured = measure_grads([], device=optimizer.ddp.buffers[0].device)
        for turn in turns:
            # Squares, zeros and overflows add up over turns, so a single collective follows.
            measured += optimizer._measure_own(turn, self._upcast_turn(turn))
        return optimizer._agree_on(measured)

    def _step_in_turns(self, turns: list[list[Master]], *, norm: Tensor) -> None:
        # Each turn reuses the buffer, so it must drop its gradients.
        optimizer = self._optimizer
        for turn in turns:
            grads = self._upcast_turn(turn)
            optimizer._clip(grads, norm=norm)
            for master, grad in zip(turn, grads, strict=True):
                master.leaf.grad = grad
            # Masters without a gradient are skipped by torch's optimizers.
            optimizer.inner.step()
            for master in turn:
                master.leaf.grad = None
        # Write after all turns, because new fp8 scales need every master.
        optimizer._check_new_state()
        optimizer._write_back([master for turn in turns for master in turn])

    def _upcast_turn(self, turn: list[Master]) -> list[Tensor]:
        self._used = 0
        return [self._optimizer._upcast_grad(master) for master in turn]
