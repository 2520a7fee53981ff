"""Standard output and error of ranks, with the writing rank in front of each line."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from typing import Any, TextIO

# Writers that are no ranks.
CALLER = -1
"""The process outside of ranks; its text is written unchanged."""
STARTER = -2
"""A script that starts its ranks itself, outside of these."""


class RankOutput(io.TextIOBase):
    """Replacement of a standard stream, which knows the rank that writes.

    All ranks share one object, because a logging handler that holds a stream may be shared too.

    Args:
        stream: The replaced stream.
        writer: Returns the rank that writes, or `CALLER` or `STARTER`.
        shown: Ranks whose lines are shown; None for all.
        kept: Rank whose lines are kept; `CALLER` for none.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        writer: Callable[[], int],
        shown: Collection[int] | None,
        kept: int = CALLER,
    ) -> None:
        super().__init__()
        self._stream = stream
        self._writer = writer
        self._shown = shown
        self._kept = kept
        # The unfinished line of each rank.
        self._begun: dict[int, str] = {}
        self.lines: list[str] = []
        """Lines of the kept rank, and of a starter."""
        # Some programs write bytes to `sys.stdout.buffer`.
        self.buffer = _Bytes(self)

    @property
    def encoding(self) -> str:  # pyrefly: ignore [bad-override]
        """Encoding of the stream."""
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # pyrefly: ignore [bad-override]
        """Error handler of the stream's encoding."""
        return self._stream.errors

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the stream's descriptor, which child processes write to."""
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        """Take text of the rank that runs, and show the lines that it completes."""
        writer = self._writer()
        if writer == CALLER:
            return self._stream.write(text)
        *lines, self._begun[writer] = (self._begun.get(writer, "") + text).split("\n")
        for line in lines:
            self._end_line(writer, line)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        # An unfinished line stays, because another rank could write behind it on the same line.
        self._stream.flush()

    def end_rank(self, rank: int) -> None:
        """Show a rank's unfinished line, once it has ended."""
        line = self._begun.pop(rank, "")
        if line:
            self._end_line(rank, line)

    def _end_line(self, rank: int, line: str) -> None:
        is_starter = rank == STARTER
        if rank == self._kept or (is_starter and self._kept != CALLER):
            self.lines.append(line)
        if is_starter and self._shown != frozenset():
            self._stream.write(f"{line}\n")
        elif self._shown is None or rank in self._shown:
            self._stream.write(f"[rank {rank}]: {line}\n")


class _Bytes(io.BufferedIOBase):
    """Stream of bytes under a `RankOutput`."""

    def __init__(self, text: RankOutput) -> None:
        super().__init__()
        self._text = text

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        # "replace", because a program may write the bytes of one character in two parts.
        self._text.write(bytes(data).decode(self._text.encoding, "replace"))
        return len(data)

    def flush(self) -> None:
        self._text.flush()
