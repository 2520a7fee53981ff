"""A script as a rank's program, with the work that Python does before and after a script."""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Protocol

from zero_sim.errors import UsageError
from zero_sim.script.process_calls import run_at_exit


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A file or module, with arguments."""

    name: str
    """File or module, as on the command line."""
    is_module: bool
    arguments: tuple[str, ...]
    path: str
    """Absolute path; empty for a module, which each rank finds itself."""
    code: CodeType | None
    """Compiled file; None for a module."""

    @property
    def folder(self) -> str:
        """Folder that Python puts first on the path: the file's folder or the working directory."""
        return os.getcwd() if self.is_module else os.path.dirname(self.path)


def read_script(name: str, *, is_module: bool, arguments: Sequence[str]) -> Script:
    """Read a script.

    Args:
        name: File, or module name as for `python -m`.
        is_module: True if `name` is a module.
        arguments: Arguments after the name on the command line.

    Raises:
        UsageError: The file cannot be read or is not valid Python.
    """
    path, code = "", None
    if not is_module:
        path = os.path.abspath(name)
        try:
            source = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(
                f"expected a Python script, got {name!r}: {error.strerror}. Put zero-sim options "
                "before the script, and use -m for a module name."
            ) from None
        try:
            # Bytes, so that Python reads the encoding from the file. dont_inherit keeps out our own
            # __future__ flags.
            code = compile(source, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"expected a Python script, got {name!r}: {error}") from None
    return Script(name=name, is_module=is_module, arguments=tuple(arguments), path=path, code=code)


class StartReached(BaseException):
    """While executing the script's file, a rank reached the statement that started it."""


class Started(Protocol):
    """Process of a script, to be run as a rank."""

    @property
    def is_forked(self) -> bool:
        """True if the process is forked, so that it executes no file."""
        ...

    def run_program(self, main: ModuleType) -> None:
        """Run the process's function in a rank whose `__main__` is `main`."""
        ...


class _Rank(threading.local):
    # Process for which this rank is executing the script's file; None at other times.
    executes_for: Started | None = None


_rank = _Rank()


def run_as_started(script: Script, started: Started) -> None:
    """Execute a script's file like a new multiprocessing process, then run the process.

    Args:
        script: Script that started the calling rank.
        started: Process to run.
    """
    # multiprocessing executes the file under this name, so that `if __name__` blocks do not run.
    main = ModuleType("__mp_main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    _rank.executes_for = started
    try:
        try:
            _execute(script, main)
        except StartReached:
            # A fork inherits only definitions above the statement that started it.
            pass
        finally:
            _rank.executes_for = None
        started.run_program(main)
    finally:
        run_at_exit()


def check_not_executing() -> None:
    """Stop the rank if it starts a process while executing the script's file.

    Raises:
        StartReached: The rank is forked.
        RuntimeError: The start is not below `if __name__ == "__main__"`, which Python requires.
    """
    started = _rank.executes_for
    if started is None:
        return
    if started.is_forked:
        raise StartReached
    # The words of multiprocessing.spawn, so that users find them on the web.
    raise RuntimeError(
        "An attempt has been made to start a new process before the current process has finished "
        "its bootstrapping phase. Start processes below `if __name__ == '__main__':`, because "
        "each of them imports the script."
    )


def run_script(script: Script) -> None:
    """Run a script in the calling rank.

    Args:
        script: File or module to run.

    Raises:
        BaseException: The script raised it. An exit without an error is not raised.
    """
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        _execute(script, main)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        run_at_exit()


def _execute(script: Script, main: ModuleType) -> None:
    # The same globals as runpy.run_path and run_module set.
    space = vars(main)
    code, path, spec = script.code, script.path, None
    if script.is_module:
        # Find the module as `python -m` does. This imports its parents, as modules of this rank.
        _, spec, code = runpy._get_module_details(script.name)  # pyrefly: ignore
        path = str(spec.origin)
        sys.argv[0] = path
    assert code is not None
    space.update(
        __file__=path,
        __builtins__=__builtins__,
        __cached__=None if spec is None else spec.cached,
        __package__=None if spec is None else spec.parent,
        __spec__=spec,
        __loader__=importlib.machinery.SourceFileLoader(main.__name__, path)
        if spec is None
        else spec.loader,
        __annotations__={},
    )
    exec(code, space)
