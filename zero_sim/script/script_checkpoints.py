"""Named points of a training script, at which its runs are compared."""

from __future__ import annotations

import sys
import threading
from typing import Protocol


class Recorder(Protocol):
    """Recorder of the named points that one rank reaches."""

    def note(self, name: str, things: tuple[object, ...], *, file: str, line: int) -> None:
        """Record a rank's values at a point.

        Args:
            name: Name of the point.
            things: Modules, optimizers, tensors, and dicts, lists and tuples of these.
            file: File of the call.
            line: Line of the call.
        """
        ...


class _Here(threading.local):
    # Per thread, because each rank is a thread with its own recorder.
    recorder: Recorder | None = None


_here = _Here()


def checkpoint_here(name: str, *things: object) -> None:
    """Name a point of a training script, at which its runs must agree bit by bit.

    Under `zero-sim torchrun --runs N` every tensor of the arguments is hashed on every rank, and
    the first one that differs between runs is reported. Otherwise this does nothing.

    Args:
        name: Name of the point in reports. A run may reach it many times.
        things: Modules, with their gradients; optimizers; tensors; numbers; and dicts, lists and
            tuples of these.

    Example:
        >>> from zero_sim import checkpoint_here
        >>> checkpoint_here("after step")
    """
    recorder = _here.recorder
    if recorder is None:
        return
    # After the early return, so that a script without a recorder pays for one lookup only.
    caller = sys._getframe(1)
    recorder.note(name, things, file=caller.f_code.co_filename, line=caller.f_lineno)


def record_with(recorder: Recorder | None) -> None:
    """Set the recorder of the points that the calling thread reaches from now on."""
    _here.recorder = recorder
