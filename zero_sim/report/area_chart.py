"""Charts of amounts over time, by category: bars in text, stacked areas on pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from zero_sim.report import pages
from zero_sim.report.amounts import aligned, bar

_HEIGHT = 100
"""Height of the view box. Its width is one unit per moment, and it is stretched to the page."""
_FIRST_HUE = 215
"""Degrees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Amounts at a moment."""

    name: str
    phase: str
    amounts: Mapping[str, float]
    """Amounts by category, such as `gathered`. Missing categories count as 0."""

    @property
    def total(self) -> float:
        """Amount of all categories."""
        return sum(self.amounts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Amounts over several moments. Each lasts until the next moment."""

    title: str
    unit: str
    points: Sequence[Point]
    now: int | None = None
    """Index of the point to mark."""

    @property
    def most(self) -> float:
        """Largest total; 1 if all are 0, because heights are divided by it."""
        return max((point.total for point in self.points), default=0) or 1


def render_bars(chart: Chart) -> Iterator[str]:
    """Yield lines of text, with a bar for each point."""
    yield f"{chart.title}, in {chart.unit}"
    rows = [
        [each.name, bar(each.total / chart.most), f"{each.total:,.0f}"] for each in chart.points
    ]
    yield from aligned(rows, words=range(2)).splitlines()


def draw_area(chart: Chart) -> Markup:
    """Draw a chart as wide as the page, with phases below and a legend."""
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
        # Each area starts at zero, so paint the highest first and cover it with lower areas.
        areas=areas[::-1],
        legend=areas,
        phases=phases,
        point=None if chart.now is None else chart.points[chart.now],
    )


def _hue(index: int, count: int) -> int:
    """Return an area's hue in degrees, far from its neighbours' hues."""
    # Steps of two around an odd number of hues meet each hue once.
    hues = count | 1
    return (_FIRST_HUE + 360 * (2 * index % hues) // hues) % 360


def _outline(chart: Chart, names: Sequence[str]) -> str:
    """Return the area from zero to the sum of categories, as SVG path data."""
    parts = [f"M0 {_HEIGHT}"]
    for index, point in enumerate(chart.points):
        amount = sum(point.amounts.get(name, 0) for name in names)
        parts.append(f"V{_HEIGHT * (1 - amount / chart.most):.2f}H{index + 1}")
    return f"{''.join(parts)}V{_HEIGHT}Z"
