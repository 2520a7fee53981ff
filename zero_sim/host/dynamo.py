"""Deferred import of torch's compiler, until something compiles.

torch's optimizers and `init_process_group` import `torch._dynamo` only to mark functions as not
compiled. The import of its 800 modules takes more than a second, two fifths of the time to the
first verdict on eager code. So a stand-in handles these calls. At any other use, the real module is
imported and replaces the stand-in. Functions that the stand-in has wrapped then use the real
module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"


def defer_dynamo() -> None:
    """Defer the import of `torch._dynamo` until something compiles, if it is not imported yet."""
    if _NAME in sys.modules:
        return
    deferred = _Deferred(_NAME, __doc__)
    sys.modules[_NAME] = deferred
    # torch also accesses it as an attribute.
    torch.__dict__["_dynamo"] = deferred
    sys.meta_path.insert(0, _SubmoduleFinder())


def real_dynamo() -> ModuleType:
    """Return the real module. Import it if necessary."""
    if isinstance(sys.modules.get(_NAME), _Deferred):
        # Remove the stand-in first, because the import below would find it.
        del sys.modules[_NAME]
        del torch.__dict__["_dynamo"]
        sys.meta_path[:] = [
            each for each in sys.meta_path if not isinstance(each, _SubmoduleFinder)
        ]
    return importlib.import_module(_NAME)


def _is_deferred() -> bool:
    return isinstance(sys.modules.get(_NAME), _Deferred)


class _Deferred(ModuleType):
    """Stand-in for `torch._dynamo`, correct without compilation."""

    def __init__(self, name: str, doc: str | None) -> None:
        super().__init__(name, doc)
        self.__path__ = []
        self.__file__ = None
        self.trace_rules = _DeferredRules(f"{_NAME}.trace_rules")

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Do nothing, because there is no graph to end."""

    @staticmethod
    def disable(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Disable compilation of a function, with the real `disable` once it is imported."""
        # For these arguments, the real function does more than wrap.
        if fn is None or not callable(fn) or isinstance(fn, type | torch.nn.Module):
            return real_dynamo().disable(fn, *args, **kwargs)
        disabled: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def plainly(*values: Any, **named: Any) -> Any:
            if not disabled:
                # Still deferred, so nothing compiles and the function can run unchanged.
                if _is_deferred():
                    return fn(*values, **named)
                disabled.append(real_dynamo().disable(fn, *args, **kwargs))
            return disabled[0](*values, **named)

        return plainly

    def __getattr__(self, name: str) -> Any:
        return getattr(real_dynamo(), name)


class _DeferredRules(ModuleType):
    """Stand-in for `torch._dynamo.trace_rules`."""

    @staticmethod
    def clear_lru_cache() -> None:
        """Clear the rule cache, which is empty until the real module is imported."""
        if not _is_deferred():
            real_dynamo().trace_rules.clear_lru_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(real_dynamo().trace_rules, name)


class _SubmoduleFinder(importlib.abc.MetaPathFinder):
    """Import finder that imports the real package before a submodule."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a submodule; None for all other modules."""
        if not fullname.startswith(f"{_NAME}."):
            return None
        real_dynamo()
        module = importlib.import_module(fullname)
        return importlib.machinery.ModuleSpec(fullname, _Imported(module))


class _Imported(importlib.abc.Loader):
    """Loader for an already imported module."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, without executing it again."""
        module.__spec__ = self._spec
