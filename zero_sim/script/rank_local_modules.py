"""A script's own modules. Each rank imports them itself, so it has its own globals.

All other modules are shared. Python's import uses the dict `sys.modules` directly, and this dict
cannot be thread-local. So the entries of own modules are exchanged when the baton passes.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
import sysconfig
from collections.abc import Collection
from importlib.machinery import PathFinder
from pathlib import PurePath
from types import ModuleType
from typing import Any

from zero_sim.errors import UsageError
from zero_sim.scenario.suggest import did_you_mean

SHARED = frozenset({"numpy", "torch", "zero_sim"})
"""Packages that all ranks share, because they cannot be imported twice in a process."""
# Packages in a virtual environment inside the script's folder are not the script's own.
_INSTALLED = frozenset({"dist-packages", "site-packages"})
# In a new process, multiprocessing imports the main module under the second name.
_MAINS = ("__main__", "__mp_main__")
_STDLIB = os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "")

# Import locks. Threads own these, so they are exchanged too: if a rank waits during an import,
# other ranks must still be able to import their own copies.
_locks: dict[str, Any] = importlib._bootstrap._module_locks  # pyrefly: ignore


def check_found(packages: Collection[str], *, folder: str | None = None) -> None:
    """Check that packages can be imported.

    Args:
        packages: Names of top-level packages.
        folder: Folder to search before Python's path.

    Raises:
        UsageError: A package cannot be found.
    """
    path = [*([] if folder is None else [folder]), *sys.path]
    for name in packages:
        # find_spec also finds editable installs with a finder instead of a path entry.
        if PathFinder.find_spec(name, path) is None and (
            name not in sys.modules and importlib.util.find_spec(name) is None
        ):
            known = [module.name for module in pkgutil.iter_modules(path)]
            raise UsageError(
                f"expected a top-level package that can be imported, got {name!r}."
                f"{did_you_mean(name, known)} Check the name, and that it is installed."
            )


class OwnModules:
    """Rank-local modules, moved in and out of `sys.modules` for one rank at a time.

    Args:
        folder: The script's folder. Modules below it are own modules, except packages installed
            there. None if there is no script.
        packages: Further top-level packages that each rank imports itself.

    Raises:
        UsageError: A package cannot be imported several times in a process.
    """

    def __init__(self, *, folder: str | None, packages: Collection[str] = ()) -> None:
        for name in packages:
            if name in SHARED or name in sys.builtin_module_names or not name.isidentifier():
                raise UsageError(
                    f"expected own modules to be top-level Python packages, got {name!r}. "
                    f"{', '.join(sorted(SHARED))} are always shared."
                )
        self._folder = None if folder is None else os.path.join(os.path.realpath(folder), "")
        self._packages = frozenset(packages)
        # Names of own modules found so far, in order of import.
        self._names: dict[str, None] = {}
        self._known: set[str] = set()
        # Number of entries in sys.modules at the last search. It is compared at each change of
        # rank, because this is cheaper than a search.
        self._count = 0
        self._saved: dict[int, dict[str, ModuleType]] = {}
        self._saved_locks: dict[int, dict[str, Any]] = {}

    def begin(self, caller: int) -> None:
        """Forget the modules of all ranks, and take out the caller's modules."""
        self._saved.clear()
        self._saved_locks.clear()
        self._known.clear()
        self._names = {} if self._folder is None else dict.fromkeys(_MAINS)
        # An impossible count, so that the first take_out searches.
        self._count = -1
        self.take_out(caller)

    def take_out(self, owner: int) -> None:
        """Move the own modules out of `sys.modules`, and save them as `owner`'s."""
        modules = sys.modules
        if len(modules) != self._count:
            self._look_for_names()
        self._saved[owner] = {name: modules.pop(name) for name in self._names if name in modules}
        if _locks:
            self._saved_locks[owner] = {
                name: _locks.pop(name) for name in self._names if name in _locks
            }

    def put_in_place(self, owner: int) -> None:
        """Put `owner`'s saved modules into `sys.modules`, from which own modules were taken out."""
        sys.modules.update(self._saved.get(owner, {}))
        self._count = len(sys.modules)
        if owner in self._saved_locks:
            _locks.update(self._saved_locks.pop(owner))

    def owns(self, name: str) -> bool:
        """Return True if ranks have their own copies of a module."""
        if name in self._names:
            return True
        return name in sys.modules and self._is_own(name, sys.modules[name])

    def forget(self) -> None:
        """Drop all saved modules."""
        self._saved.clear()
        self._saved_locks.clear()

    def _look_for_names(self) -> None:
        found = sys.modules.keys() - self._known
        self._known |= found
        # In order of import, so that a package comes before its submodules.
        for name in [name for name in sys.modules if name in found]:
            if self._is_own(name, sys.modules[name]):
                self._names[name] = None

    def _is_own(self, name: str, module: ModuleType) -> bool:
        package, _, _ = name.partition(".")
        if package in self._packages:
            return True
        if package in SHARED:
            return False
        if self._folder is None:
            return False
        file = _file_of(module)
        if not file.endswith((".py", ".pyc", os.sep)):
            # A module without a file (built in, compiled, or made by hand) belongs to its package.
            return package != name and package in self._names
        file = os.path.realpath(file)
        if not file.startswith(self._folder):
            return False
        # If the script's folder contains Python itself, as `/` does, the standard library is still
        # shared.
        if file.startswith(_STDLIB) and not self._folder.startswith(_STDLIB):
            return False
        return _INSTALLED.isdisjoint(PurePath(file.removeprefix(self._folder)).parts)


def _file_of(module: ModuleType) -> str:
    """Return a module's file, or a namespace package's folder; empty if there is neither."""
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return file
    try:
        folder = next(iter(getattr(module, "__path__", ())), "")
    except (TypeError, KeyError):
        # A namespace package's path is computed from its parent, which is not in sys.modules now.
        return ""
    return os.path.join(folder, "") if isinstance(folder, str) and folder else ""
