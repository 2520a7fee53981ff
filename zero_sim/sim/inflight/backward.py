"""Hooks around a thread's backwards. torch's private names for them stay in here."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable


class Listener(Protocol):
    """Provides a context for each backward in its thread."""

    def in_backward(self) -> AbstractContextManager[object]:
        """Return the context for a backward."""
        ...


class _Listening(threading.local):
    listener: Listener | None = None


# [Note: modes in a backward] When a backward begins, torch's engine saves the thread's modes, and
# it restores them for every node. If a hook pushes a mode, it is gone after the hook's node. A hook
# may lend memory, so a mode that must see the whole backward is pushed before the backward begins.
# All backwards from Python go through a single engine object, which is replaced while a listener
# exists.
class _Engine(_ImperativeEngine):
    """torch's engine, with the listener's context around each backward."""

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
    """Run every later backward of the calling thread in the listener's context."""
    global _count
    with _lock:
        _count += 1
        if _count == 1:
            _originals.append(Variable._execution_engine)
            Variable._execution_engine = _engine
    _listening.listener = listener


def stop_listening() -> None:
    """Undo `listen`. The last listener's call restores torch's engine."""
    global _count
    _listening.listener = None
    with _lock:
        _count -= 1
        if not _count:
            Variable._execution_engine = _originals.pop()


# [Note: leftovers of a backward] If a node raises, ready nodes stay in a queue of the thread, with
# all their saved tensors, until the thread's next backward. Without a next backward, they stay
# until the thread's C++ locals are destroyed, after Python has joined the thread. Then their hooks
# need the interpreter, so if it is being finalized, the process aborts.
def drop_unfinished() -> None:
    """Drop nodes that a failed backward left; see [Note: leftovers of a backward]."""
    # Skip threads that made no node, because a thread's first backward takes ten times as long.
    if not torch.autograd._get_sequence_nr():
        return
    with torch.enable_grad():
        # A clone saves no tensors, so no saved-tensor hook sees it.
        torch.zeros((), device="cpu", dtype=torch.float32, requires_grad=True).clone().backward()
