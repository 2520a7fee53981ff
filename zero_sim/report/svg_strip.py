"""The strip picture as SVG, for the HTML report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_sim.report.markup import Markup, element, joined

if TYPE_CHECKING:
    from zero_sim.verify.records import Strip

WIDTH = 1000
LEFT = 60
ROW = 22
GAP = 4
DETAIL_ELEMS = 96
"""Elements of the second picture, which shows the surroundings of the first difference."""
MARK_WIDTH_MIN = 3
"""However large the buffer, what differs is this wide."""

_CHAR_WIDTH = 7
_ROWS = ("bucket", "rank", "param", "differs")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    start: int
    stop: int

    def x(self, element_: int) -> float:
        inside = min(max(element_, self.start), self.stop) - self.start
        return LEFT + inside * (WIDTH - LEFT) / (self.stop - self.start)


def strip_pictures(strip: Strip) -> Markup:
    """The strip, and where it is large its surroundings of the first difference below it."""
    pictures = [_picture(strip, _Frame(start=strip.start, stop=strip.stop))]
    if strip.stop - strip.start > 2 * DETAIL_ELEMS and strip.differ:
        start = max(strip.start, strip.differ[0][0] - DETAIL_ELEMS // 4)
        start = max(strip.start, min(start, strip.stop - DETAIL_ELEMS))
        pictures.append(element("p", "Around the first difference:"))
        pictures.append(_picture(strip, _Frame(start=start, stop=start + DETAIL_ELEMS)))
    return joined(pictures)


def _picture(strip: Strip, frame: _Frame) -> Markup:
    top = 18
    height = top + len(_ROWS) * (ROW + GAP)
    parts = [
        *_ruler(frame),
        *(
            element("text", label, x=0, y=top + i * (ROW + GAP) + 15, class_="label")
            for i, label in enumerate(_ROWS)
        ),
        *_parts(strip, frame, top),
        *_marks(strip, frame, top=top, height=height),
    ]
    # Without a size of its own, the picture is as wide as its box.
    svg = element("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", class_="strip")
    return element("div", svg, class_="scroll")


def _ruler(frame: _Frame) -> Iterator[Markup]:
    numel = frame.stop - frame.start
    step = max(1, -(-numel // 8))
    for offset in range(frame.start, frame.stop, step):
        yield element("text", f"{offset:,}", x=f"{frame.x(offset):.1f}", y=12, class_="tick")


def _parts(strip: Strip, frame: _Frame, top: int) -> Iterator[Markup]:
    rows = [top + i * (ROW + GAP) for i in range(3)]
    for bucket in strip.buckets:
        title = f"bucket {bucket.index}: elements {bucket.start} to {bucket.stop}"
        yield from _box(frame, bucket.start, bucket.stop, rows[0], str(bucket.index), title, "")
    for shard in strip.shards:
        ranks = ", ".join(map(str, shard.ranks))
        title = (
            f"rank {ranks}: shard {shard.index} of bucket {shard.bucket}, elements "
            f"{shard.start} to {shard.stop}"
        )
        hue = _hue(shard.ranks[0])
        yield from _box(frame, shard.start, shard.stop, rows[1], ranks, title, hue)
    numbers: dict[str, int] = {}
    for piece in strip.pieces:
        number = numbers.setdefault(piece.param, len(numbers))
        stop = piece.param_start + piece.stop - piece.start
        title = f"{piece.param}[{piece.param_start}:{stop}]: elements {piece.start} to {piece.stop}"
        hue = _hue(number + 2)
        yield from _box(frame, piece.start, piece.stop, rows[2], piece.param, title, hue)
    for name, spans in (("padding", strip.padding), ("unowned", strip.unowned)):
        for start, stop in spans:
            title = f"{name}: elements {start} to {stop}"
            yield from _box(frame, start, stop, rows[2], name, title, "", class_=name)


def _box(
    frame: _Frame,
    start: int,
    stop: int,
    top: int,
    label: str,
    title: str,
    fill: str,
    *,
    class_: str = "part",
) -> Iterator[Markup]:
    if start >= frame.stop or stop <= frame.start:
        return
    left, width = frame.x(start), frame.x(stop) - frame.x(start)
    yield element(
        "rect",
        element("title", title),
        x=f"{left:.2f}",
        y=top,
        width=f"{width:.2f}",
        height=ROW,
        class_=class_,
        style=f"fill:{fill}" if fill else None,
    )
    room = int((width - 6) / _CHAR_WIDTH)
    if room >= min(len(label), 4) and room > 0:
        shown = label if len(label) <= room else f"{label[: room - 1]}\u2026"
        yield element("text", shown, x=f"{left + 3:.2f}", y=top + 15, class_="in")


def _marks(strip: Strip, frame: _Frame, *, top: int, height: int) -> Iterator[Markup]:
    for start, stop in strip.differ:
        if start >= frame.stop or stop <= frame.start:
            continue
        left = frame.x(start)
        width = max(MARK_WIDTH_MIN, frame.x(stop) - left)
        # At the right edge, to the left of it: the mark must not lie outside.
        left = min(left, WIDTH - width)
        title = element("title", f"differs: elements {start} to {stop}")
        box = {"x": f"{left:.2f}", "width": f"{width:.2f}"}
        yield element("rect", y=top, height=height - top, class_="veil", **box)
        row = top + 3 * (ROW + GAP)
        yield element("rect", title, y=row, height=ROW, class_="differs", **box)


def _hue(number: int) -> str:
    """A colour far from those of neighbouring numbers."""
    return f"hsl({number * 137 % 360} 60% 78%)"
