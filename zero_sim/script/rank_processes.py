"""Processes of a script that are to be ranks: those whose function joins a process group."""

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

_JOINING = frozenset({"Accelerator", "init_device_mesh", "init_distributed", "init_process_group"})
"""Names of functions and classes that make the default group."""
_INSTALLED = frozenset({"dist-packages", "site-packages"})
_STDLIB = os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "")
_FUNCTIONS_MAX = 500
"""Bound on the functions that are searched for a call that joins a group."""


class StartsRanks(WorldFailure):
    """A script, run as torchrun would, starts ranks itself; ends the attempt.

    Args:
        site: Place of the start, `file:line`.
        all_own: True if also functions of the script that do not visibly join a group are ranks.
    """

    def __init__(self, site: str, *, all_own: bool) -> None:
        self.site = site
        self.all_own = all_own
        super().__init__(f"the script starts ranks itself at {site}")


def torch_wrap() -> Callable[..., None]:
    """The function of processes that torch.multiprocessing starts."""
    # The attribute `spawn` of the package is a function.
    return sys.modules[torch.multiprocessing.start_processes.__module__]._wrap  # pyrefly: ignore


def is_rank(process: BaseProcess, *, all_own: bool) -> bool:
    """True if a process that was not started yet is to be a rank.

    Args:
        process: The process.
        all_own: True to take any process for a rank that runs a function of the user's.
    """
    target: Any = vars(process).get("_target")
    if target is torch_wrap():
        return True
    has_own_run = type(process).run is not BaseProcess.run
    function = _function_of(type(process).run if has_own_run else target)
    if function is None or _is_of_library(function.__code__.co_filename):
        return False
    return all_own or _joins_group(function)


def _function_of(target: Any) -> FunctionType | None:
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, MethodType):
        target = target.__func__
    elif not isinstance(target, FunctionType):
        target = vars(type(target)).get("__call__")
    target = inspect.unwrap(target) if callable(target) else None
    return target if isinstance(target, FunctionType) else None


def _is_of_library(file: str) -> bool:
    """True for Python's own files, and for torch's apart from its harness of tests."""
    file = os.path.realpath(file)
    if not _INSTALLED.isdisjoint(PurePath(file).parts):
        package = PurePath(os.path.relpath(file, os.path.dirname(torch.__file__))).parts[0]
        return package not in ("..", "testing")
    return file.startswith(_STDLIB)


def _joins_group(function: FunctionType) -> bool:
    """True if a function, or one of the user's that it names, names a call that joins a group."""
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
        # Through modules, too: `import train` and `train.main()` name both.
        spaces = [here.__globals__, *_own_modules(here.__globals__, names)]
        for space in spaces:
            for name in names & space.keys():
                left += _functions(space[name])
    return False


def _names(code: CodeType) -> Iterator[str]:
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
    """True for a file that belongs to neither Python nor an installed package."""
    if not file:
        return False
    file = os.path.realpath(file)
    return _INSTALLED.isdisjoint(PurePath(file).parts) and not file.startswith(_STDLIB)
