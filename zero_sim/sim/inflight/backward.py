"""Backwards of a thread: who listens to their begin; torch's private names for it live here.

[Note: modes in a backward]
torch's engine notes the modes of the thread when a backward begins, and sets them anew for every
node. A mode that a hook pushes is gone after the hook's node, so that who must see all of a
backward in which something may be lent has to be there before it begins. All backwards that Python
begins go through one object of torch's, which is replaced while somebody listens.

[Note: what a backward leaves behind]
Where a node raises, those that were ready stay in a queue of the thread, with all that they saved.
The next backward of the thread drops them. Without one they live until the thread's C++ locals are
destroyed, which is after Python has joined it: hooks of theirs then want the interpreter, and where
that is being finalized, the process aborts.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable


class Listener(Protocol):
    """Who wants to know of the backwards of its thread."""

    def in_backward(self) -> AbstractContextManager[object]:
        """The context in which one is to run."""
        ...


class _Listening(threading.local):
    listener: Listener | None = None


class _Engine(_ImperativeEngine):
    """torch's engine, which runs the backward of a thread that is listened to in a context."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        listener = _listening.listener
        if listener is None:
            return super().run_backward(*args, **kwargs)
        with listener.in_backward():
            return super().run_backward(*args, **kwargs)


_listening = _Listening()
_engine = _Engine()
_lock = threading.Lock()
_count = 0
_originals: list[Any] = []


def listen(listener: Listener) -> None:
    """Run every backward that the calling thread begins in a context of the listener's."""
    global _count
    with _lock:
        _count += 1
        if _count == 1:
            _originals.append(Variable._execution_engine)
            Variable._execution_engine = _engine
    _listening.listener = listener


def stop_listening() -> None:
    """Undo `listen`; the last one gives torch its own engine back."""
    global _count
    _listening.listener = None
    with _lock:
        _count -= 1
        if not _count:
            Variable._execution_engine = _originals.pop()


def drop_unfinished() -> None:
    """Let go of what a backward left in the thread; see [Note: what a backward leaves behind]."""
    # A thread that made no node ran no backward; its first one takes ten times as long as others.
    if not torch.autograd._get_sequence_nr():
        return
    with torch.enable_grad():
        # Of a clone nothing is saved, which hooks could hear of.
        torch.zeros((), device="cpu", dtype=torch.float32, requires_grad=True).clone().backward()
