"""Rings as pictures: ranks in a circle, and an arrow with its chunk from each that sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zero_sim.report.markup import Markup, element

_SIZE, _RADIUS, _NODE = 320, 112, 30


def draw_ring(ranks: int, arrows: Sequence[tuple[int, int, str]]) -> Markup:
    """Draw a ring.

    Args:
        ranks: How many there are.
        arrows: From which rank, to which, and what.
    """
    parts: list[Markup] = []
    for start, stop, what in arrows:
        (x1, y1), (x2, y2) = _at(start, ranks), _at(stop, ranks)
        length = math.hypot(x2 - x1, y2 - y1) or 1.0
        dx, dy = (x2 - x1) / length * (_NODE + 3), (y2 - y1) / length * (_NODE + 3)
        parts.append(
            element(
                "line",
                x1=f"{x1 + dx:.1f}",
                y1=f"{y1 + dy:.1f}",
                x2=f"{x2 - dx:.1f}",
                y2=f"{y2 - dy:.1f}",
            )
        )
        parts.append(_tip(x2 - dx, y2 - dy, math.atan2(dy, dx)))
        middle = _SIZE / 2
        # Outside of the ring, so that no arrow goes through it.
        mx, my = ((x1 + x2) / 2 - middle) * 1.38 + middle, ((y1 + y2) / 2 - middle) * 1.38 + middle
        parts.append(element("text", what, x=f"{mx:.1f}", y=f"{my + 4:.1f}"))
    for rank in range(ranks):
        x, y = _at(rank, ranks)
        parts.append(element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=_NODE, class_="node"))
        parts.append(element("text", f"rank {rank}", x=f"{x:.1f}", y=f"{y + 4:.1f}"))
    return element("svg", *parts, viewBox=f"0 0 {_SIZE} {_SIZE}", role="img", class_="ring")


def _tip(x: float, y: float, angle: float) -> Markup:
    """The head of an arrow; markers of pages with hidden parts would be hidden with the first."""
    sides = (angle - 0.4, angle + 0.4)
    corners = [(x, y), *((x - 10 * math.cos(a), y - 10 * math.sin(a)) for a in sides)]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return element("polygon", points=points, class_="tip")


def _at(rank: int, ranks: int) -> tuple[float, float]:
    angle = 2 * math.pi * rank / ranks - math.pi / 2
    middle = _SIZE / 2
    return middle + _RADIUS * math.cos(angle), middle + _RADIUS * math.sin(angle)
