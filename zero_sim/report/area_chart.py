"""Amounts over time, by category: bars in text, a stacked area chart on pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from zero_sim.report import pages
from zero_sim.report.amounts import aligned, bar

_HEIGHT = 100
"""Units of the view box, which is stretched to the page; its other side is a unit a moment."""
_FIRST_HUE = 215
"""Degrees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Amounts at one moment."""

    name: str
    phase: str
    amounts: Mapping[str, float]
    """By category, such as bytes of `gathered`; a missing category has none."""

    @property
    def total(self) -> float:
        """Amount of all categories."""
        return sum(self.amounts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Amounts over several moments; an amount lasts until the next moment."""

    title: str
    unit: str
    points: Sequence[Point]
    now: int | None = None
    """Index of the point to mark."""

    @property
    def most(self) -> float:
        """The largest total; 1 if all are 0, because heights are shares of it."""
        return max((point.total for point in self.points), default=0) or 1


def render_bars(chart: Chart) -> Iterator[str]:
    """Yield the chart as lines of text, a bar for each point."""
    yield f"{chart.title}, in {chart.unit}"
    rows = [
        [each.name, bar(each.total / chart.most), f"{each.total:,.0f}"] for each in chart.points
    ]
    yield from aligned(rows, words=range(2)).splitlines()


def draw_area(chart: Chart) -> Markup:
    """Draw the chart as wide as the page, with phases beneath and a legend."""
    names = list(dict.fromkeys(name for point in chart.points for name in point.amounts))
    areas = [
        {
            "name": name.replace("_", " "),
            "hue": _hue(index, len(names)),
            "path": _outline(chart, names[: index + 1]),
        }
        for index, name in enumerate(names)
    ]
    phases = [
        (name, len(list(run))) for name, run in groupby(point.phase for point in chart.points)
    ]
    return pages.render(
        "area_chart.html",
        chart=chart,
        count=len(chart.points),
        height=_HEIGHT,
        # A lower area covers part of a higher one, so the highest is painted first.
        areas=areas[::-1],
        legend=areas,
        phases=phases,
        point=None if chart.now is None else chart.points[chart.now],
    )


def _hue(index: int, count: int) -> int:
    """Return a hue in degrees: different for each area, far from its neighbours."""
    # By two around a circle of an odd number of hues, which meets each of them once.
    hues = count | 1
    return (_FIRST_HUE + 360 * (2 * index % hues) // hues) % 360


def _outline(chart: Chart, names: Sequence[str]) -> str:
    """Outline the area from zero to the sum of some categories, as the data of an SVG path."""
    parts = [f"M0 {_HEIGHT}"]
    for index, point in enumerate(chart.points):
        amount = sum(point.amounts.get(name, 0) for name in names)
        parts.append(f"V{_HEIGHT * (1 - amount / chart.most):.2f}H{index + 1}")
    return f"{''.join(parts)}V{_HEIGHT}Z"
