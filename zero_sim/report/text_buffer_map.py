"""The buffer map as text: a flat buffer as rows of characters, with differences marked below.

In a small buffer, a character is an element. A large buffer has two pictures: all of it with
several elements per character, then the surroundings of the first difference, element by element.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from zero_sim.report.amounts import cut_middle

if TYPE_CHECKING:
    from zero_sim.findings.records import BufferMap, MappedPiece

WIDTH = 96
"""Characters per line. With a case's indentation, lines fit into 100 characters."""
NAMES_MAX = 12
"""Params to name below a picture."""

_LABEL_CHARS = 8
_CELLS_MAX = WIDTH - _LABEL_CHARS
_DIGITS = string.digits + string.ascii_lowercase
_LETTERS = string.ascii_letters
_TICK_CHARS = 10

_NOBODY = "?"
_PADDING = "."
_SEVERAL = "+"
_NOTHING = " "
# In the row of ranks: no rank reports this shard, because its rank owns no element.
_UNKNOWN = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """A range of the buffer, with `per_char` elements per character."""

    start: int
    stop: int
    per_char: int

    @property
    def cells(self) -> int:
        # Rounded up, so that a partly filled last character is shown.
        return -(-(self.stop - self.start) // self.per_char)

    def cells_of(self, start: int, stop: int) -> range:
        """Return the characters that contain elements of a span."""
        start, stop = max(start, self.start), min(stop, self.stop)
        if start >= stop:
            return range(0)
        first = (start - self.start) // self.per_char
        return range(first, (stop - 1 - self.start) // self.per_char + 1)


def draw_buffer_map(buffer_map: BufferMap) -> list[str]:
    """Draw a buffer map as lines of at most `WIDTH` ASCII characters."""
    lines = [describe_buffer_map(buffer_map)]
    # If all elements differ, a sentence shows as much as a picture.
    if equal_elems(buffer_map) == 0:
        return [*lines, describe_spread(buffer_map)]
    if (buffer_map.start, buffer_map.stop) != (0, buffer_map.elems):
        lines.append(f"shown: elements [{buffer_map.start:,}, {buffer_map.stop:,})")
    numel = buffer_map.stop - buffer_map.start
    if numel > _CELLS_MAX:
        per_char = -(-numel // _CELLS_MAX)
        view = _View(start=buffer_map.start, stop=buffer_map.stop, per_char=per_char)
        lines.append(f"all, {per_char:,} elements per character ({_SEVERAL}: several in one):")
        # Without params, because a character may cover several of them.
        lines.extend(_draw(buffer_map, view, with_params=False))
        lines.append("around the first difference, 1 element per character:")
    view = _zoom(buffer_map)
    lines.extend(_draw(buffer_map, view, with_params=True))
    lines.extend(_legend(buffer_map, view))
    return [line.rstrip() for line in lines]


def equal_elems(buffer_map: BufferMap) -> int | None:
    """Return the number of equal param elements; None if the map omits elements."""
    if buffer_map.differ_cut or (buffer_map.start, buffer_map.stop) != (0, buffer_map.elems):
        return None
    inside = sum(
        max(0, min(piece.stop, stop) - max(piece.start, start))
        for piece in buffer_map.pieces
        for start, stop in buffer_map.differ
    )
    # Only pieces count, because padding belongs to no param.
    return sum(piece.stop - piece.start for piece in buffer_map.pieces) - inside


def describe_spread(buffer_map: BufferMap) -> str:
    """Describe a buffer map in which nearly all elements differ, as a sentence."""
    equal = equal_elems(buffer_map)
    params = len({piece.param for piece in buffer_map.pieces})
    but = f" but {_counted(equal, 'element')}" if equal else ""
    return (
        f"all of it differs{but}: "
        f"{_counted(params, 'param')} in {_counted(len(buffer_map.buckets), 'bucket')} and "
        f"{_counted(len(buffer_map.shards), 'shard')}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_buffer_map(buffer_map: BufferMap) -> str:
    """Summarise a buffer map in one sentence."""
    count = len(buffer_map.differ)
    marked = sum(stop - start for start, stop in buffer_map.differ)
    differ = f"{marked:,} differ" if marked != 1 else "1 differs"
    spans = f"in {count} span{'' if count == 1 else 's'}"
    if buffer_map.differ_cut:
        differ, spans = f"{marked:,} or more differ", f"in more than the {count} spans shown"
    line = f"flat buffer {buffer_map.buffer}, {buffer_map.elems:,} elements: {differ}, {spans}"
    if buffer_map.differ_ranks:
        word = "rank" if len(buffer_map.differ_ranks) == 1 else "ranks"
        line += f", on {word} {in_runs(buffer_map.differ_ranks)}"
    return line


def _zoom(buffer_map: BufferMap) -> _View:
    numel = buffer_map.stop - buffer_map.start
    start = buffer_map.start
    if numel > _CELLS_MAX and buffer_map.differ:
        # Put a third of the line before the difference. Round to tens for a readable ruler.
        start = max(buffer_map.start, (buffer_map.differ[0][0] - _CELLS_MAX // 3) // 10 * 10)
        # Near the end of the buffer, move back to fill the line.
        start = max(buffer_map.start, min(start, buffer_map.stop - _CELLS_MAX))
    return _View(start=start, stop=min(buffer_map.stop, start + _CELLS_MAX), per_char=1)


def _draw(buffer_map: BufferMap, view: _View, *, with_params: bool) -> Iterator[str]:
    yield _line("offset", _ruler(view))
    yield _line(
        "bucket",
        _row(
            view, [(b.start, b.stop, _DIGITS[b.index % len(_DIGITS)]) for b in buffer_map.buckets]
        ),
    )
    yield _line("rank", _rank_row(buffer_map, view))
    if with_params:
        letters = _letters_of(buffer_map, view)
        rows = [
            (p.start, p.stop, letters[p.param]) for p in buffer_map.pieces if p.param in letters
        ]
        rows += [(start, stop, _PADDING) for start, stop in buffer_map.padding]
        rows += [(start, stop, _NOBODY) for start, stop in buffer_map.unowned]
        yield _line("param", _row(view, rows))
    # Mark a character if any of its elements differs, so that no difference is hidden.
    marks = [_NOTHING] * view.cells
    for start, stop in buffer_map.differ:
        for cell in view.cells_of(start, stop):
            marks[cell] = "^"
    yield _line("differ", "".join(marks))


def _line(label: str, cells: str) -> str:
    return f"{label:<{_LABEL_CHARS}}{cells}"


def _row(view: _View, spans: Sequence[tuple[int, int, str]]) -> str:
    """Return each cell's character: its span's, or `+` if it has several spans."""
    cells = [_NOTHING] * view.cells
    for start, stop, char in spans:
        for cell in view.cells_of(start, stop):
            cells[cell] = char if cells[cell] in (_NOTHING, char) else _SEVERAL
    return "".join(cells)


def _rank_row(buffer_map: BufferMap, view: _View) -> str:
    shards = [(s.start, s.stop, _DIGITS[s.ranks[0] % len(_DIGITS)]) for s in buffer_map.shards]
    return _row(view, shards).replace(_NOTHING, _UNKNOWN)


def _ruler(view: _View) -> str:
    """Return offsets for every tenth character, except where they would overlap."""
    # With room on the right, because the last offset may be wider than the remaining cells.
    cells = [_NOTHING] * (view.cells + _TICK_CHARS)
    free = 0
    for cell in range(0, view.cells, _TICK_CHARS):
        text = str(view.start + cell * view.per_char)
        if cell >= free and cell + len(text) <= _CELLS_MAX:
            cells[cell : cell + len(text)] = text
            free = cell + len(text) + 1
    return "".join(cells)[:_CELLS_MAX]


def _seen(buffer_map: BufferMap, view: _View) -> list[MappedPiece]:
    return [p for p in buffer_map.pieces if p.start < view.stop and view.start < p.stop]


def _letters_of(buffer_map: BufferMap, view: _View) -> dict[str, str]:
    """Return a letter for each param in view. Neighbours never share a letter."""
    names = dict.fromkeys(piece.param for piece in _seen(buffer_map, view))
    return {name: _LETTERS[i % len(_LETTERS)] for i, name in enumerate(names)}


def _legend(buffer_map: BufferMap, view: _View) -> Iterator[str]:
    letters = _letters_of(buffer_map, view)
    bad = {
        piece.param
        for piece in _seen(buffer_map, view)
        if any(piece.start < stop and start < piece.stop for start, stop in buffer_map.differ)
    }
    # If room is short, prefer params with differences.
    names = sorted(letters, key=lambda name: name not in bad)[:NAMES_MAX]
    entries = [f"{letters[n]} {_short(n)}" for n in letters if n in names]
    if len(letters) > len(names):
        entries.append(f"and {len(letters) - len(names)} more")
    if any(start < view.stop and view.start < stop for start, stop in buffer_map.padding):
        entries.append(f"{_PADDING} padding")
    if any(start < view.stop and view.start < stop for start, stop in buffer_map.unowned):
        entries.append(f"{_NOBODY} owned by no rank")
    yield from _wrapped("param", entries)
    shared = [
        f"{_DIGITS[ranks[0] % len(_DIGITS)]} ranks {in_runs(ranks)}"
        for ranks in dict.fromkeys(shard.ranks for shard in buffer_map.shards)
        # A single rank below 36 is shown as its own digit, so it needs no legend.
        if len(ranks) > 1 or ranks[0] >= len(_DIGITS)
    ]
    entries = shared[:NAMES_MAX]
    if len(shared) > NAMES_MAX:
        entries.append(f"and {len(shared) - NAMES_MAX} more")
    if _UNKNOWN in _rank_row(buffer_map, view):
        entries.append(f"{_UNKNOWN} shard of a rank that owns no element")
    yield from _wrapped("rank", entries)


def _wrapped(label: str, entries: Sequence[str]) -> Iterator[str]:
    line = ""
    for entry in entries:
        if line and len(line) + 2 + len(entry) > _CELLS_MAX:
            yield _line(label, line)
            label, line = "", ""
        line = f"{line}  {entry}" if line else entry
    if line:
        yield _line(label, line)


def _short(name: str) -> str:
    """Return a name in ASCII; cut the middle of a long name."""
    # Drop the quotes that ascii() adds.
    return cut_middle(ascii(name)[1:-1], _CELLS_MAX // 2)


def in_runs(numbers: Sequence[int]) -> str:
    """Return numbers as at most eight ascending runs, such as `0-2, 5 and 3 runs more`.

    Args:
        numbers: Distinct numbers >= 0, such as ranks.
    """
    # -2 is not next to any number, so the first number starts a run.
    runs: list[list[int]] = []
    for before, number in pairwise([-2, *sorted(numbers)]):
        if number == before + 1:
            runs[-1][-1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} runs more" if len(texts) > 8 else "")
