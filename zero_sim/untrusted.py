"""Untrusted input: text to show, files to read, and nested values.

Names come from scenario files, bundles and modules under test. Printed unchanged, they could forge
report lines, recolour or rename a terminal, or reverse text.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

# Nearly all paths are shorter.
WORD_CHARS_MAX = 300
LINE_CHARS_MAX = 3000
NESTING_MAX = 32
"""Levels of nested tables and arrays. zero_sim's own files have about ten."""

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
    """A file that is absent, no regular file, too large or unreadable."""


def printable(text: str, *, lines: bool = False) -> str:
    r"""Spell out a text's invisible characters: `\n`, `\x1b`, `\u202e`.

    These are control characters, characters that reverse or hide text, blanks other than a space,
    and surrogates. The result has no effect on a terminal, and can always be encoded. With `lines`,
    line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        # ascii() spells out a character within quotes, which are cut off.
        char if char.isprintable() or char in kept else ascii(char)[1:-1]
        for char in text
    )


def clipped(text: str) -> str:
    """Shorten a message with long values: cut the middle of words and lines.

    Words keep `WORD_CHARS_MAX` characters, and lines `LINE_CHARS_MAX`.
    """
    # Common case: no word or line can be too long.
    if len(text) <= WORD_CHARS_MAX:
        return text
    # Words first, because one long value must not hide the rest of its line.
    text = _LONG_WORD.sub(lambda word: _without_middle(word[0], most=WORD_CHARS_MAX), text)
    return "\n".join(_without_middle(line, most=LINE_CHARS_MAX) for line in text.split("\n"))


def _without_middle(text: str, *, most: int) -> str:
    if len(text) <= most:
        return text
    # Keep most of the beginning, and the end, which is often a file name.
    head, tail = most * 2 // 3, most // 3
    return f"{text[:head]}[... {len(text) - head - tail:,} characters ...]{text[-tail:]}"


def open_regular(path: Path, *, follow: bool = True, append: bool = False) -> BinaryIO:
    """Open a regular file for reading. Refuse any other kind.

    A pipe would block, and a device may have no end. With `follow`, a link to a regular file is
    allowed. With `append`, the file is also open for unbuffered writing at its end.

    Raises:
        Unreadable: It is not a regular file.
        OSError: It does not exist, or cannot be opened.
    """
    _require_regular(os.stat(path, follow_symlinks=follow).st_mode)
    # The file may be replaced after this check. So do not follow links or wait for a pipe here, and
    # check the opened file again.
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
    """Read a regular file, or with `follow` a link to one. Refuse any other kind.

    Raises:
        Unreadable: It does not exist, is not a regular file, is larger, or cannot be read.
    """
    try:
        with open_regular(path, follow=follow) as file:
            # One byte over the limit shows a file that is too large, whatever size it reports.
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise Unreadable(error.strerror or type(error).__name__) from None
    except ValueError as error:
        # A path with a NUL character.
        raise Unreadable(str(error)) from None
    if len(data) > bytes_max:
        raise Unreadable(f"more than {bytes_max:,} bytes")
    return data


def nests_too_deep(value: object, *, most: int = NESTING_MAX) -> bool:
    """Return True if dicts and lists are nested too deeply for recursion."""
    # Level by level, because the input would decide the depth of a recursion.
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
