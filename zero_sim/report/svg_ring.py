"""Rings as pictures: ranks in a circle, and an arrow with its chunk from each that sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from zero_sim.report import pages

_SIZE, _RADIUS, _NODE = 320, 112, 30


def draw_ring(ranks: int, arrows: Sequence[tuple[int, int, str]]) -> Markup:
    """Draw a ring.

    Args:
        ranks: How many there are.
        arrows: From which rank, to which, and what.
    """
    nodes = [_at(rank, ranks) for rank in range(ranks)]
    drawn = [_arrow(nodes[start], nodes[stop], label) for start, stop, label in arrows]
    return pages.render("ring.html", size=_SIZE, radius=_NODE, nodes=nodes, arrows=drawn)


def _arrow(start: tuple[float, float], stop: tuple[float, float], label: str) -> dict[str, object]:
    (x1, y1), (x2, y2) = start, stop
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    dx, dy = (x2 - x1) / length * (_NODE + 3), (y2 - y1) / length * (_NODE + 3)
    x, y, angle = x2 - dx, y2 - dy, math.atan2(dy, dx)
    # A triangle, because a marker that is shared by pages of hidden parts is hidden with the first.
    sides = (angle - 0.4, angle + 0.4)
    corners = [(x, y), *((x - 10 * math.cos(a), y - 10 * math.sin(a)) for a in sides)]
    middle = _SIZE / 2
    return {
        "x1": f"{x1 + dx:.1f}",
        "y1": f"{y1 + dy:.1f}",
        "x2": f"{x:.1f}",
        "y2": f"{y:.1f}",
        "tip": " ".join(f"{a:.1f},{b:.1f}" for a, b in corners),
        # Outside of the ring, so that no arrow goes through it.
        "x": f"{((x1 + x2) / 2 - middle) * 1.38 + middle:.1f}",
        "y": f"{((y1 + y2) / 2 - middle) * 1.38 + middle + 4:.1f}",
        "label": label,
    }


def _at(rank: int, ranks: int) -> tuple[float, float]:
    angle = 2 * math.pi * rank / ranks - math.pi / 2
    middle = _SIZE / 2
    return round(middle + _RADIUS * math.cos(angle), 1), round(
        middle + _RADIUS * math.sin(angle), 1
    )
