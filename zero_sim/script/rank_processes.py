"""Processes of a script that should run as ranks, because their function joins a group."""

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

# Functions and classes that make the default group: of Accelerate, torch and DeepSpeed.
_JOINING = frozenset({"Accelerator", "init_device_mesh", "init_distributed", "init_process_group"})
_INSTALLED = frozenset({"dist-packages", "site-packages"})
_STDLIB = os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "")
# Bounds the search for such a call, because a large script names thousands of functions.
_FUNCTIONS_MAX = 500


class StartsRanks(WorldFailure):
    """A script that runs as under torchrun starts ranks itself, so this attempt ends.

    Args:
        site: Call site of the start, `file:line`.
        all_own: True if processes are ranks even if their function does not visibly join a group.
    """

    def __init__(self, site: str, *, all_own: bool) -> None:
        self.site = site
        self.all_own = all_own
        super().__init__(f"the script starts ranks itself at {site}")


def torch_wrap() -> Callable[..., None]:
    """Return the target of processes that `torch.multiprocessing.spawn` starts."""
    # By sys.modules, because the package's attribute `spawn` is the function.
    return sys.modules[torch.multiprocessing.start_processes.__module__]._wrap  # pyrefly: ignore


def is_rank(process: BaseProcess, *, all_own: bool) -> bool:
    """Return True if a process, before its start, should run as a rank.

    Args:
        process: The process.
        all_own: True if each process that runs a function of the user is a rank.
    """
    target: Any = vars(process).get("_target")
    # torch.multiprocessing.spawn gives each process its index, so these are ranks.
    if target is torch_wrap():
        return True
    # Either a subclass with its own `run`, or a target.
    has_own_run = type(process).run is not BaseProcess.run
    function = _function_of(type(process).run if has_own_run else target)
    if function is None or _is_of_library(function.__code__.co_filename):
        return False
    return all_own or _joins_group(function)


def _function_of(target: Any) -> FunctionType | None:
    # Down to the user's function, through partials, methods, callable objects and decorators.
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, MethodType):
        target = target.__func__
    elif not isinstance(target, FunctionType):
        target = vars(type(target)).get("__call__")
    target = inspect.unwrap(target) if callable(target) else None
    return target if isinstance(target, FunctionType) else None


def _is_of_library(file: str) -> bool:
    """Return True for files of Python and of torch, except torch's test harness."""
    file = os.path.realpath(file)
    if not _INSTALLED.isdisjoint(PurePath(file).parts):
        # Files under torch/testing start ranks for tests of users, who subclass them.
        package = PurePath(os.path.relpath(file, os.path.dirname(torch.__file__))).parts[0]
        return package not in ("..", "testing")
    return file.startswith(_STDLIB)


def _joins_group(function: FunctionType) -> bool:
    """Return True if a function, or a user's function that it mentions, mentions a joining call.

    A static search by names, because the process does not run yet.
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
        # Also through modules: `import train` and `train.main()` mention both names.
        spaces = [here.__globals__, *_own_modules(here.__globals__, names)]
        for space in spaces:
            for name in names & space.keys():
                left += _functions(space[name])
    return False


def _names(code: CodeType) -> Iterator[str]:
    # Nested functions and comprehensions are constants of the code around them.
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
    """Return True for a file that belongs to neither Python nor an installed package."""
    if not file:
        return False
    file = os.path.realpath(file)
    return _INSTALLED.isdisjoint(PurePath(file).parts) and not file.startswith(_STDLIB)
