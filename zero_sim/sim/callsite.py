"""Call sites of collectives: the innermost frame that belongs to the program.

Skips frames of torch, Python's own modules, `typing_extensions` (torch wraps deprecated names with
it) and the simulator. So the site is the same for all versions of torch, which wrap functions
differently.
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from os.path import basename, dirname, join
from types import CodeType, FrameType, TracebackType

import torch

_HERE = join(dirname(__file__), "")
_OURS = (_HERE, *(join(dirname(dirname(__file__)), room, "") for room in ("script", "against")))
"""Folders of the simulator, and of the code that runs scripts in it."""
_TORCH = join(dirname(torch.__file__), "")
_STDLIB = join(sysconfig.get_path("stdlib"), "")
_INSTALLED = tuple(join(_STDLIB, each, "") for each in ("site-packages", "dist-packages"))
"""Installed packages may lie in the folder of Python's own modules, but belong to the program."""
# Modules outside torch that wrap its functions, by file name.
_WRAPPERS = frozenset({"typing_extensions.py"})
_THREADS = threading.__file__
# A cache, because every call of every rank looks up its site.
_inside: dict[CodeType, bool] = {}


def _is_inside(code: CodeType) -> bool:
    name = code.co_filename
    # Generated code has names such as `<string>` or `<frozen runpy>`.
    if name.startswith((*_OURS, _TORCH, "<")) or basename(name) in _WRAPPERS:
        return True
    return name.startswith(_STDLIB) and not name.startswith(_INSTALLED)


def call_site() -> tuple[str, int]:
    """Return file and line of the program's call; `("", 0)` if every frame is library code."""
    frame = sys._getframe(1)
    unnamed = "", 0
    while frame is not None:
        code = frame.f_code
        inside = _inside.get(code)
        if inside is None:
            inside = _inside[code] = _is_inside(code)
        if not inside:
            return code.co_filename, frame.f_lineno
        if not unnamed[0] and frame.f_globals.get("__name__") == "__main__":
            # A program without a file, as with `python -c`.
            unnamed = code.co_filename, frame.f_lineno
        frame = frame.f_back
    return unnamed


_FACES = (
    join(_TORCH, "distributed", "distributed_c10d.py"),
    join(_TORCH, "distributed", "c10d_"),
    join(_TORCH, "overrides.py"),
)
"""Paths of torch's public functions and their wrappers, as prefixes."""


def is_of_torch() -> bool:
    """Return True if torch's own code made the running call, not the program."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        # A `TorchFunctionMode` only passes on calls of c10d's functions.
        is_between = code.co_name == "__torch_function__" or basename(name) in _WRAPPERS
        if not (is_between or name.startswith((_HERE, "<", *_FACES))):
            return name.startswith(_TORCH)
        frame = frame.f_back
    return False


def here() -> str:
    """Return the call site as `file:line`."""
    return site_of(*call_site())


def site_of(file: str, line: int) -> str:
    """Return `file:line`, with the file as in `shown_file`."""
    return f"{shown_file(file)}:{line}"


def shown_file(file: str) -> str:
    """Return a file's path, relative to the working directory if it lies below."""
    try:
        folder = join(os.getcwd(), "")
    except OSError:
        return file  # The working directory is gone.
    return file.removeprefix(folder)


def shown_stack(frame: FrameType | None = None) -> str:
    """Format a rank's stack up to `frame` (the caller's by default), without the simulator."""
    frames = traceback.extract_stack(frame or sys._getframe(1))
    # Drop the start of the thread, which is in Python's `threading`. Later frames of `threading`
    # belong to the program.
    led = itertools.dropwhile(lambda each: each.filename.startswith((*_OURS, _THREADS)), frames)
    shown = [each for each in led if not each.filename.startswith(_OURS)]
    # If all frames are the simulator's, show them: any stack is better than none.
    return "".join(traceback.format_list(shown or frames))


def raising_site(error: BaseException) -> tuple[str, int]:
    """Return file and line of the program's call that raised `error`."""
    site, entry = ("", 0), error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        if not _is_inside(code):
            # Inner frames overwrite outer frames, because a traceback begins with the outermost.
            site = code.co_filename, entry.tb_lineno
        entry = entry.tb_next
    return site


def program_traceback(error: BaseException) -> TracebackType | None:
    """Return an error's traceback with the program's frames only."""
    return _kept(error.__traceback__, inside=_is_inside)


def hide_simulator(error: BaseException) -> None:
    """Remove the simulator's frames from the tracebacks of an error and its causes."""
    # Causes and contexts can form a circle.
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _kept(
            each.__traceback__, inside=lambda code: code.co_filename.startswith(_OURS)
        )
        waiting += [each.__cause__, each.__context__]


def _kept(
    entry: TracebackType | None, *, inside: Callable[[CodeType], bool]
) -> TracebackType | None:
    frames = []
    while entry is not None:
        if not inside(entry.tb_frame.f_code):
            frames.append(entry)
        entry = entry.tb_next
    # An outer entry links to the next inner entry, so build the copy from the inside.
    kept = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept
