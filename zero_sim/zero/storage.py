"""Storage for a unit's unsharded memory: resident, or allocated only during use.

[Note: addresses]
A weight's address modulo the vector width can change the bits of a product. torch aligns each
allocation to 64 bytes. So a param in transient memory has the same address modulo 64 each time: it
follows from the layout alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Storage(Protocol):
    """A unit's unsharded params or gradients."""

    stays: bool
    """True if the memory is always resident."""

    @property
    def whole(self) -> Tensor | None:
        """All elements with padding, 1D; None if not allocated."""

    def acquire(self) -> Tensor:
        """Allocate the memory unless it exists, and return it."""

    def release(self) -> None:
        """Free the memory, unless it is resident."""


class FlatStorage:
    """A part of a resident flat buffer.

    Args:
        view: 1D, the unit's part.
    """

    stays = True

    def __init__(self, view: Tensor) -> None:
        self._view = view

    @property
    def whole(self) -> Tensor:
        """All elements with padding, 1D."""
        return self._view

    def acquire(self) -> Tensor:
        """Return the memory, which always exists."""
        return self._view

    def release(self) -> None:
        """Do nothing, because the memory is resident."""


class TransientStorage:
    """Memory allocated only during use: the saving of stages 2 and 3.

    `release` only drops a reference. Remaining views, such as autograd's, stay valid and keep their
    values.

    Args:
        elems: Number of elements with padding.
        dtype: Their dtype.
        device: Their device.
        zeroed: True to start with zeros, as gradients need because they accumulate.
    """

    stays = False

    def __init__(
        self, elems: int, *, dtype: torch.dtype, device: torch.device, zeroed: bool
    ) -> None:
        self._elems = elems
        self._dtype = dtype
        self._device = device
        # torch.empty for params, because a gather overwrites all of them.
        self._make = torch.zeros if zeroed else torch.empty
        self._whole: Tensor | None = None

    @property
    def whole(self) -> Tensor | None:
        """All elements with padding, 1D; None between a release and the next use."""
        return self._whole

    def acquire(self) -> Tensor:
        """Allocate new memory unless it exists; see [Note: addresses]."""
        if self._whole is None:
            self._whole = self._make(self._elems, dtype=self._dtype, device=self._device)
        return self._whole

    def release(self) -> None:
        """Drop the reference."""
        self._whole = None
