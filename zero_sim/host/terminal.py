"""Properties of terminals: support for control codes, and width."""

from __future__ import annotations

import os
import shutil
from typing import TextIO


def takes_codes(stream: TextIO) -> bool:
    """Return True if colours, spinners and rewritten lines may be written to a stream.

    False if the stream is no terminal, or TERM is `dumb`, or the environment sets NO_COLOR.
    """
    # NO_COLOR applies to all control codes, because its user wants plain text.
    dumb = os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")


def columns_of(stream: TextIO) -> int | None:
    """Return a terminal's width in characters; None if the stream is no terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
