"""Memory with undefined content: one tensor that a collective has as several of its outputs.

[Note: one scratch for several outputs]
A program that needs fewer results than its group has members may pad the list of outputs with one
scratch tensor, several times. NCCL and gloo accept that. Which output is the last to be written is
not defined, so the content of the scratch is not either, until the program overwrites it. Such
memory is poisoned, and the race detector refuses to read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(slots=True, kw_only=True)
class _ByteMap:
    """Undefined bytes of one storage."""

    storage: StorageWeakRef
    """Weak, so that watching memory does not keep it."""
    undefined: np.ndarray
    """1D bool, one element for each byte of the storage."""
    origin: str


class UndefinedMemory:
    """Undefined bytes of a rank's memory; False if there are none."""

    def __init__(self) -> None:
        self._maps: dict[int, _ByteMap] = {}

    def __bool__(self) -> bool:
        if self._maps:
            self._maps = {
                key: each for key, each in self._maps.items() if not each.storage.expired()
            }
        return bool(self._maps)

    def mark(self, tensor: Tensor, *, origin: str) -> None:
        """Note that the content of a tensor is undefined from now on.

        Args:
            tensor: Dense, any strides.
            origin: The output and its call, for messages.
        """
        storage = tensor.untyped_storage()
        known = self._map_of(tensor)
        if known is None:
            undefined = np.zeros(storage.nbytes(), dtype=np.bool_)
            known = _ByteMap(storage=StorageWeakRef(storage), undefined=undefined, origin=origin)
            self._maps[storage._cdata] = known
        known.origin = origin
        _bytes_of(tensor, known.undefined)[...] = True

    def define(self, tensor: Tensor) -> None:
        """Note that a tensor is overwritten."""
        known = self._map_of(tensor)
        if known is not None:
            _bytes_of(tensor, known.undefined)[...] = False
            if not known.undefined.any():
                del self._maps[tensor.untyped_storage()._cdata]

    def origin_of(self, tensor: Tensor) -> str | None:
        """The output and its call that left part of a tensor undefined; None if all is defined."""
        known = self._map_of(tensor)
        if known is None or not _bytes_of(tensor, known.undefined).any():
            return None
        return known.origin

    def clear(self) -> None:
        """Forget all, between two programs."""
        self._maps.clear()

    def _map_of(self, tensor: Tensor) -> _ByteMap | None:
        if not self._maps:
            return None
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # A sparse tensor, for example, has none.
            return None
        known = self._maps.get(storage._cdata)
        # A storage that was resized holds something else.
        if known is None or known.storage.expired() or known.undefined.size != storage.nbytes():
            self._maps.pop(storage._cdata, None)
            return None
        return known


def _bytes_of(tensor: Tensor, bytes_of_storage: np.ndarray) -> np.ndarray:
    """The tensor's elements in an array of one element for each byte of its storage."""
    width = tensor.element_size()
    return np.lib.stride_tricks.as_strided(
        bytes_of_storage[tensor.storage_offset() * width :],
        shape=(*tensor.shape, width),
        strides=(*(stride * width for stride in tensor.stride()), 1),
    )
