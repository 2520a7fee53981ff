"""Hooks around the backwards of a thread. torch's private names for them are used only here."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable


class Listener(Protocol):
    """Receiver of the backwards of its thread."""

    def in_backward(self) -> AbstractContextManager[object]:
        """Return the context for one backward."""
        ...


class _Listening(threading.local):
    listener: Listener | None = None


# [Note: modes in a backward] When a backward begins, torch's engine saves the thread's modes, and
# restores them for every node. A mode that a hook pushes is gone after the hook's node. So a mode
# that must see a whole backward, in which memory may be lent, must be pushed before it begins. All
# backwards from Python go through one object of torch, which is replaced while a listener exists.
class _Engine(_ImperativeEngine):
    """torch's engine, which runs a listener's backwards in its context."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        listener = _listening.listener
        if listener is None:
            return super().run_backward(*args, **kwargs)
        with listener.in_backward():
            return super().run_backward(*args, **kwargs)


_listening = _Listening()
_engine = _Engine()
_lock = threading.Lock()
# Number of listeners in all threads; `_lock` guards it and the replacement.
_count = 0
_originals: list[Any] = []


def listen(listener: Listener) -> None:
    """Run every later backward of the calling thread in a context of the listener."""
    global _count
    with _lock:
        _count += 1
        if _count == 1:
            _originals.append(Variable._execution_engine)
            Variable._execution_engine = _engine
    _listening.listener = listener


def stop_listening() -> None:
    """Undo `listen`. The last call restores torch's own engine."""
    global _count
    _listening.listener = None
    with _lock:
        _count -= 1
        if not _count:
            Variable._execution_engine = _originals.pop()


# [Note: leftovers of a backward] If a node raises, ready nodes stay in a queue of the thread with
# all their saved tensors. The thread's next backward drops them. Without one, they live until the
# thread's C++ locals are destroyed, after Python has joined the thread. Their hooks then need the
# interpreter, so if it is being finalized, the process aborts.
def drop_unfinished() -> None:
    """Drop what a backward left in the thread; see [Note: leftovers of a backward]."""
    # Skip threads without nodes, which ran no backward: a first backward takes ten times as long.
    if not torch.autograd._get_sequence_nr():
        return
    with torch.enable_grad():
        # A clone saves no tensors, so no saved-tensor hook sees it.
        torch.zeros((), device="cpu", dtype=torch.float32, requires_grad=True).clone().backward()
