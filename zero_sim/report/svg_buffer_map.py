"""The buffer map as SVG, for the HTML report: as wide as the screen.

Places are in percent of the width, so that boxes become narrower and text does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_sim.report.markup import Markup, element, joined

if TYPE_CHECKING:
    from zero_sim.findings.records import BufferMap

ROW = 22
GAP = 4
DETAIL_ELEMS = 96
"""Elements of the second picture, which shows the surroundings of the first difference."""

_TOP = 18
_WIDE, _NARROW = 900, 260
"""Pixels of a picture on a large screen and on a small one."""
_CHAR_WIDTH = 7
_ROWS = ("bucket", "rank", "param", "differs")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    start: int
    stop: int

    def x(self, element_: int) -> float:
        """Where an element begins, in percent of the width."""
        inside = min(max(element_, self.start), self.stop) - self.start
        return inside * 100 / (self.stop - self.start)


def buffer_map_pictures(buffer_map: BufferMap) -> Markup:
    """The buffer map, and where it is large its surroundings of the first difference below it."""
    pictures = [_picture(buffer_map, _Frame(start=buffer_map.start, stop=buffer_map.stop))]
    if buffer_map.stop - buffer_map.start > 2 * DETAIL_ELEMS and buffer_map.differ:
        start = max(buffer_map.start, buffer_map.differ[0][0] - DETAIL_ELEMS // 4)
        start = max(buffer_map.start, min(start, buffer_map.stop - DETAIL_ELEMS))
        pictures.append(element("p", "Around the first difference:"))
        pictures.append(_picture(buffer_map, _Frame(start=start, stop=start + DETAIL_ELEMS)))
    return joined(pictures)


def _picture(buffer_map: BufferMap, frame: _Frame) -> Markup:
    height = _TOP + len(_ROWS) * (ROW + GAP)
    parts = [
        *_ruler(frame),
        *_parts(buffer_map, frame, _TOP),
        *_marks(buffer_map, frame, height=height),
    ]
    labels = element("div", *(element("span", label) for label in _ROWS), class_="labels")
    svg = element("svg", *parts, width="100%", height=height, role="img", class_="strip")
    return element("div", labels, svg, class_="picture")


def _ruler(frame: _Frame) -> Iterator[Markup]:
    numel = frame.stop - frame.start
    # As many as fit side by side on a small screen.
    count = max(2, _NARROW // (_CHAR_WIDTH * (len(f"{frame.stop:,}") + 1)))
    step = max(1, -(-numel // min(8, count)))
    for offset in range(frame.start, frame.stop, step):
        yield element("text", f"{offset:,}", x=f"{frame.x(offset):.3f}%", y=12, class_="tick")


def _parts(buffer_map: BufferMap, frame: _Frame, top: int) -> Iterator[Markup]:
    rows = [top + i * (ROW + GAP) for i in range(3)]
    for bucket in buffer_map.buckets:
        title = f"bucket {bucket.index}: elements [{bucket.start}, {bucket.stop})"
        yield from _box(frame, bucket.start, bucket.stop, rows[0], str(bucket.index), title, "")
    for shard in buffer_map.shards:
        ranks = ", ".join(map(str, shard.ranks))
        title = (
            f"rank {ranks}: shard {shard.index} of bucket {shard.bucket}, elements "
            f"[{shard.start}, {shard.stop})"
        )
        hue = _hue(shard.ranks[0])
        yield from _box(frame, shard.start, shard.stop, rows[1], ranks, title, hue)
    numbers: dict[str, int] = {}
    for piece in buffer_map.pieces:
        number = numbers.setdefault(piece.param, len(numbers))
        stop = piece.param_start + piece.stop - piece.start
        title = f"{piece.param}[{piece.param_start}:{stop}]: elements [{piece.start}, {piece.stop})"
        hue = _hue(number + 2)
        yield from _box(frame, piece.start, piece.stop, rows[2], piece.param, title, hue)
    for name, spans in (("padding", buffer_map.padding), ("unowned", buffer_map.unowned)):
        for start, stop in spans:
            title = f"{name}: elements [{start}, {stop})"
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
        x=f"{left:.3f}%",
        y=top,
        width=f"{width:.3f}%",
        height=ROW,
        class_=class_,
        style=f"fill:{fill}" if fill else None,
    )
    room = int((width * _WIDE / 100 - 6) / _CHAR_WIDTH)
    if room >= min(len(label), 4) and room > 0:
        shown = label if len(label) <= room else f"{label[: room - 1]}\u2026"
        text = element("text", shown, x=3, y=15, class_="in")
        # A box of its own cuts off what does not fit on a smaller screen.
        box = {"x": f"{left:.3f}%", "y": top, "width": f"{width:.3f}%", "height": ROW}
        yield element("svg", text, **box)


def _marks(buffer_map: BufferMap, frame: _Frame, *, height: int) -> Iterator[Markup]:
    for start, stop in buffer_map.differ:
        if start >= frame.stop or stop <= frame.start:
            continue
        left, width = frame.x(start), frame.x(stop) - frame.x(start)
        title = element("title", f"differs: elements [{start}, {stop})")
        # However narrow: an outline of some pixels is part of the mark.
        box = {"x": f"{left:.3f}%", "width": f"{width:.3f}%"}
        yield element("rect", y=_TOP, height=height - _TOP, class_="veil", **box)
        row = _TOP + 3 * (ROW + GAP)
        yield element("rect", title, y=row, height=ROW, class_="differs", **box)


def _hue(number: int) -> str:
    """A colour far from those of neighbouring numbers."""
    return f"hsl({number * 137 % 360} 60% 78%)"
