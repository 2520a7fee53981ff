"""Standard streams of ranks: each line is told apart by who wrote it."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from typing import Any, TextIO

CALLER = -1
STARTER = -2
"""Writer of a script that starts its ranks, outside of them."""


class RankOutput(io.TextIOBase):
    """Stands where a stream of the process stood; tells apart who writes.

    One object for all ranks, since what keeps a stream, as a logging handler does, may be shared.

    Args:
        stream: The stream in whose place it stands.
        writer: Who writes: a rank, -1, whose text goes on unchanged, or -2, the ranks' starter.
        shown: Ranks whose lines are shown; None for all.
        kept: The rank whose lines are kept; -1 for none.
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
        self._begun: dict[int, str] = {}
        """The line that a rank has not ended yet."""
        self.lines: list[str] = []
        """What the kept rank wrote."""
        self.buffer = _Bytes(self)

    @property
    def encoding(self) -> str:  # pyrefly: ignore [bad-override]
        """The stream's."""
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # pyrefly: ignore [bad-override]
        """How the stream writes what its encoding lacks."""
        return self._stream.errors

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The stream's, for what other programs write."""
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        """Take in some text, and show the lines that it ends."""
        writer = self._writer()
        if writer == CALLER:
            return self._stream.write(text)
        *lines, self._begun[writer] = (self._begun.get(writer, "") + text).split("\n")
        for line in lines:
            self._end_line(writer, line)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; a line that is not ended waits, lest two ranks be on one."""
        self._stream.flush()

    def end_rank(self, rank: int) -> None:
        """Show the line that a rank has not ended, after its last."""
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
    """The stream of bytes below, for who writes those."""

    def __init__(self, text: RankOutput) -> None:
        super().__init__()
        self._text = text

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._text.write(bytes(data).decode(self._text.encoding, "replace"))
        return len(data)

    def flush(self) -> None:
        self._text.flush()
