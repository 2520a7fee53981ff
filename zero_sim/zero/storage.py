"""Storage of a unit's whole memory: kept for good, or there only while somebody uses it.

[Note: addresses]
The address of a weight modulo the width of a vector can change the bits of a product. torch puts
every allocation of its own at a multiple of 64 bytes, so that memory which comes and goes has
params at the same addresses modulo 64 each time: they follow from the layout alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Storage(Protocol):
    """The whole memory of one unit, of params or of gradients."""

    stays: bool
    """True if it is there for good, whoever uses it."""

    @property
    def whole(self) -> Tensor | None:
        """1D, all elements of the unit with its padding; None while it is not there."""

    def acquire(self) -> Tensor:
        """Make sure that it is there, and return it."""

    def release(self) -> None:
        """Let go of it, if it does not stay for good."""


class FlatStorage:
    """A part of a flat buffer that stays: stages 0 and 1.

    Args:
        view: 1D, the unit's part of the buffer.
    """

    stays = True

    def __init__(self, view: Tensor) -> None:
        self._view = view

    @property
    def whole(self) -> Tensor:
        """The part of the buffer."""
        return self._view

    def acquire(self) -> Tensor:
        """It is there."""
        return self._view

    def release(self) -> None:
        """It stays."""


class TransientStorage:
    """Memory of its own that is there only while it is used: what stages 2 and 3 save.

    Releasing drops this rank's reference, and writes to nothing: whoever still has a view, such as
    autograd, keeps what it saw.

    Args:
        elems: Elements of the unit with its padding.
        dtype: Their dtype.
        device: Where they lie.
        zeroed: Whether it begins as zeros, as gradients that are added to; params are all written.
    """

    stays = False

    def __init__(
        self, elems: int, *, dtype: torch.dtype, device: torch.device, zeroed: bool
    ) -> None:
        self._elems = elems
        self._dtype = dtype
        self._device = device
        self._make = torch.zeros if zeroed else torch.empty
        self._whole: Tensor | None = None

    @property
    def whole(self) -> Tensor | None:
        """All elements, or None between a release and the next use."""
        return self._whole

    def acquire(self) -> Tensor:
        """Make new memory unless it is there; see [Note: addresses]."""
        if self._whole is None:
            self._whole = self._make(self._elems, dtype=self._dtype, device=self._device)
        return self._whole

    def release(self) -> None:
        """Drop it."""
        self._whole = None
