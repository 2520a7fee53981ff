"""Buffers in flight: the memory that a rank has given to operations it has not waited for.

[Note: one scratch for several outputs]
A program that needs fewer results than its group has members may pad the list of outputs with one
scratch tensor, several times. NCCL and gloo accept that. Which output is the last to be written is
not defined, so the content of the scratch is not either, until the program overwrites it. Such
memory is poisoned, and the race detector refuses to read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zero_sim.sim.callsite import site_of

Role = Literal["input", "output"]
"""An input may still be read by the program, but not written; an output neither."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InFlightBuffer:
    """One tensor that an operation reads or writes until its rank has waited for it."""

    role: Role
    tensor: Tensor
    what: str
    """The operation, as in `all_gather #3 of group world`."""
    file: str
    line: int
    """Where it was issued."""
    whole: Tensor | None = None
    """The tensor that the operation was given, where `tensor` may be only a part of it."""
    undefined: bool = False
    """True if what the operation leaves in it is undefined; see `UndefinedMemory`."""

    @property
    def site(self) -> str:
        """Where it was issued, `file:line`."""
        return site_of(self.file, self.line)


class InFlightBuffers:
    """The rank's buffers in flight, in the order of their issue."""

    def __init__(self) -> None:
        self._buffers: dict[int, InFlightBuffer] = {}
        self.changes = 0
        """How often what is in flight has changed."""
        self.watcher: Callable[[], None] | None = None
        """Called when the first one takes off and when the last one has landed."""
        self.works_with_callbacks: dict[Any, None] = {}
        """Works that the rank has not waited for and whose futures have callbacks."""
        self.undefined = UndefinedMemory()
        """Landed outputs with undefined content. Empty without a watcher, since nobody would note
        that the program overwrites them."""

    def __iter__(self) -> Iterator[InFlightBuffer]:
        return iter(self._buffers.values())

    def __len__(self) -> int:
        return len(self._buffers)

    def add(self, buffer: InFlightBuffer) -> None:
        """Note that its memory is lent from now on."""
        self._buffers[id(buffer)] = buffer
        self.changes += 1
        if buffer.role == "output":
            self.undefined.define(buffer.tensor)
        if self.watcher is not None and len(self._buffers) == 1:
            self.watcher()

    def land(self, buffer: InFlightBuffer) -> bool:
        """Note that its rank has waited for it; return False if it was not in flight."""
        if self._buffers.pop(id(buffer), None) is None:
            return False
        self.changes += 1
        if self.watcher is None:
            return True
        if buffer.undefined:
            origin = f"output of {buffer.what}, issued at {buffer.site}"
            self.undefined.mark(buffer.tensor, origin=origin)
        if not self._buffers:
            self.watcher()
        return True

    def clear(self) -> None:
        """Forget all, between two programs."""
        self._buffers.clear()
        self.works_with_callbacks.clear()
        self.undefined.clear()
        self.changes += 1


@dataclass(slots=True, kw_only=True)
class _ByteMap:
    """Undefined bytes of one storage."""

    storage: StorageWeakRef
    """Weak, so that watching memory does not keep it."""
    undefined: np.ndarray
    """1D bool, one element for each byte of the storage."""
    origin: str


class UndefinedMemory:
    """Undefined bytes of a rank's memory; False if there are none.

    See [Note: one scratch for several outputs].
    """

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
