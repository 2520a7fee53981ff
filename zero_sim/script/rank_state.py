"""Process state, besides torch's, that each rank needs for itself.

This is: environment, arguments, working directory, own modules, globals of shared modules, `print`,
logging. When the baton passes, the previous rank's state is saved and the next rank's state is
written.
"""

from __future__ import annotations

import builtins
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_sim.script.rank_local_modules import OwnModules
from zero_sim.script.rank_local_names import OwnNames

# Scripts replace these, for example `print` to silence all ranks but the first.
_SLOTS: tuple[tuple[Any, str], ...] = (
    (sys, "argv"),
    (sys, "path"),
    (sys, "excepthook"),
    (builtins, "print"),
)
# Fields of the root logger.
_LOGGING = ("level", "handlers", "filters", "disabled")


@dataclass(slots=True)
class _Saved:
    slots: list[Any]
    environment: dict[Any, Any]
    logging: list[Any]
    loggers: dict[str, Any]
    folder: str
    # Working directory; empty if it was removed.


class RankState:
    """Process state, exchanged between the process and each rank's saved state.

    Args:
        environment: Returns a rank's variables, which are added to the caller's environment.
        arguments: Initial `sys.argv` of each rank; None for the caller's.
        folder: The script's folder: first on the path, with modules that each rank imports itself.
            None if there is no script.
        packages: Further top-level packages that each rank imports itself.
        names: Rank-local globals of shared modules, as for `OwnNames`.

    Raises:
        UsageError: A package cannot be imported several times in a process.
    """

    def __init__(
        self,
        *,
        environment: Callable[[int], Mapping[str, str]],
        arguments: Sequence[str] | None = None,
        folder: str | None,
        packages: Collection[str] = (),
        names: Sequence[str] = (),
    ) -> None:
        self.current = -1
        """Owner of the current state: a rank, or -1 for `World.run`'s caller."""
        self._environment = environment
        self._arguments = None if arguments is None else list(arguments)
        self._folder = folder
        self._modules = OwnModules(folder=folder, packages=packages)
        self._names = OwnNames(names)
        self._caller = -1
        self._saved: dict[int, _Saved] = {}

    def begin(self, caller: int) -> None:
        """Forget all ranks' state, and save the current state as `caller`'s."""
        self._saved.clear()
        self._caller = caller
        self._saved[caller] = _read()
        self._names.begin(caller)
        self._modules.begin(caller)

    def take_out(self, owner: int) -> None:
        """Save the current state as `owner`'s."""
        self._saved[owner] = _read()
        self._names.take_out(owner)
        self._modules.take_out(owner)

    def put_in_place(self, owner: int, *, previous: int) -> None:
        """Write `owner`'s state. The state of `previous` was saved just before."""
        saved = self._saved.get(owner)
        if saved is None:
            saved = self._saved[owner] = self._beginning(owner)
        # Modules first, because names may be in these modules.
        self._modules.put_in_place(owner)
        self._names.put_in_place(owner)
        _put(saved, before=self._saved[previous])
        self.current = owner

    def owns(self, module: str) -> bool:
        """Return True if a module belongs to the running rank, False if ranks share it."""
        return self._modules.owns(module)

    def forget(self) -> None:
        """Drop all saved state."""
        self._saved.clear()
        self._names.forget()
        self._modules.forget()

    def _beginning(self, rank: int) -> _Saved:
        caller = self._saved[self._caller]
        # Encoded as in `os.environ._data`: bytes on POSIX.
        own = {
            os.environ.encodekey(name): os.environ.encodevalue(value)  # pyrefly: ignore
            for name, value in self._environment(rank).items()
        }
        argv, path, *others = caller.slots
        if self._arguments is not None:
            argv, path = self._arguments, [str(self._folder), *path]
        return _Saved(
            slots=[list(argv), list(path), *others],
            environment={**caller.environment, **own},
            # Python's defaults, as in a new process: ranks do not inherit the caller's handlers.
            logging=[logging.WARNING, [], [], False],
            # A copy of the dict with the same loggers, because libraries hold loggers in globals.
            loggers=dict(caller.loggers),
            folder=caller.folder,
        )


def _read() -> _Saved:
    try:
        folder = os.getcwd()
    # The rank removed its working directory.
    except OSError:
        folder = ""
    root = logging.root
    return _Saved(
        slots=[getattr(place, name) for place, name in _SLOTS],
        # The dict itself, because the cost of a copy grows with the number of variables.
        environment=os.environ._data,  # pyrefly: ignore [missing-attribute]
        logging=[getattr(root, name) for name in _LOGGING],
        loggers=root.manager.loggerDict,
        folder=folder,
    )


def _put(saved: _Saved, *, before: _Saved) -> None:
    for (place, name), value in zip(_SLOTS, saved.slots, strict=True):
        setattr(place, name, value)
    if saved.environment is not before.environment:
        _put_environment(saved.environment, before=before.environment)
    if saved.folder != before.folder and saved.folder:
        os.chdir(saved.folder)
    root = logging.root
    for name, value in zip(_LOGGING, saved.logging, strict=True):
        setattr(root, name, value)
    root.manager.loggerDict = saved.loggers
    if saved.logging[0] != before.logging[0]:
        # Loggers cache enabled levels, which depend on the root's level.
        root.manager._clear_cache()  # pyrefly: ignore [missing-attribute]


def _put_environment(environment: dict[Any, Any], *, before: dict[Any, Any]) -> None:
    os.environ._data = environment  # pyrefly: ignore [missing-attribute]
    if os.supports_bytes_environ:
        os.environb._data = environment  # pyrefly: ignore [missing-attribute]
    # C code, and programs that a rank starts, read the process's real environment.
    for name in before.keys() - environment.keys():
        os.unsetenv(name)
    for name, value in environment.items() - before.items():
        os.putenv(name, value)
