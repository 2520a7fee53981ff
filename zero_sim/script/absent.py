"""Stand-ins for missing GPUs, kernel packages and the compiler.

Many scripts check for GPUs and kernels, and go on without them. So these are replaced only after a
run failed because they are missing. `torch.compile` is off from the start.
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

# Packages of GPU kernels.
KERNELS = ("flash_attn", "triton")
# Words in scripts' messages about missing things.
_LACK = re.compile(
    r"\b(no|not|unable|(in)?sufficient|needs?|requires?|required|at least|few)\b", re.IGNORECASE
)
_GPU_WORDS = ("cuda", "gpu", "accelerator", "nccl")


class MissingKernel(ImportError):
    """A script called a kernel, but the kernel's package is not installed."""


def wants_gpus(run: ScriptRun) -> bool:
    """True if a run failed, or ended before any collective, because GPUs are missing."""
    if torch.cuda.is_available():
        return False
    if isinstance(run.failure, RankFailed):
        if isinstance(run.failure.error, MissingKernel):
            return False
        return any(_names_gpu(text) for text in _texts(run.failure.error))
    # Some scripts print that they need GPUs and exit with 0, so look at the output too.
    is_idle = run.failure is None and not run.collective_count
    return is_idle and any(_names_gpu(line) and _LACK.search(line) for line in run.output)


def wants_kernels(run: ScriptRun) -> bool:
    """True if a run failed because a kernel package is not installed."""
    error = run.failure.error if isinstance(run.failure, RankFailed) else None
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return error.name.partition(".")[0] in KERNELS


def _names_gpu(text: str) -> bool:
    return any(word in text.lower() for word in _GPU_WORDS)


def _texts(error: BaseException | None) -> Iterator[str]:
    """Yield messages of an error and its causes, and the user's lines in their tracebacks."""
    while error is not None:
        yield str(error)
        trace = error.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            # If the message does not mention a GPU, a line such as `torch.device("cuda")` does.
            if is_of_user(file):
                yield linecache.getline(file, trace.tb_lineno)
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def without_compiler(note: Callable[[str], None]) -> Iterator[None]:
    """Make `torch.compile` a no-op in ranks.

    The compiler keeps its state per process, so it breaks if ranks compile at different times.

    Args:
        note: Receives a note for the user when a rank compiles.
    """
    original = torch.compile

    def compile_nothing(model: Any = None, *args: Any, **options: Any) -> Any:
        if rank_state.join is None:
            return original(model, *args, **options)
        note("torch.compile is off: functions run as they are, uncompiled.")
        if model is None:
            # The decorator form: `@torch.compile(dynamic=True)`.
            return lambda function: function
        if isinstance(model, torch.nn.Module):
            # By vars(), because setattr would register the module as its own submodule.
            vars(model)["_orig_mod"] = model
        return model

    with mock.patch.object(torch, "compile", compile_nothing):
        yield


@contextlib.contextmanager
def stubs_of_kernels() -> Iterator[None]:
    """Let the user's modules import kernel packages that are not installed."""
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        # If the stubs stayed, a later run would take the packages for installed.
        for name in finder.found:
            sys.modules.pop(name, None)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder that returns stubs, only for imports by the user's modules."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a stub's spec; None for imports by libraries, which only probe for the package."""
        top = name.partition(".")[0]
        if top not in KERNELS or not (top in self.found or _is_imported_by_user(sys._getframe(1))):
            return None
        self.found.append(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return a module whose names are stubs."""
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because a stub has no code."""


def _is_imported_by_user(frame: FrameType | None) -> bool:
    # Skip the frames of Python's import machinery between the import statement and this finder.
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and is_of_user(frame.f_code.co_filename)


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}", is_language=self.__name__.startswith("triton"))


class Stub:
    """Stand-in for a function or class in a package that is not installed.

    Args:
        name: Full name, such as `triton.jit`.
        is_language: True for kernel decorators and types. A module uses these during its import, so
            only a launch fails. If False, each call fails.
    """

    def __init__(self, name: str, *, is_language: bool) -> None:
        self._name = name
        self._is_language = is_language

    def __call__(self, *args: Any, **kwargs: Any) -> Stub:
        """Return a stub for the decorated kernel.

        Raises:
            MissingKernel: The stub stands for an ordinary function.
        """
        if not self._is_language:
            self._fail()
        # Keep the decorated function's name for the error at a launch.
        function = args[0] if len(args) == 1 else None
        if isinstance(function, Stub):
            return function
        return Stub(getattr(function, "__name__", self._name), is_language=True)

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self._name}.{name}", is_language=self._is_language)

    def __getitem__(self, grid: object) -> NoReturn:
        """Fail, because `kernel[grid]` launches the kernel."""
        self._fail()

    def _fail(self) -> NoReturn:
        raise MissingKernel(
            f"expected an installed package for the kernel {self._name!r}, got none. If the "
            "script has an option to use torch's operations instead, set it."
        )
