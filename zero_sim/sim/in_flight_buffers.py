"""Buffers in flight: the memory that a rank has given to operations it has not waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from zero_sim.sim.callsite import site_of
from zero_sim.sim.undefined import UndefinedMemory

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
    """True if what the operation leaves in it is undefined; see `zero_sim.sim.undefined`."""

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
