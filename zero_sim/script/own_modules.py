"""A script's own modules: each rank imports them for itself, so that their globals are its own.

All other modules are shared. The dict of modules is one object that Python's import looks into
without asking anybody; so the entries of whoever has the baton stand in it, and are exchanged.
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
"""Packages that one process has once, wherever they lie."""
_INSTALLED = frozenset({"dist-packages", "site-packages"})
_MAINS = ("__main__", "__mp_main__")
_STDLIB = os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "")

# Names that are being imported, with locks that belong to threads: a rank that waits for others in
# the middle of an import must not keep them from importing theirs.
_locks: dict[str, Any] = importlib._bootstrap._module_locks  # pyrefly: ignore


def check_found(packages: Collection[str], *, folder: str | None = None) -> None:
    """Check that packages can be imported.

    Args:
        packages: Names of top-level packages.
        folder: Where to look first; None for Python's own path alone.

    Raises:
        UsageError: There is no package of a name.
    """
    path = [*([] if folder is None else [folder]), *sys.path]
    for name in packages:
        # Finders of editable installs are no entries of the path.
        if PathFinder.find_spec(name, path) is None and (
            name not in sys.modules and importlib.util.find_spec(name) is None
        ):
            known = [module.name for module in pkgutil.iter_modules(path)]
            raise UsageError(
                f"expected a top-level package that can be imported, got {name!r}."
                f"{did_you_mean(name, known)} Check its name, and that it is installed."
            )


class OwnModules:
    """Moves one rank's own modules at a time into `sys.modules` and out of it.

    Args:
        folder: The script's; what is imported from below it is a rank's own, except what is
            installed there. None for no such folder.
        packages: Top-level packages that are a rank's own besides, wherever they lie.

    Raises:
        UsageError: A package is not one that can be imported several times.
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
        self._names: dict[str, None] = {}
        """Names of all own modules known, in the order in which they were found."""
        self._known: set[str] = set()
        self._count = 0
        self._saved: dict[int, dict[str, ModuleType]] = {}
        self._saved_locks: dict[int, dict[str, Any]] = {}

    def begin(self, caller: int) -> None:
        """Forget all ranks' modules, and take out the caller's."""
        self._saved.clear()
        self._saved_locks.clear()
        self._known.clear()
        self._names = {} if self._folder is None else dict.fromkeys(_MAINS)
        self._count = -1
        self.take_out(caller)

    def take_out(self, owner: int) -> None:
        """Take the own modules that are in place out, as `owner`'s."""
        modules = sys.modules
        if len(modules) != self._count:
            self._look_for_names()
        self._saved[owner] = {name: modules.pop(name) for name in self._names if name in modules}
        if _locks:
            self._saved_locks[owner] = {
                name: _locks.pop(name) for name in self._names if name in _locks
            }

    def put_in_place(self, owner: int) -> None:
        """Put `owner`'s in place; nobody's are."""
        sys.modules.update(self._saved.get(owner, {}))
        self._count = len(sys.modules)
        if owner in self._saved_locks:
            _locks.update(self._saved_locks.pop(owner))

    def owns(self, name: str) -> bool:
        """Whether a module that is in place is the rank's own."""
        if name in self._names:
            return True
        return name in sys.modules and self._is_own(name, sys.modules[name])

    def forget(self) -> None:
        """Let go of all modules that are not in place."""
        self._saved.clear()
        self._saved_locks.clear()

    def _look_for_names(self) -> None:
        found = sys.modules.keys() - self._known
        self._known |= found
        # In the order of import: a package comes before what is in it.
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
            # Built in, compiled, or made by hand, which belongs to whoever made its package.
            return package != name and package in self._names
        file = os.path.realpath(file)
        if not file.startswith(self._folder):
            return False
        if file.startswith(_STDLIB) and not self._folder.startswith(_STDLIB):
            return False
        return _INSTALLED.isdisjoint(PurePath(file.removeprefix(self._folder)).parts)


def _file_of(module: ModuleType) -> str:
    """A module's file; of a package without one its folder; empty where there is neither."""
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return file
    try:
        folder = next(iter(getattr(module, "__path__", ())), "")
    except (TypeError, KeyError):
        # A package whose parent is not in place any more.
        return ""
    return os.path.join(folder, "") if isinstance(folder, str) and folder else ""
