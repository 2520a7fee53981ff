"""The buffer map as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from zero_sim.report import pages

if TYPE_CHECKING:
    from zero_sim.findings.records import BufferMap

ROW = 22
GAP = 4
DETAIL_ELEMS = 96
"""Elements in the second picture, which shows the first difference and its surroundings."""

_TOP = 18
# Picture width on a large and on a small screen, in pixels.
_WIDE, _NARROW = 900, 260
_CHAR_WIDTH = 7
# View box of an SVG file. Row names take up the left part.
_FILE_WIDTH, _FILE_LEFT = 960, 64
_ROWS = ("bucket", "rank", "param", "differs")
_HEIGHT = _TOP + len(_ROWS) * (ROW + GAP)
_BUCKET, _RANK, _PARAM, _DIFFERS = (_TOP + i * (ROW + GAP) for i in range(len(_ROWS)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    start: int
    stop: int

    def x(self, element: int) -> float:
        """Return an element's left edge, in percent of the width."""
        inside = min(max(element, self.start), self.stop) - self.start
        return inside * 100 / (self.stop - self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Buffer elements, as a box in a row."""

    start: int
    stop: int
    y: int
    title: str = ""
    label: str = ""
    hue: int | None = None
    """Hue in degrees; None for the colour of its class."""
    class_: str = "part"
    height: int = ROW


def buffer_map_pictures(buffer_map: BufferMap) -> Markup:
    """Draw a buffer map for a page, as wide as the screen.

    Below a large map, a second picture shows the first difference and its surroundings.
    """
    frames = [_Frame(start=buffer_map.start, stop=buffer_map.stop)]
    # Only draw a second picture if it shows clearly more detail.
    if buffer_map.stop - buffer_map.start > 2 * DETAIL_ELEMS and buffer_map.differ:
        start = max(buffer_map.start, buffer_map.differ[0][0] - DETAIL_ELEMS // 4)
        start = max(buffer_map.start, min(start, buffer_map.stop - DETAIL_ELEMS))
        frames.append(_Frame(start=start, stop=start + DETAIL_ELEMS))
    spans = [*_parts(buffer_map), *_marks(buffer_map)]
    pictures = [
        {
            "ticks": list(_ruler(frame)),
            "spans": [
                _placed(span, frame)
                for span in spans
                if span.start < frame.stop and frame.start < span.stop
            ],
        }
        for frame in frames
    ]
    rows = _ROWS if buffer_map.differ else _ROWS[:-1]
    height = _TOP + len(rows) * (ROW + GAP)
    return pages.render("buffer_map.html", pictures=pictures, rows=rows, height=height)


def buffer_map_svg(buffer_map: BufferMap, *, title: str) -> str:
    """Draw a buffer map as an SVG file that supports dark mode.

    Args:
        buffer_map: The map.
        title: Text for screen readers.
    """
    frame = _Frame(start=buffer_map.start, stop=buffer_map.stop)
    # y is the text's baseline.
    rows = [
        {"name": name, "y": y + 15}
        for name, y in zip(_ROWS, (_BUCKET, _RANK, _PARAM, _DIFFERS), strict=True)
    ]
    picture = pages.render(
        "buffer_map.svg",
        title=title,
        width=_FILE_WIDTH,
        left=_FILE_LEFT,
        height=_HEIGHT,
        rows=rows,
        ticks=list(_ruler(frame)),
        spans=[_placed(span, frame) for span in (*_parts(buffer_map), *_marks(buffer_map))],
    )
    return "\n".join(line for line in picture.splitlines() if line.strip()) + "\n"


def _ruler(frame: _Frame) -> Iterator[tuple[str, str]]:
    numel = frame.stop - frame.start
    # As many offsets as fit on a small screen.
    count = max(2, _NARROW // (_CHAR_WIDTH * (len(f"{frame.stop:,}") + 1)))
    step = max(1, -(-numel // min(8, count)))
    for offset in range(frame.start, frame.stop, step):
        yield f"{frame.x(offset):.3f}", f"{offset:,}"


def _parts(buffer_map: BufferMap) -> Iterator[_Span]:
    for bucket in buffer_map.buckets:
        start, stop = bucket.start, bucket.stop
        title = f"bucket {bucket.index}: elements [{start}, {stop})"
        yield _Span(start=start, stop=stop, y=_BUCKET, title=title, label=str(bucket.index))
    for shard in buffer_map.shards:
        start, stop = shard.start, shard.stop
        ranks = ", ".join(map(str, shard.ranks))
        title = f"rank {ranks}: shard {shard.index} of bucket {shard.bucket}, elements "
        title += f"[{start}, {stop})"
        hue = _hue(shard.ranks[0])
        yield _Span(start=start, stop=stop, y=_RANK, title=title, label=ranks, hue=hue)
    # All fragments of a param have the same colour. The offset 2 keeps it apart from rank colours.
    numbers: dict[str, int] = {}
    for piece in buffer_map.pieces:
        start, stop, name = piece.start, piece.stop, piece.param
        hue = _hue(numbers.setdefault(name, len(numbers)) + 2)
        in_param = f"{name}[{piece.param_start}:{piece.param_start + stop - start}]"
        title = f"{in_param}: elements [{start}, {stop})"
        yield _Span(start=start, stop=stop, y=_PARAM, title=title, label=name, hue=hue)
    for name, spans in (("padding", buffer_map.padding), ("unowned", buffer_map.unowned)):
        for start, stop in spans:
            title = f"{name}: elements [{start}, {stop})"
            yield _Span(start=start, stop=stop, y=_PARAM, title=title, label=name, class_=name)


def _marks(buffer_map: BufferMap) -> Iterator[_Span]:
    for start, stop in buffer_map.differ:
        height = _HEIGHT - _TOP
        yield _Span(start=start, stop=stop, y=_TOP, class_="veil", height=height)
        title = f"differs: elements [{start}, {stop})"
        # An outline of some pixels keeps the mark of a single element visible.
        yield _Span(start=start, stop=stop, y=_DIFFERS, title=title, class_="differs")


def _placed(span: _Span, frame: _Frame) -> dict[str, object]:
    """Return a span's variables for the template."""
    # In percent, because the picture is as wide as the screen.
    left, width = frame.x(span.start), frame.x(span.stop) - frame.x(span.start)
    # Characters that fit on a large screen. On smaller screens, the template clips labels.
    room = int((width * _WIDE / 100 - 6) / _CHAR_WIDTH)
    label = span.label
    if room <= 0 or room < min(len(label), 4):
        label = ""
    return {
        "x": f"{left:.3f}",
        "y": span.y,
        "width": f"{width:.3f}",
        "height": span.height,
        "class": span.class_,
        "hue": span.hue,
        "title": span.title,
        "label": label if len(label) <= room else f"{label[: room - 1]}\u2026",
    }


def _hue(number: int) -> int:
    """Return a hue in degrees, far from those of neighbouring numbers."""
    # Multiples of the golden angle, 137 degrees, spread evenly.
    return number * 137 % 360
