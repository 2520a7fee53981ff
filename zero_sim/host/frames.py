"""The user's frames in a traceback, without frames of zero_sim and Python itself."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

FRAMES_MAX = 8
_PACKAGE = str(Path(__file__).parents[1])
_PYTHON = str(Path(traceback.__file__).parent)


def is_of_user(file: str) -> bool:
    """Return True if a file belongs neither to zero_sim nor to Python's own modules."""
    is_pythons = file.startswith("<frozen ") or (
        # Installed packages may lie in Python's own folder.
        file.startswith(_PYTHON) and "site-packages" not in file
    )
    return not is_pythons and not file.startswith(_PACKAGE)


def show_frames(frames: Sequence[traceback.FrameSummary]) -> str:
    """Format the user's frames as in a traceback; empty if there are none."""
    return "".join(traceback.format_list(_theirs(frames))).rstrip()


def show_error(error: BaseException) -> str:
    """Format an error and its causes, with the user's frames only."""
    formatted = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    cause: traceback.TracebackException | None = formatted
    # Causes may form a circle.
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.stack = traceback.StackSummary.from_list(_theirs(cause.stack))
        cause = cause.__cause__ or cause.__context__
    return "".join(formatted.format()).rstrip()


def _theirs(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the user's last frames: below zero_sim's last frame, or if there are none, of all."""
    ours = [i for i, frame in enumerate(frames) if frame.filename.startswith(_PACKAGE)]
    below = frames[ours[-1] + 1 :] if ours else []
    # Below zero_sim's last frame is code that it called, such as a user's engine.
    for some in (below, frames):
        theirs = [frame for frame in some if is_of_user(frame.filename)]
        if theirs:
            return theirs[-FRAMES_MAX:]
    return []
