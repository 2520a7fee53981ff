"""Find out which of a script's processes are ranks: their function joins a group."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch.multiprocessing

from zero_sim.sim import WorldFailure

# These make the default group, in Accelerate, torch and DeepSpeed.
_JOINING = frozenset({"Accelerator", "init_device_mesh", "init_distributed", "init_process_group"})
_INSTALLED = frozenset({"dist-packages", "site-packages"})
_STDLIB = os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "")
# Search limit, because a large script mentions thousands of functions.
_FUNCTIONS_MAX = 500


class StartsRanks(WorldFailure):
    """A script under torchrun starts ranks itself, so this attempt ends.

    Args:
        site: Call site of the start, `file:line`.
        all_own: True if processes are ranks even if their function does not mention a joining call.
    """

    def __init__(self, site: str, *, all_own: bool) -> None:
        self.site = site
        self.all_own = all_own
        super().__init__(f"the script starts ranks itself at {site}")


def torch_wrap() -> Callable[..., None]:
    """Return the process target that `torch.multiprocessing.spawn` uses."""
    # From sys.modules, because the package's attribute `spawn` is a function.
    return sys.modules[torch.multiprocessing.start_processes.__module__]._wrap  # pyrefly: ignore


def is_rank(process: BaseProcess, *, all_own: bool) -> bool:
    """Return True if a process that is about to start should run as a rank.

    Args:
        process: The process.
        all_own: True if each process with a user's function is a rank.
    """
    target: Any = vars(process).get("_target")
    # torch.multiprocessing.spawn passes an index to each process, so these are ranks.
    if target is torch_wrap():
        return True
    # The function is a subclass's own `run` or the target.
    has_own_run = type(process).run is not BaseProcess.run
    function = _function_of(type(process).run if has_own_run else target)
    if function is None or _is_of_library(function.__code__.co_filename):
        return False
    return all_own or _joins_group(function)


def _function_of(target: Any) -> FunctionType | None:
    # Unwrap partials, methods, callable objects and decorators to get the user's function.
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, MethodType):
        target = target.__func__
    elif not isinstance(target, FunctionType):
        target = vars(type(target)).get("__call__")
    target = inspect.unwrap(target) if callable(target) else None
    return target if isinstance(target, FunctionType) else None


def _is_of_library(file: str) -> bool:
    """Return True for files of Python and torch, except torch's test harness."""
    file = os.path.realpath(file)
    if not _INSTALLED.isdisjoint(PurePath(file).parts):
        # Users subclass test cases in torch/testing, which start ranks.
        package = PurePath(os.path.relpath(file, os.path.dirname(torch.__file__))).parts[0]
        return package not in ("..", "testing")
    return file.startswith(_STDLIB)


def _joins_group(function: FunctionType) -> bool:
    """Return True if a function mentions a joining call, directly or through users' functions.

    The search is static, by names, because the process does not run yet.
    """
    seen: set[CodeType] = set()
    left = [function]
    while left and len(seen) < _FUNCTIONS_MAX:
        here = left.pop()
        if here.__code__ in seen:
            continue
        seen.add(here.__code__)
        names = set(_names(here.__code__))
        if names & _JOINING:
            return True
        # Look in modules too: `train.main()` mentions both names.
        spaces = [here.__globals__, *_own_modules(here.__globals__, names)]
        for space in spaces:
            for name in names & space.keys():
                left += _functions(space[name])
    return False


def _names(code: CodeType) -> Iterator[str]:
    # Nested functions and comprehensions are constants of the enclosing code.
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _own_modules(space: dict[str, Any], names: set[str]) -> Iterator[dict[str, Any]]:
    for name in names & space.keys():
        module = space[name]
        if isinstance(module, ModuleType) and is_of_user(getattr(module, "__file__", None)):
            yield vars(module)


def _functions(value: Any) -> Iterator[FunctionType]:
    found = vars(value).values() if isinstance(value, type) else [value]
    for each in found:
        function = inspect.unwrap(each) if callable(each) else None
        if isinstance(function, FunctionType) and is_of_user(function.__code__.co_filename):
            yield function


def is_of_user(file: str | None) -> bool:
    """Return True for a file outside of Python and installed packages."""
    if not file:
        return False
    file = os.path.realpath(file)
    return _INSTALLED.isdisjoint(PurePath(file).parts) and not file.startswith(_STDLIB)
