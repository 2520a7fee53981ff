"""Costs as SVG files that stand alone: a waterfall of memory, a scaling curve. Light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from zero_sim.report.amounts import in_unit, unit_for
from zero_sim.report.costs import waterfall
from zero_sim.report.markup import Markup, element, joined

_STYLE = """
svg { color-scheme: light dark; background: #fcfcfa; }
text { font: 13px system-ui, sans-serif; fill: #1a1c20; } .dim { fill: #5c626d; font-size: 11px; }
.whole { fill: #7fa9ee; } .less { fill: #8fcf98; } .more { fill: #f0ad5c; }
line { stroke: #c9ccd2; } polyline { fill: none; stroke-width: 2; }
.s0 { stroke: #c62828; fill: #c62828; } .s1 { stroke: #1f5fbf; fill: #1f5fbf; }
.s2 { stroke: #2e7d32; fill: #2e7d32; } .s3 { stroke: #9c4dcc; fill: #9c4dcc; }
polyline.s0, polyline.s1, polyline.s2, polyline.s3 { fill: none; } text.key { stroke: none; }
@media (prefers-color-scheme: dark) { svg { background: #16181c; }
  text { fill: #e4e6ea; } .dim { fill: #9aa1ad; } line { stroke: #3c424c; }
  .s0 { stroke: #ff7369; fill: #ff7369; } .s1 { stroke: #7fb0ff; fill: #7fb0ff; }
  .s2 { stroke: #7fd487; fill: #7fd487; } .s3 { stroke: #d3a9e8; fill: #d3a9e8; } }
"""
_WIDTH, _LEFT, _ROW = 760, 190, 30
_SERIES = 4
"""Colours of lines; further ones begin anew."""


def draw_waterfall(before: Mapping[str, int], after: Mapping[str, int], *, title: str) -> Markup:
    """What each category saves from one total down to another.

    Args:
        before: Bytes by category.
        after: Likewise.
        title: Of the picture.
    """
    bars = waterfall(before, after)
    unit = unit_for(max(start, stop) for _, start, stop in bars)
    most = max(max(start, stop) for _, start, stop in bars) or 1
    scale = (_WIDTH - _LEFT - 110) / most
    parts = [element("text", f"{title}, in {unit[0]}", x=12, y=24)]
    for index, (name, start, stop) in enumerate(bars):
        low, high = sorted((start, stop))
        top = 40 + index * _ROW
        is_whole = index in (0, len(bars) - 1)
        class_ = "whole" if is_whole else "less" if stop < start else "more"
        sign = "" if is_whole or stop < start else "+"
        amount = in_unit(stop - start, unit)
        parts += [
            element("text", name.replace("_", " "), x=12, y=top + 15),
            element(
                "rect",
                element("title", f"{name}: {stop - start:,} bytes"),
                x=f"{_LEFT + low * scale:.2f}",
                y=top,
                width=f"{max(1.0, (high - low) * scale):.2f}",
                height=_ROW - 8,
                class_=class_,
            ),
            element("text", f"{sign}{amount}", x=f"{_LEFT + high * scale + 6:.2f}", y=top + 15),
        ]
    return _svg(parts, height=52 + len(bars) * _ROW)


def draw_curve(
    series: Mapping[str, Sequence[tuple[int, float]]], *, what: str, unit: str
) -> Markup:
    """Lines over the number of ranks, both axes by powers.

    Args:
        series: By name pairs of ranks, at least 1, and amount, more than 0.
        what: What is drawn.
        unit: Of its amounts.
    """
    points = [point for pairs in series.values() for point in pairs if point[1] > 0]
    ranks = sorted({each for each, _ in points})
    amounts = [amount for _, amount in points]
    bottom, top = math.floor(math.log10(min(amounts))), math.ceil(math.log10(max(amounts)))
    top = max(top, bottom + 1)
    height, left, right = 420, 80, _WIDTH - 150
    span = max(1.0, math.log2(ranks[-1]))

    def x(rank_count: int) -> float:
        return left + math.log2(rank_count) / span * (right - left)

    def y(amount: float) -> float:
        return 370 - (math.log10(amount) - bottom) / (top - bottom) * 320

    parts = [element("text", f"{what} in {unit}, by number of ranks", x=12, y=24)]
    for power in range(bottom, top + 1):
        at = f"{y(10.0**power):.2f}"
        parts.append(element("line", x1=left, x2=right, y1=at, y2=at))
        parts.append(element("text", f"{10.0**power:g}", x=12, y=at, class_="dim"))
    parts += [
        element("text", f"{count:,}", x=f"{x(count) - 8:.2f}", y=392, class_="dim")
        for count in ranks[::2]
    ]
    for index, (name, pairs) in enumerate(series.items()):
        class_ = f"s{index % _SERIES}"
        drawn = [(x(count), y(amount)) for count, amount in pairs if amount > 0]
        line = " ".join(f"{a:.2f},{b:.2f}" for a, b in drawn)
        parts.append(element("polyline", points=line, class_=class_))
        parts += [
            element(
                "circle",
                element("title", f"{name}, {count:,} ranks: {amount:,.3f} {unit}"),
                cx=f"{x(count):.2f}",
                cy=f"{y(amount):.2f}",
                r=3,
                class_=class_,
            )
            for count, amount in pairs
            if amount > 0
        ]
        last = drawn[-1] if drawn else (left, 40.0)
        key = {"x": right + 8, "y": f"{last[1] + 4:.2f}", "class_": f"key {class_}"}
        parts.append(element("text", name, **key))
    return _svg(parts, height=height)


def _svg(parts: Sequence[Markup], *, height: int) -> Markup:
    return element(
        "svg",
        # Ours alone, and no CSS survives escaping.
        element("style", Markup(_STYLE)),
        joined(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {height}",
        role="img",
    )
