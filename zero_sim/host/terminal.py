"""Terminals: whether what is written there may hold control codes."""

from __future__ import annotations

import os
import shutil
from typing import TextIO


def takes_codes(stream: TextIO) -> bool:
    """Whether colours, spinners and lines that are written again belong on a stream.

    Not where it is no terminal, or one that knows no codes, and nowhere if the environment says
    NO_COLOR, which who sets it means of all of them.
    """
    dumb = os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")


def columns_of(stream: TextIO) -> int | None:
    """Return the characters of a line on a terminal; None for a stream that is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
