"""A step buffer: fp32 gradients pass through memory of one length, whatever the model's size.

Unscaling, dividing, measuring and clipping take a rank's gradients as fp32, as many bytes as its
masters have. Through a step buffer go only as many at a time as fit (ZeRO, arXiv 1910.02054,
section 6.2, C_B): they are made once to be measured, and once more to be stepped, as the norm is
known only behind the last. An element's computation is the same, and sums of squares are fp64, so
that no bit depends on the turns. A part of a param that is longer than the buffer goes by itself,
in memory of its own: torch's optimizers keep a count for each tensor, which cannot be cut.
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
    """A stepper whose gradients pass through memory of one length, as many at a time as fit.

    Args:
        optimizer: Whose masters are stepped.
        elems: Length of the memory.

    Raises:
        UsageError: If it has no such length.
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
        """Make gradients turn by turn, and return what all of them have together."""
        self._turns = self.turns(trained)
        return self._measure_in_turns(self._turns)

    def step(self, trained: list[Master], *, norm: Tensor) -> None:
        """Make gradients anew, as many at a time as fit, and step their masters; then write all."""
        self._step_in_turns(self._turns, norm=norm)

    def copy(self, reduced: Tensor) -> Tensor:
        """Return a copy as fp32, 1D: in the buffer until the next turn, or of its own if longer."""
        if reduced.numel() > self.elems:
            return super().copy(reduced)
        if self._memory is None:
            self._memory = torch.empty(
                self.elems, dtype=torch.float32, device=self._optimizer.state_device
            )
        start, self._used = self._used, self._used + reduced.numel()
        return self._memory[start : self._used].copy_(reduced)

    def release(self) -> None:
        """Let go of the memory, behind the step."""
        self._memory = None

    def turns(self, masters: Sequence[AnyMaster]) -> list[list[AnyMaster]]:
        """Cut masters into turns, each of which fits, or is one that does not."""
        made: list[list[AnyMaster]] = []
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
            measured += optimizer._measure_own(turn, self._upcast_turn(turn))
        return optimizer._agree_on(measured)

    def _step_in_turns(self, turns: list[list[Master]], *, norm: Tensor) -> None:
        optimizer = self._optimizer
        for turn in turns:
            grads = self._upcast_turn(turn)
            optimizer._clip(grads, norm=norm)
            for master, grad in zip(turn, grads, strict=True):
                master.leaf.grad = grad
            optimizer.inner.step()
            for master in turn:
                master.leaf.grad = None
        optimizer._check_new_state()
        optimizer._write_back([master for turn in turns for master in turn])

    def _upcast_turn(self, turn: list[Master]) -> list[Tensor]:
        self._used = 0
        return [self._optimizer._upcast_grad(master) for master in turn]
