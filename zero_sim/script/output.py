"""Ranks' standard output and error. Each line gets the rank as prefix."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from typing import Any, TextIO

# Writers other than ranks.
CALLER = -1
"""The process outside of ranks. Its text gets no prefix."""
STARTER = -2
"""A script's main part, if the script starts its ranks itself."""


class RankOutput(io.TextIOBase):
    """Replacement for a standard stream, which knows the writing rank.

    All ranks share this object, because they may share a logging handler that holds it.

    Args:
        stream: Replaced stream.
        writer: Returns the writing rank, `CALLER` or `STARTER`.
        shown: Ranks whose lines are shown; None for all ranks.
        kept: Rank whose lines are kept; `CALLER` to keep none.
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
        """Lines of the kept rank and of a starter."""
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
        """Add text of the running rank, and show complete lines."""
        writer = self._writer()
        if writer == CALLER:
            return self._stream.write(text)
        *lines, self._begun[writer] = (self._begun.get(writer, "") + text).split("\n")
        for line in lines:
            self._end_line(writer, line)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        # Keep unfinished lines back, because another rank could write on the same line.
        self._stream.flush()

    def end_rank(self, rank: int) -> None:
        """Show a rank's unfinished line when the rank has ended."""
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
    def __init__(self, text: RankOutput) -> None:
        super().__init__()
        self._text = text

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        # "replace", because a program may write a character's bytes in two parts.
        self._text.write(bytes(data).decode(self._text.encoding, "replace"))
        return len(data)

    def flush(self) -> None:
        self._text.flush()
