"""Stand-ins for GPUs, packages of kernels and the compiler, which a machine or a rank lacks.

A script may ask for any of these and go on without. So nothing is put in their place until a run
has failed for the lack of it. The compiler alone is off from the start: it keeps one state for the
process, and ranks that compile at different times break it.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch

from zero_sim.script.rank_processes import is_of_user
from zero_sim.script.record import ScriptRun
from zero_sim.sim import RankFailed
from zero_sim.sim.world.rank_threads import rank_state

KERNELS = ("flash_attn", "triton")
"""Packages of kernels, which run on GPUs alone."""
_LACK = re.compile(
    r"\b(no|not|unable|(in)?sufficient|needs?|requires?|required|at least|few)\b", re.IGNORECASE
)
"""Words by which scripts report that something is missing."""
_GPU_WORDS = ("cuda", "gpu", "accelerator", "nccl")


class MissingKernel(ImportError):
    """A script called a kernel of a package that is not installed."""


def wants_gpus(run: ScriptRun) -> bool:
    """True if a run failed, or ended before any collective, because there is no GPU."""
    if torch.cuda.is_available():
        return False
    if isinstance(run.failure, RankFailed):
        if isinstance(run.failure.error, MissingKernel):
            return False
        return any(_names_gpu(text) for text in _texts(run.failure.error))
    is_idle = run.failure is None and not run.collective_count
    return is_idle and any(_names_gpu(line) and _LACK.search(line) for line in run.output)


def wants_kernels(run: ScriptRun) -> bool:
    """True if a run failed because a package of kernels is not installed."""
    error = run.failure.error if isinstance(run.failure, RankFailed) else None
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return error.name.partition(".")[0] in KERNELS


def _names_gpu(text: str) -> bool:
    return any(word in text.lower() for word in _GPU_WORDS)


def _texts(error: BaseException | None) -> Iterator[str]:
    """The messages of an error and of its causes, and the user's lines that it passed through."""
    while error is not None:
        yield str(error)
        trace = error.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            if is_of_user(file):
                yield linecache.getline(file, trace.tb_lineno)
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def without_compiler(note: Callable[[str], None]) -> Iterator[None]:
    """Let `torch.compile` leave what it is given as it is.

    Args:
        note: Called with a note for the user when a rank compiles.
    """
    original = torch.compile

    def compile_nothing(model: Any = None, *args: Any, **options: Any) -> Any:
        if rank_state.join is None:
            return original(model, *args, **options)
        note("torch.compile is off: functions run as they are, uncompiled.")
        if model is None:
            return lambda function: function
        if isinstance(model, torch.nn.Module):
            # Past the module's own setattr, which would make it its own submodule.
            vars(model)["_orig_mod"] = model
        return model

    with mock.patch.object(torch, "compile", compile_nothing):
        yield


@contextlib.contextmanager
def stubs_of_kernels() -> Iterator[None]:
    """Let the user's modules import packages of kernels that are not installed."""
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.found:
            sys.modules.pop(name, None)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds such packages, if a module of the user's imports them."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A stub's spec. Libraries that probe for a package are to find none."""
        top = name.partition(".")[0]
        if top not in KERNELS or not (top in self.found or _is_imported_by_user(sys._getframe(1))):
            return None
        self.found.append(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module whose names are stubs."""
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to execute."""


def _is_imported_by_user(frame: FrameType | None) -> bool:
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and is_of_user(frame.f_code.co_filename)


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}", is_language=self.__name__.startswith("triton"))


class Stub:
    """Stands in the place of a function or class of a package that is not installed.

    Args:
        name: Its name.
        is_language: True for decorators and types of kernels, which a module uses when it is
            imported; only a launch fails. Otherwise each call fails.
    """

    def __init__(self, name: str, *, is_language: bool) -> None:
        self._name = name
        self._is_language = is_language

    def __call__(self, *args: Any, **kwargs: Any) -> Stub:
        """A decorated kernel, or the failure of a call."""
        if not self._is_language:
            self._fail()
        # A decorator keeps the name of what it decorates.
        function = args[0] if len(args) == 1 else None
        if isinstance(function, Stub):
            return function
        return Stub(getattr(function, "__name__", self._name), is_language=True)

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self._name}.{name}", is_language=self._is_language)

    def __getitem__(self, grid: object) -> NoReturn:
        """The launch of a kernel."""
        self._fail()

    def _fail(self) -> NoReturn:
        raise MissingKernel(
            f"expected an installed package for the kernel {self._name!r}, got none. Let the "
            "script use torch's own operations, by an option of its own, where there is no GPU."
        )
