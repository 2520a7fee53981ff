"""Buffers in flight: memory that a rank has lent to operations it has not waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zero_sim.sim.callsite import site_of

Role = Literal["input", "output"]
"""Use by the operation. In flight, the program may read an input, but not write it. An output
allows neither."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InFlightBuffer:
    """One tensor that an operation reads or writes until the rank has waited for it."""

    role: Role
    tensor: Tensor
    what: str
    """The operation, as in `all_gather #3 of group world`."""
    file: str
    line: int
    """Call site of the issue."""
    whole: Tensor | None = None
    """The whole tensor given to the operation, if `tensor` may be a part of it."""
    undefined: bool = False
    """True if the operation leaves undefined content; see `UndefinedMemory`."""

    @property
    def site(self) -> str:
        """Call site of the issue, `file:line`."""
        return site_of(self.file, self.line)


class InFlightBuffers:
    """One rank's buffers in flight, in the order of issue."""

    def __init__(self) -> None:
        # By id: tensors inside make == elementwise.
        self._buffers: dict[int, InFlightBuffer] = {}
        self.changes = 0
        """Number of changes so far. Caches of the content compare it."""
        self.watcher: Callable[[], None] | None = None
        """Called after the first buffer was added and after the last one landed."""
        self.works_with_callbacks: dict[Any, None] = {}
        """Works with callbacks that the rank has not waited for. A dict, to keep their order."""
        self.undefined = UndefinedMemory()
        """Landed outputs with undefined content. Empty without a watcher, because nothing would
        notice that the program overwrites them."""

    def __iter__(self) -> Iterator[InFlightBuffer]:
        return iter(self._buffers.values())

    def __len__(self) -> int:
        return len(self._buffers)

    def add(self, buffer: InFlightBuffer) -> None:
        """Note that the buffer's memory is lent from now on."""
        self._buffers[id(buffer)] = buffer
        self.changes += 1
        # The operation overwrites the tensor, so old undefined content is gone.
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
        # Mark before the watcher is called: it decides if anything is left to watch.
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
    """Undefined bytes of one storage."""

    storage: StorageWeakRef
    """Weak, so that watching memory does not keep it alive."""
    undefined: np.ndarray
    """1D bool, one element per byte of the storage."""
    origin: str


# [Note: one scratch for several outputs] A program that needs fewer results than its group has
# members may repeat one scratch tensor in the list of outputs. NCCL and gloo accept that. The order
# of their writes is undefined, and so is the scratch's content until the program overwrites it.
# Such memory is poisoned, and the race detector refuses reads of it.
class UndefinedMemory:
    """Undefined bytes of a rank's memory. Falsy if there are none.

    See [Note: one scratch for several outputs].
    """

    def __init__(self) -> None:
        self._maps: dict[int, _ByteMap] = {}

    def __bool__(self) -> bool:
        if self._maps:
            # Memory that the program has freed needs no watching.
            self._maps = {
                key: each for key, each in self._maps.items() if not each.storage.expired()
            }
        return bool(self._maps)

    def mark(self, tensor: Tensor, *, origin: str) -> None:
        """Note that a tensor's content is undefined from now on.

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
        """Note that a tensor was overwritten."""
        known = self._map_of(tensor)
        if known is not None:
            _bytes_of(tensor, known.undefined)[...] = False
            if not known.undefined.any():
                del self._maps[tensor.untyped_storage()._cdata]

    def origin_of(self, tensor: Tensor) -> str | None:
        """Return the output and call that left a part of the tensor undefined, or None."""
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
        except RuntimeError:  # Sparse tensors, for example, have no storage.
            return None
        known = self._maps.get(storage._cdata)
        # A resized storage has new content, and an address can be reused after its storage died.
        if known is None or known.storage.expired() or known.undefined.size != storage.nbytes():
            self._maps.pop(storage._cdata, None)
            return None
        return known


def _bytes_of(tensor: Tensor, bytes_of_storage: np.ndarray) -> np.ndarray:
    """Return a tensor's elements in an array with one element per byte of its storage.

    Shape [*tensor.shape, bytes per element]; a view.
    """
    width = tensor.element_size()
    return np.lib.stride_tricks.as_strided(
        bytes_of_storage[tensor.storage_offset() * width :],
        shape=(*tensor.shape, width),
        strides=(*(stride * width for stride in tensor.stride()), 1),
    )
