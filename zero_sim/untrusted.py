"""Untrusted input: text to be shown, files to be read, and how deep they nest.

Names come from scenario files, bundles and the modules of systems under test. Printed as they are,
they could forge lines of a report, recolour or rename a terminal, or turn text around.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

WORD_CHARS_MAX = 300
LINE_CHARS_MAX = 3000
NESTING_MAX = 32
"""Tables and arrays within each other; the deepest that any file of ours has is about ten."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a link"),
)


_LONG_WORD = re.compile(rf"\S{{{WORD_CHARS_MAX + 1},}}")


class Unreadable(Exception):
    """A file is not there, is no regular one, is too large or cannot be read; says which."""


def printable(text: str, *, lines: bool = False) -> str:
    r"""A text with everything spelled out that is not seen: `\n`, `\x1b`, `\u202e`.

    Control characters, those that turn text around or hide, blanks other than a space, and halves
    of characters. What is left cannot do anything to a terminal, and always can be encoded.

    Args:
        text: Anything.
        lines: Whether it may have several lines, and tabs in them.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text
    )


def clipped(text: str) -> str:
    """A message without the middle of its long words and lines: a value in it may be of any length.

    Words keep `WORD_CHARS_MAX` characters, which is more than most paths have, and lines
    `LINE_CHARS_MAX`.
    """
    if len(text) <= WORD_CHARS_MAX:
        return text
    text = _LONG_WORD.sub(lambda word: _without_middle(word[0], most=WORD_CHARS_MAX), text)
    return "\n".join(_without_middle(line, most=LINE_CHARS_MAX) for line in text.split("\n"))


def _without_middle(text: str, *, most: int) -> str:
    if len(text) <= most:
        return text
    head, tail = most * 2 // 3, most // 3
    return f"{text[:head]}[... {len(text) - head - tail:,} characters ...]{text[-tail:]}"


def open_regular(path: Path, *, follow: bool = True, append: bool = False) -> BinaryIO:
    """Open a regular file for reading; nothing else is even opened.

    A pipe would be waited for without end, a device read without end.

    Args:
        path: The file.
        follow: Whether it may be a link to one.
        append: Whether it is opened for writing at its end, too, unbuffered.

    Raises:
        Unreadable: It is no regular file.
        OSError: It is not there, or cannot be opened.
    """
    _require_regular(os.stat(path, follow_symlinks=follow).st_mode)
    # What was regular a moment ago may be something else now: it is not followed or waited for.
    flags = os.O_RDWR | os.O_APPEND if append else os.O_RDONLY
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags)
    try:
        _require_regular(os.fstat(handle).st_mode)
        return open(handle, "ab+", buffering=0) if append else open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, *, bytes_max: int, follow: bool = True) -> bytes:
    """The content of a regular file; nothing else is even opened.

    Args:
        path: The file.
        bytes_max: Most bytes that it may have.
        follow: Whether it may be a link to one.

    Raises:
        Unreadable: It is not there or none, is larger, or cannot be read.
    """
    try:
        with open_regular(path, follow=follow) as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise Unreadable(error.strerror or type(error).__name__) from None
    except ValueError as error:
        # A NUL in the path.
        raise Unreadable(str(error)) from None
    if len(data) > bytes_max:
        raise Unreadable(f"more than {bytes_max:,} bytes")
    return data


def nests_too_deep(value: object, *, most: int = NESTING_MAX) -> bool:
    """Whether dicts and lists lie deeper within each other than any recursion should follow.

    Args:
        value: What was parsed.
        most: Levels that are not too deep.
    """
    level = [value]
    for _ in range(most + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "something else")
        raise Unreadable(f"{kind}, not a regular file")
