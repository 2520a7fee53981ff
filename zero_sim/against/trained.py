"""Trained params, all-zero gradients, and checkpoint metrics that may differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zero_sim.against.measure import Baseline
from zero_sim.against.points import LOCALISING, Point
from zero_sim.replicas.rows import RowLog


def trained(baseline: Baseline) -> list[str]:
    """Return params that change between forwards; if none does, params of optimizers."""
    used: dict[str, Tensor] = {}
    moved: set[str] = set()
    for point in baseline.pieces:
        # Forwards first, because a step may also update params that no forward uses.
        if point.moment == "forward" and point.name not in moved:
            tensor = baseline.expected(point)
            if tensor is not None and not torch.equal(used.setdefault(point.name, tensor), tensor):
                moved.add(point.name)
    return sorted(moved or {point.name for point in baseline.pieces if point.moment == "param"})


def trains_nothing(baseline: Baseline) -> bool:
    """Return True if there are gradients and all are zero."""
    grads = [
        piece.values
        for point, pieces in baseline.pieces.items()
        if point.moment in LOCALISING
        for piece in pieces.values()
        if piece.dtype != "float"  # Skip group settings, such as the learning rate.
    ]
    return bool(grads) and not any(each.any() for each in grads)


def metrics_of(
    baseline: Baseline, points: Iterable[Point], rows: Sequence[Sequence[RowLog]]
) -> set[Point]:
    """Return checkpoint tensors that may depend on evaluation rows, such as a validation loss.

    These have a shape that no param has. Empty if both sides evaluated the same rows.
    """
    first, *others = ({row for log in logs for row in log.evaluations} for logs in rows)
    if all(each == first for each in others):
        return set()
    shapes = {
        piece.shape
        for point, ranks in baseline.pieces.items()
        if point.moment in ("forward", "param")
        for piece in ranks.values()
    }
    return {
        point
        for point in points
        if point.moment in ("saved", "loaded")
        and all(piece.shape not in shapes for piece in baseline.pieces[point].values())
    }
