"""A script's own modules, which each rank imports for itself, so that each has its own globals.

All other modules are shared. Python's import looks into the dict `sys.modules` itself, which cannot
be made thread-local. So the entries of own modules are exchanged whenever the baton passes.
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
"""Packages that cannot be imported twice in a process, so all ranks share them."""
# A virtual environment may lie inside the script's folder. Its packages are not the script's own.
_INSTALLED = frozenset({"dist-packages", "site-packages"})
# The second is the name under which multiprocessing imports the main module in a new process.
_MAINS = ("__main__", "__mp_main__")
_STDLIB = os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "")

# Python's locks of modules that are being imported belong to threads. They are exchanged too: a
# rank that waits for others amid an import must not keep these from importing their own copy.
_locks: dict[str, Any] = importlib._bootstrap._module_locks  # pyrefly: ignore


def check_found(packages: Collection[str], *, folder: str | None = None) -> None:
    """Check that packages can be imported.

    Args:
        packages: Names of top-level packages.
        folder: Folder to search before Python's own path; None for no other.

    Raises:
        UsageError: A package cannot be found.
    """
    path = [*([] if folder is None else [folder]), *sys.path]
    for name in packages:
        # An editable install may have its own finder instead of a path entry; find_spec uses it.
        if PathFinder.find_spec(name, path) is None and (
            name not in sys.modules and importlib.util.find_spec(name) is None
        ):
            known = [module.name for module in pkgutil.iter_modules(path)]
            raise UsageError(
                f"expected a top-level package that can be imported, got {name!r}."
                f"{did_you_mean(name, known)} Check the name, and that it is installed."
            )


class OwnModules:
    """The rank-local modules, moved in and out of `sys.modules` for one rank at a time.

    Args:
        folder: The script's folder. Modules below it are a rank's own, except packages installed
            there. None for no such folder.
        packages: Further top-level packages that each rank imports for itself.

    Raises:
        UsageError: A package cannot be imported several times in a process.
    """

    def __init__(self, *, folder: str | None, packages: Collection[str] = ()) -> None:
        for name in packages:
            if name in SHARED or name in sys.builtin_module_names or not name.isidentifier():
                raise UsageError(
                    f"expected own modules to be top-level packages of Python code, got {name!r}. "
                    f"{', '.join(sorted(SHARED))} are always shared."
                )
        self._folder = None if folder is None else os.path.join(os.path.realpath(folder), "")
        self._packages = frozenset(packages)
        # Names of all own modules found so far, in the order of import.
        self._names: dict[str, None] = {}
        self._known: set[str] = set()
        # Entries of sys.modules when it was last searched; cheap to compare at each change of rank.
        self._count = 0
        self._saved: dict[int, dict[str, ModuleType]] = {}
        self._saved_locks: dict[int, dict[str, Any]] = {}

    def begin(self, caller: int) -> None:
        """Forget the modules of all ranks, and take out the caller's."""
        self._saved.clear()
        self._saved_locks.clear()
        self._known.clear()
        self._names = {} if self._folder is None else dict.fromkeys(_MAINS)
        # No real count, so that the first take_out searches.
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
        """Put `owner`'s saved modules into `sys.modules`, which must contain no own ones."""
        sys.modules.update(self._saved.get(owner, {}))
        self._count = len(sys.modules)
        if owner in self._saved_locks:
            _locks.update(self._saved_locks.pop(owner))

    def owns(self, name: str) -> bool:
        """Return True if the module in `sys.modules` is a rank's own."""
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
        # In the order of import, so that a package comes before its submodules.
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
            # Built in, compiled, or made by hand: it belongs to the owner of its package.
            return package != name and package in self._names
        file = os.path.realpath(file)
        if not file.startswith(self._folder):
            return False
        # A script in a folder above Python itself, such as `/`, does not own the standard library.
        if file.startswith(_STDLIB) and not self._folder.startswith(_STDLIB):
            return False
        return _INSTALLED.isdisjoint(PurePath(file.removeprefix(self._folder)).parts)


def _file_of(module: ModuleType) -> str:
    """Return a module's file, or the folder of a namespace package; empty if it has neither."""
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return file
    try:
        folder = next(iter(getattr(module, "__path__", ())), "")
    except (TypeError, KeyError):
        # A namespace package's path is computed from its parent, which is not in sys.modules now.
        return ""
    return os.path.join(folder, "") if isinstance(folder, str) and folder else ""
