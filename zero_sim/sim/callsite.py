"""The call site of a collective: the innermost frame of no library that all programs share.

Those are torch, Python's own modules, `typing_extensions`, which torch wraps deprecated names with,
and the simulator. So the site does not depend on how a version of torch wraps its functions.
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
"""The simulator, and what runs and observes a script in it."""
_TORCH = join(dirname(torch.__file__), "")
_STDLIB = join(sysconfig.get_path("stdlib"), "")
_INSTALLED = tuple(join(_STDLIB, each, "") for each in ("site-packages", "dist-packages"))
"""What others wrote may lie below Python's own modules."""
_WRAPPERS = frozenset({"typing_extensions.py"})
_THREADS = threading.__file__
_inside: dict[CodeType, bool] = {}


def _is_inside(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith((*_OURS, _TORCH, "<")) or basename(name) in _WRAPPERS:
        return True
    return name.startswith(_STDLIB) and not name.startswith(_INSTALLED)


def call_site() -> tuple[str, int]:
    """File and line of the program's own call; `("", 0)` where every frame is library code."""
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
            unnamed = code.co_filename, frame.f_lineno  # A program without a file, as in `-c`.
        frame = frame.f_back
    return unnamed


_FACES = (
    join(_TORCH, "distributed", "distributed_c10d.py"),
    join(_TORCH, "distributed", "c10d_"),
    join(_TORCH, "overrides.py"),
)
"""Where torch's functions for programs stand, and what wraps them."""


def is_of_torch() -> bool:
    """Whether the running call was made by torch's own code, and not by a program through it."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        # A mode, anybody's, that c10d's functions go through hands on what others call.
        is_between = code.co_name == "__torch_function__" or basename(name) in _WRAPPERS
        if not (is_between or name.startswith((_HERE, "<", *_FACES))):
            return name.startswith(_TORCH)
        frame = frame.f_back
    return False


def here() -> str:
    """The call site as people read it."""
    return site_of(*call_site())


def site_of(file: str, line: int) -> str:
    """`file:line`, the file relative to the working directory where it lies under it."""
    return f"{shown_file(file)}:{line}"


def shown_file(file: str) -> str:
    """A file as people read it: relative to the working directory where it lies under it."""
    try:
        folder = join(os.getcwd(), "")
    except OSError:
        return file  # The working directory is gone.
    return file.removeprefix(folder)


def shown_stack(frame: FrameType | None = None) -> str:
    """The way from the program of a rank to a frame, without what led to it and the simulator.

    Args:
        frame: Where a rank is; the caller's where left out.
    """
    frames = traceback.extract_stack(frame or sys._getframe(1))
    # A thread begins in Python's own module and in the simulator.
    led = itertools.dropwhile(lambda each: each.filename.startswith((*_OURS, _THREADS)), frames)
    shown = [each for each in led if not each.filename.startswith(_OURS)]
    return "".join(traceback.format_list(shown or frames))


def raising_site(error: BaseException) -> tuple[str, int]:
    """File and line of the program's own call that raised `error`; as `call_site` otherwise."""
    site, entry = ("", 0), error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        if not _is_inside(code):
            site = code.co_filename, entry.tb_lineno
        entry = entry.tb_next
    return site


def program_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of an error with the frames of the program alone."""
    return _kept(error.__traceback__, inside=_is_inside)


def hide_simulator(error: BaseException) -> None:
    """Take the simulator's own frames out of the tracebacks of an error and of what led to it."""
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
    kept = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept
