"""State that a process has once and each rank of a script needs for itself, besides torch's.

Its environment, arguments, working directory, own modules, names of shared ones, `print`, logging.
Under the baton the values of the rank that gets it are put in place, and those of whoever had it
are taken out.
"""

from __future__ import annotations

import builtins
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_sim.script.own_modules import OwnModules
from zero_sim.script.own_names import OwnNames

_SLOTS: tuple[tuple[Any, str], ...] = (
    (sys, "argv"),
    (sys, "path"),
    (sys, "excepthook"),
    (builtins, "print"),
)
_LOGGING = ("level", "handlers", "filters", "disabled")
"""Fields of the root logger."""


@dataclass(slots=True)
class _Saved:
    slots: list[Any]
    environment: dict[Any, Any]
    logging: list[Any]
    loggers: dict[str, Any]
    folder: str
    """The working directory; empty where it is gone."""


class RankState:
    """Moves what is a rank's own between one owner at a time and its saved place.

    Args:
        environment: What each rank's environment has besides the caller's, by rank.
        arguments: What `sys.argv` holds at the beginning, of every rank; None for the caller's.
        folder: Of the script: first on its path, and its modules are each rank's own. None for no
            such folder.
        packages: Top-level packages that are each rank's own besides.
        names: Names of shared modules that each rank has a value of, as of `OwnNames`.

    Raises:
        UsageError: A package cannot be a rank's own.
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
        """Whose state is in place: a rank, or -1 for the caller of `World.run`."""
        self._environment = environment
        self._arguments = None if arguments is None else list(arguments)
        self._folder = folder
        self._modules = OwnModules(folder=folder, packages=packages)
        self._names = OwnNames(names)
        self._caller = -1
        self._saved: dict[int, _Saved] = {}

    def begin(self, caller: int) -> None:
        """Forget all ranks, and take out what is in place as `caller`'s."""
        self._saved.clear()
        self._caller = caller
        self._saved[caller] = _read()
        self._names.begin(caller)
        self._modules.begin(caller)

    def take_out(self, owner: int) -> None:
        """Save what is in place as `owner`'s."""
        self._saved[owner] = _read()
        self._names.take_out(owner)
        self._modules.take_out(owner)

    def put_in_place(self, owner: int, *, previous: int) -> None:
        """Make what `owner` has the process's; `previous`'s was taken out just before."""
        saved = self._saved.get(owner)
        if saved is None:
            saved = self._saved[owner] = self._beginning(owner)
        self._modules.put_in_place(owner)
        self._names.put_in_place(owner)
        _put(saved, before=self._saved[previous])
        self.current = owner

    def owns(self, module: str) -> bool:
        """Whether a module is the rank's own that has the baton."""
        return self._modules.owns(module)

    def forget(self) -> None:
        """Let go of everything that ranks had."""
        self._saved.clear()
        self._names.forget()
        self._modules.forget()

    def _beginning(self, rank: int) -> _Saved:
        caller = self._saved[self._caller]
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
            # As in a new process.
            logging=[logging.WARNING, [], [], False],
            loggers=dict(caller.loggers),
            folder=caller.folder,
        )


def _read() -> _Saved:
    try:
        folder = os.getcwd()
    except OSError:
        folder = ""
    root = logging.root
    return _Saved(
        slots=[getattr(place, name) for place, name in _SLOTS],
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
        # Loggers keep what they found by the level of the other.
        root.manager._clear_cache()  # pyrefly: ignore [missing-attribute]


def _put_environment(environment: dict[Any, Any], *, before: dict[Any, Any]) -> None:
    os.environ._data = environment  # pyrefly: ignore [missing-attribute]
    if os.supports_bytes_environ:
        os.environb._data = environment  # pyrefly: ignore [missing-attribute]
    # What C code and other programs that a rank starts see.
    for name in before.keys() - environment.keys():
        os.unsetenv(name)
    for name, value in environment.items() - before.items():
        os.putenv(name, value)
