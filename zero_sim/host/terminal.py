"""Terminals, and whether output to them may contain control codes."""

from __future__ import annotations

import os
import shutil
from typing import TextIO


def takes_codes(stream: TextIO) -> bool:
    """Return True if colours, spinners and rewritten lines may be written to a stream.

    False if it is no terminal, or TERM is `dumb`, or the environment sets NO_COLOR.
    """
    # NO_COLOR counts for all kinds of codes: its user wants plain text.
    dumb = os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")


def columns_of(stream: TextIO) -> int | None:
    """Return the characters of a line on a terminal; None for a stream that is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
