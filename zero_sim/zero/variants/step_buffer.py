"""A step buffer: fp32 gradients pass through memory of fixed length, for any model size.

Unscaling, dividing, measuring and clipping need a rank's gradients in fp32, as large as its
masters. With a step buffer, only as many as fit are converted at a time (ZeRO, arXiv 1910.02054,
section 6.2, C_B).
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
    """A stepper that converts gradients in turns, as many as fit into memory of fixed length.

    Args:
        optimizer: The optimizer of the masters.
        elems: Length of the memory.

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
        """Convert gradients again, turn by turn, step their masters, then write all of them."""
        # A second conversion, because the norm is known only after the last turn. Each element's
        # computation is the same and sums of squares are fp64, so no bit depends on the turns.
        self._step_in_turns(self._turns, norm=norm)

    def copy(self, reduced: Tensor) -> Tensor:
        """Return an fp32 copy, 1D: in the buffer until the next turn, or its own if longer."""
        # A longer fragment cannot be split: torch's optimizers keep a step count per tensor.
        if reduced.numel() > self.elems:
            return super().copy(reduced)
        if self._memory is None:
            self._memory = torch.empty(
                self.elems, dtype=torch.float32, device=self._optimizer.state_device
            )
        start, self._used = self._used, self._used + reduced.numel()
        # A view of the buffer, 1D fp32, after the gradients of this turn so far.
        return self._memory[start : self._used].copy_(reduced)

    def release(self) -> None:
        """Free the memory after the step."""
        self._memory = None

    def turns(self, masters: Sequence[AnyMaster]) -> list[list[AnyMaster]]:
        """Split masters into turns. Each turn fits the buffer, or is a single longer master."""
        made: list[list[AnyMaster]] = []
        # Over the limit, so that the first master opens a turn.
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
            # Sums of squares, counts and overflows add up over turns; one agreement over ranks
            # follows.
            measured += optimizer._measure_own(turn, self._upcast_turn(turn))
        return optimizer._agree_on(measured)

    def _step_in_turns(self, turns: list[list[Master]], *, norm: Tensor) -> None:
        # Each turn reuses the buffer, so gradients must be dropped before the next one.
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
        # One write for all turns, because new fp8 scales need every master.
        optimizer._check_new_state()
        optimizer._write_back([master for turn in turns for master in turn])

    def _upcast_turn(self, turn: list[Master]) -> list[Tensor]:
        self._used = 0
        return [self._optimizer._upcast_grad(master) for master in turn]
