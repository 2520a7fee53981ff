"""Named points of a training script, where its runs are compared."""

from __future__ import annotations

import sys
import threading
from typing import Protocol


class Recorder(Protocol):
    """Recorder of a rank's visits to named points."""

    def note(self, name: str, things: tuple[object, ...], *, file: str, line: int) -> None:
        """Record a visit.

        Args:
            name: Name of the point.
            things: Values, as for `checkpoint_here`.
            file: File of the call.
            line: Line of the call.
        """
        ...


class _Here(threading.local):
    # Thread-local, because each rank is a thread with its own recorder.
    recorder: Recorder | None = None


_here = _Here()


def checkpoint_here(name: str, *things: object) -> None:
    """Name a point of a training script where runs must agree bit by bit.

    Under `zero-sim torchrun --runs N`, each rank hashes every tensor in the arguments, and the
    first tensor that differs between runs is reported. Otherwise this does nothing.

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
    # After the early return, so that a script without a recorder only pays for a lookup.
    caller = sys._getframe(1)
    recorder.note(name, things, file=caller.f_code.co_filename, line=caller.f_lineno)


def record_with(recorder: Recorder | None) -> None:
    """Set the calling thread's recorder; None to record nothing."""
    _here.recorder = recorder
