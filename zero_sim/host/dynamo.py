"""torch's compiler, imported when something compiles.

torch's optimizers and its `init_process_group` import `torch._dynamo`, 800 modules and more than a
second of processor time, to tell it that there is nothing to compile. In a process that judges
cases of eager code that is two fifths of the time to the first verdict. Until somebody asks for
anything else of it a module that answers just those questions stands in its place; then the real
one is imported and takes its place for good, and what was wrapped in the meantime goes through it.
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
    """Put the import of `torch._dynamo` off until something compiles, unless it is there."""
    if _NAME in sys.modules:
        return
    deferred = _Deferred(_NAME, __doc__)
    sys.modules[_NAME] = deferred
    torch.__dict__["_dynamo"] = deferred
    sys.meta_path.insert(0, _SubmoduleFinder())


def real_dynamo() -> ModuleType:
    """The real module, imported now if it was not."""
    if isinstance(sys.modules.get(_NAME), _Deferred):
        del sys.modules[_NAME]
        del torch.__dict__["_dynamo"]
        sys.meta_path[:] = [
            each for each in sys.meta_path if not isinstance(each, _SubmoduleFinder)
        ]
    return importlib.import_module(_NAME)


def _is_deferred() -> bool:
    return isinstance(sys.modules.get(_NAME), _Deferred)


class _Deferred(ModuleType):
    """What stands for `torch._dynamo`: right for code that is not compiled."""

    def __init__(self, name: str, doc: str | None) -> None:
        super().__init__(name, doc)
        self.__path__ = []
        self.__file__ = None
        self.trace_rules = _DeferredRules(f"{_NAME}.trace_rules")

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """End a graph, of which there is none."""

    @staticmethod
    def disable(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Keep a function from being compiled, as `torch._dynamo.disable` does from then on."""
        if fn is None or not callable(fn) or isinstance(fn, type | torch.nn.Module):
            return real_dynamo().disable(fn, *args, **kwargs)
        disabled: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def plainly(*values: Any, **named: Any) -> Any:
            if not disabled:
                if _is_deferred():
                    return fn(*values, **named)
                disabled.append(real_dynamo().disable(fn, *args, **kwargs))
            return disabled[0](*values, **named)

        return plainly

    def __getattr__(self, name: str) -> Any:
        return getattr(real_dynamo(), name)


class _DeferredRules(ModuleType):
    """What stands for `torch._dynamo.trace_rules`."""

    @staticmethod
    def clear_lru_cache() -> None:
        """Forget rules, of which none was looked up."""
        if not _is_deferred():
            real_dynamo().trace_rules.clear_lru_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(real_dynamo().trace_rules, name)


class _SubmoduleFinder(importlib.abc.MetaPathFinder):
    """Has the real package imported before any of its modules is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """What imports a module of the package; None for everything else."""
        if not fullname.startswith(f"{_NAME}."):
            return None
        real_dynamo()
        module = importlib.import_module(fullname)
        return importlib.machinery.ModuleSpec(fullname, _Imported(module))


class _Imported(importlib.abc.Loader):
    """Loads a module that came to be imported while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module as it is."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it so: it has run."""
        module.__spec__ = self._spec
