"""Terminals: whether what is written there may hold control codes."""

from __future__ import annotations

import os
from typing import TextIO


def takes_codes(stream: TextIO) -> bool:
    """Whether colours, spinners and lines that are written again belong on a stream.

    Not where it is no terminal, or one that knows no codes, and nowhere if the environment says
    NO_COLOR, which who sets it means of all of them.
    """
    dumb = os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")
