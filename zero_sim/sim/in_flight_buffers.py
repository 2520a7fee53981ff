"""Buffers in flight: memory that a rank lent to operations and has not waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zero_sim.sim.callsite import site_of

Role = Literal["input", "output"]
"""Use by the operation. In flight, the program may read inputs, but not write them. It may do
neither with outputs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InFlightBuffer:
    """A tensor that an operation reads or writes until the rank has waited."""

    role: Role
    tensor: Tensor
    what: str
    """The operation, such as `all_gather #3 of group world`."""
    file: str
    line: int
    """Call site of the issue."""
    whole: Tensor | None = None
    """The program's tensor, if `tensor` may be only a part of it."""
    undefined: bool = False
    """True if the operation leaves undefined content; see `UndefinedMemory`."""

    @property
    def site(self) -> str:
        """Call site of the issue, `file:line`."""
        return site_of(self.file, self.line)


class InFlightBuffers:
    """A rank's buffers in flight, in order of issue."""

    def __init__(self) -> None:
        # By id, because tensors make == elementwise.
        self._buffers: dict[int, InFlightBuffer] = {}
        self.changes = 0
        """Number of changes so far, for caches."""
        self.watcher: Callable[[], None] | None = None
        """Called after the first buffer was added, and after the last buffer landed."""
        self.works_with_callbacks: dict[Any, None] = {}
        """Works with callbacks that the rank has not waited for. A dict, to keep their order."""
        self.undefined = UndefinedMemory()
        """Landed outputs with undefined content. Empty without a watcher, because no other code
        sees that the program overwrites them."""

    def __iter__(self) -> Iterator[InFlightBuffer]:
        return iter(self._buffers.values())

    def __len__(self) -> int:
        return len(self._buffers)

    def add(self, buffer: InFlightBuffer) -> None:
        """Note that the buffer's memory is lent from now on."""
        self._buffers[id(buffer)] = buffer
        self.changes += 1
        # The operation overwrites the tensor, so it is no longer undefined.
        if buffer.role == "output":
            self.undefined.define(buffer.tensor)
        if self.watcher is not None and len(self._buffers) == 1:
            self.watcher()

    def land(self, buffer: InFlightBuffer) -> bool:
        """Note that the rank has waited for the buffer. Return False if it was not in flight."""
        if self._buffers.pop(id(buffer), None) is None:
            return False
        self.changes += 1
        if self.watcher is None:
            return True
        # Before the watcher is called, which checks if anything is left to watch.
        if buffer.undefined:
            origin = f"output of {buffer.what}, issued at {buffer.site}"
            self.undefined.mark(buffer.tensor, origin=origin)
        if not self._buffers:
            self.watcher()
        return True

    def clear(self) -> None:
        """Forget everything, between two programs."""
        self._buffers.clear()
        self.works_with_callbacks.clear()
        self.undefined.clear()
        self.changes += 1


@dataclass(slots=True, kw_only=True)
class _ByteMap:
    """A storage's undefined bytes."""

    storage: StorageWeakRef
    """Weak, because it must not keep memory alive."""
    undefined: np.ndarray
    """1D bool, with an element per byte of the storage."""
    origin: str


# [Note: one scratch for several outputs] If a program does not need all members' results, it may
# repeat a scratch tensor in the list of outputs. NCCL and gloo accept that. They write in any
# order, so the scratch's content is undefined until the program overwrites it. It is poisoned, and
# the race detector refuses reads.
class UndefinedMemory:
    """Undefined bytes in a rank's memory. Falsy if there are none.

    See [Note: one scratch for several outputs].
    """

    def __init__(self) -> None:
        self._maps: dict[int, _ByteMap] = {}

    def __bool__(self) -> bool:
        if self._maps:
            # Forget memory that the program has freed.
            self._maps = {
                key: each for key, each in self._maps.items() if not each.storage.expired()
            }
        return bool(self._maps)

    def mark(self, tensor: Tensor, *, origin: str) -> None:
        """Mark a dense tensor as undefined. `origin` names the output and its call."""
        storage = tensor.untyped_storage()
        known = self._map_of(tensor)
        if known is None:
            undefined = np.zeros(storage.nbytes(), dtype=np.bool_)
            known = _ByteMap(storage=StorageWeakRef(storage), undefined=undefined, origin=origin)
            self._maps[storage._cdata] = known
        known.origin = origin
        _bytes_of(tensor, known.undefined)[...] = True

    def define(self, tensor: Tensor) -> None:
        """Mark a tensor as defined, because it was overwritten."""
        known = self._map_of(tensor)
        if known is not None:
            _bytes_of(tensor, known.undefined)[...] = False
            if not known.undefined.any():
                del self._maps[tensor.untyped_storage()._cdata]

    def origin_of(self, tensor: Tensor) -> str | None:
        """Return the origin of undefined content in a tensor; None if it has none."""
        known = self._map_of(tensor)
        if known is None or not _bytes_of(tensor, known.undefined).any():
            return None
        return known.origin

    def clear(self) -> None:
        """Forget everything, between two programs."""
        self._maps.clear()

    def _map_of(self, tensor: Tensor) -> _ByteMap | None:
        if not self._maps:
            return None
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # For example, sparse tensors have no storage.
            return None
        known = self._maps.get(storage._cdata)
        # A resized storage has new content, and a new storage may reuse a dead storage's address.
        if known is None or known.storage.expired() or known.undefined.size != storage.nbytes():
            self._maps.pop(storage._cdata, None)
            return None
        return known


def _bytes_of(tensor: Tensor, bytes_of_storage: np.ndarray) -> np.ndarray:
    """Return a tensor's part, as a view, of an array with an element per byte of its storage."""
    # [*tensor.shape, bytes per element]
    width = tensor.element_size()
    return np.lib.stride_tricks.as_strided(
        bytes_of_storage[tensor.storage_offset() * width :],
        shape=(*tensor.shape, width),
        strides=(*(stride * width for stride in tensor.stride()), 1),
    )
