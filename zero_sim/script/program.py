"""A script as the program of one rank: its `__main__`, and what Python does around it."""

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
    """What is run: a file, or a module by name."""

    name: str
    """As it was given."""
    is_module: bool
    arguments: tuple[str, ...]
    path: str
    """The file, absolute; empty for a module, which each rank looks for."""
    code: CodeType | None
    """Of the file."""

    @property
    def folder(self) -> str:
        """What is first on its path: the file's own folder, or the working directory."""
        return os.getcwd() if self.is_module else os.path.dirname(self.path)


def read_script(name: str, *, is_module: bool, arguments: Sequence[str]) -> Script:
    """Read a script.

    Args:
        name: Its file, or with `is_module` the name of a module, as for `python -m`.
        is_module: Which of the two.
        arguments: What follows its name on the command line.

    Raises:
        UsageError: There is no such file, or it is no Python.
    """
    path, code = "", None
    if not is_module:
        path = os.path.abspath(name)
        try:
            source = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(
                f"expected a Python script, got {name!r}: {error.strerror}. Options of zero-sim "
                "come before it; for the name of a module give -m."
            ) from None
        try:
            code = compile(source, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"expected a Python script, got {name!r}: {error}") from None
    return Script(name=name, is_module=is_module, arguments=tuple(arguments), path=path, code=code)


class StartReached(BaseException):
    """A rank that executes the script's file has come to the start of the ranks."""


class Started(Protocol):
    """A process that a script started, and that runs as a rank."""

    @property
    def is_forked(self) -> bool:
        """True if it would be forked, and thus execute no file."""
        ...

    def run_program(self, main: ModuleType) -> None:
        """Run its function; `main` is the rank's `__main__`."""
        ...


class _Rank(threading.local):
    executes_for: Started | None = None


_rank = _Rank()


def run_as_started(script: Script, started: Started) -> None:
    """Execute a script's file as multiprocessing does in a process, then run the process.

    Args:
        script: The script that started the calling rank.
        started: The process.
    """
    main = ModuleType("__mp_main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    _rank.executes_for = started
    try:
        try:
            _execute(script, main)
        except StartReached:
            # A fork has what the file had defined up to here.
            pass
        finally:
            _rank.executes_for = None
        started.run_program(main)
    finally:
        run_at_exit()


def check_not_executing() -> None:
    """Stop a rank that executes the script's file and starts processes in it.

    Raises:
        StartReached: The rank would be forked.
        RuntimeError: It would execute the file, which lacks a guard, so that Python refuses it.
    """
    started = _rank.executes_for
    if started is None:
        return
    if started.is_forked:
        raise StartReached
    raise RuntimeError(
        "An attempt has been made to start a new process before the current process has finished "
        "its bootstrapping phase. Start processes below `if __name__ == '__main__':`, because "
        "each of them imports the script."
    )


def run_script(script: Script) -> None:
    """Run a script to its end, in the calling rank.

    Args:
        script: What to run.

    Raises:
        BaseException: Whatever it raises, except an exit without an error.
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
    space = vars(main)
    code, path, spec = script.code, script.path, None
    if script.is_module:
        # What `python -m` does to find it: parents are imported, here as the rank's own.
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
