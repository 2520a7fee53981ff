"""A process object packed for a rank. As in a new process, the rank gets its own copy.

Objects that processes share, such as queues, locks and pipes, are not copied.
"""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
from collections.abc import Callable
from multiprocessing import context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import Any

import torch

from zero_sim.script.rank_local_names import copied

_SHARED = (ctypes.Array, ctypes.Structure, ctypes._SimpleCData)


class Parcel:
    """A process object, packed in the thread that starts the process.

    Args:
        process: The process, before its start.
        is_forked: True if the start method is fork. Then the process inherits all variables.
        main: The starter's `__main__`; None if ranks share all modules.

    Raises:
        Exception: The process cannot be pickled and is not forked.
    """

    def __init__(
        self, process: BaseProcess, *, is_forked: bool, main: ModuleType | None = None
    ) -> None:
        self._kept: list[Any] = []
        self._bytes: bytes | None = None
        self._process = copy.copy(process)
        self._variables: dict[str, Any] = {}
        # Globals of the starter's functions. Copies of these functions use the rank's own globals.
        self._space: dict[str, Any] = {}
        if is_forked and main is not None:
            self._variables = {name: copied(value) for name, value in vars(main).items()}
            self._space = vars(main)
        buffer = io.BytesIO()
        before = context.get_spawning_popen()
        # multiprocessing's queues and locks can be pickled only while a process starts.
        context.set_spawning_popen(self)  # pyrefly: ignore [bad-argument-type]
        try:
            _Pickler(buffer, self._keep).dump(process)
        except Exception:
            if not is_forked:
                raise
            # A fork also inherits objects that cannot be pickled, such as a lambda. Then ranks
            # share all objects that the process refers to.
        else:
            self._bytes = buffer.getvalue()
        finally:
            context.set_spawning_popen(before)

    def unpack(self, main: ModuleType | None = None) -> BaseProcess:
        """Return the calling rank's own copy of the process.

        Args:
            main: The rank's `__main__` after executing the script's file. Variables that a fork
                would inherit are added to it.
        """
        if main is not None:
            space = vars(main)
            # Only names that the file did not define when it was executed, such as names in `if
            # __name__` blocks.
            for name in self._variables.keys() - space.keys():
                space[name] = self._with_globals(self._variables[name], space)
        if self._bytes is None:
            return self._process
        return _Unpickler(io.BytesIO(self._bytes), self._kept).load()

    def _with_globals(self, value: Any, space: dict[str, Any]) -> Any:
        # Imported functions keep their modules' globals.
        if not isinstance(value, FunctionType) or value.__globals__ is not self._space:
            return value
        own = FunctionType(
            value.__code__, space, value.__name__, value.__defaults__, value.__closure__
        )
        own.__kwdefaults__, own.__dict__ = value.__kwdefaults__, dict(vars(value))
        return own

    def _keep(self, value: Any) -> int | None:
        """Keep a shared object and return its number; None for an object to copy."""
        if not _is_shared(value):
            return None
        if isinstance(value, Connection):
            # Duplicated, because the starter may close its end before the rank runs.
            value = _duplicate(value)
        self._kept.append(value)
        return len(self._kept) - 1


def _is_shared(value: Any) -> bool:
    # Processes share tensors' storage too (torch.multiprocessing).
    if isinstance(value, (torch.Tensor, *_SHARED)):
        return True
    if isinstance(value, (BaseProcess, bytes, type)):
        # Copied. Multiprocessing's authentication key is a subclass of bytes.
        return False
    return any(each.__module__.startswith("multiprocessing.") for each in type(value).__mro__)


def _duplicate(value: Connection) -> Connection:
    return Connection(os.dup(value.fileno()), readable=value.readable, writable=value.writable)


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO, keep: Callable[[Any], int | None]) -> None:
        super().__init__(file)
        self._keep = keep
        self._numbers: dict[int, int] = {}
        # References to the objects whose ids are in `_numbers`, so that no id is reused.
        self._alive: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:  # pyrefly: ignore [bad-override]
        """Return the number of a shared object; None to pickle it."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._keep(value)
            if number is not None:
                self._numbers[id(value)] = number
                self._alive.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept
        self._loaded: dict[int, Any] = {}

    def persistent_load(self, number: int) -> Any:
        """Return a shared object. A tensor shares its storage, but not its gradient."""
        if number not in self._loaded:
            value = self._kept[number]
            if isinstance(value, torch.nn.Parameter):
                value = torch.nn.Parameter(value.detach(), requires_grad=value.requires_grad)
            elif isinstance(value, torch.Tensor):
                value = value.detach().requires_grad_(value.requires_grad)
            self._loaded[number] = value
        return self._loaded[number]
