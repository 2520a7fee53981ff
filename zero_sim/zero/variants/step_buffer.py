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


class _WithLeaf(Protocol):
    @property
    def leaf(self) -> Tensor: ...


AnyMaster = TypeVar("AnyMaster", bound=_WithLeaf)


class StepBuffer:
    """The memory that gradients pass through in a step.

    Args:
        elems: Its length.
        device: Where it lies.
    """

    def __init__(self, elems: int, *, device: torch.device) -> None:
        self.elems = elems
        self._device = device
        self._memory: Tensor | None = None  # 1D fp32
        self._used = 0

    def begin_turn(self) -> None:
        """Forget what is in it."""
        self._used = 0

    def copy(self, grad: Tensor) -> Tensor:
        """Return a copy as fp32, 1D: in the buffer until the next turn, or of its own if longer."""
        if grad.numel() > self.elems:
            return grad.to(self._device, torch.float32, copy=True)
        if self._memory is None:
            self._memory = torch.empty(self.elems, dtype=torch.float32, device=self._device)
        start, self._used = self._used, self._used + grad.numel()
        return self._memory[start : self._used].copy_(grad)

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
