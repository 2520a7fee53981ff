"""Whole tensors from the pieces of ranks, where it is known which rank has which elements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_sim.against.points import Piece


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Whole:
    """A tensor as its ranks have it together."""

    kind: str
    """`replicated` or `sharded`."""
    candidates: Mapping[int, Tensor]
    """By rank: its copy, if replicated; else the tensor put together, under the lowest rank."""
    ranks: tuple[int, ...]
    """Ranks that have a part of it."""


def whole_of(pieces: Mapping[int, Piece]) -> Whole | None:
    """The whole tensor of pieces by rank; None if their places are not known."""
    first = pieces[min(pieces)]
    if any(piece.is_partial for piece in pieces.values()):
        return None
    if not any(piece.shards for piece in pieces.values()):
        if any(piece.values.shape != first.values.shape for piece in pieces.values()):
            return None
        return Whole(
            kind="replicated",
            candidates={rank: piece.values for rank, piece in pieces.items()},
            ranks=tuple(sorted(pieces)),
        )
    if any(len(piece.shards) != len(first.shards) for piece in pieces.values()):
        return None
    groups: dict[tuple[int, ...], tuple[int, Piece]] = {}
    for rank in sorted(pieces):
        coordinates = tuple(shard[1] for shard in pieces[rank].shards)
        known = groups.setdefault(coordinates, (rank, pieces[rank]))
        if not torch.equal(known[1].values, pieces[rank].values):
            return _replicas_differ(pieces)
    parts = {place: piece.values for place, (_, piece) in groups.items()}
    tensor = _joined(parts, first.shards, allows_gaps=first.is_flat)
    if tensor is not None and first.is_flat:
        tensor = _unpadded(tensor, first.shape)
    if tensor is None or tuple(tensor.shape) != first.shape:
        return None
    return Whole(kind="sharded", candidates={min(pieces): tensor}, ranks=tuple(sorted(pieces)))


def _unpadded(flat: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    numel = math.prod(shape)
    return flat[:numel].reshape(shape) if flat.numel() >= numel else None


def _replicas_differ(pieces: Mapping[int, Piece]) -> Whole | None:
    """One candidate for each replica of a sharded tensor, if ranks are laid out in blocks."""
    first = next(iter(pieces.values()))
    shards = first.shards
    replicas: list[dict[tuple[int, ...], tuple[int, Tensor]]] = []
    for rank in sorted(pieces):
        place = tuple(shard[1] for shard in pieces[rank].shards)
        home = next((each for each in replicas if place not in each), None)
        if home is None:
            home = {}
            replicas.append(home)
        home[place] = rank, pieces[rank].values
    candidates: dict[int, Tensor] = {}
    for home in replicas:
        parts = {place: values for place, (_, values) in home.items()}
        tensor = _joined(parts, shards, allows_gaps=first.is_flat)
        if tensor is not None and first.is_flat:
            tensor = _unpadded(tensor, first.shape)
        if tensor is None:
            return None
        candidates[min(rank for rank, _ in home.values())] = tensor
    return Whole(kind="sharded", candidates=candidates, ranks=tuple(sorted(pieces)))


def _joined(
    parts: Mapping[tuple[int, ...], Tensor],
    shards: tuple[tuple[int, int, int], ...],
    *,
    allows_gaps: bool = False,
) -> Tensor | None:
    """Put shards together, the innermost mesh dimension first.

    Args:
        parts: By the coordinates of their ranks.
        shards: As in `Piece`.
        allows_gaps: True if a rank may have no part.
    """
    for depth in reversed(range(len(shards))):
        dim, _, count = shards[depth]
        joined: dict[tuple[int, ...], Tensor] = {}
        for prefix in {place[:depth] for place in parts}:
            row = [parts.get((*prefix, index)) for index in range(count)]
            present = [each for each in row if each is not None]
            if len(present) < count and not allows_gaps:
                return None
            joined[prefix] = torch.cat(present, dim=dim)
        parts = joined
    return parts.get(())


def relative_difference(got: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute value expected; 0 for equal bits."""
    if not expected.numel() or torch.equal(got, expected):
        return 0.0
    difference = (got - expected).abs().max().item()
    if difference != difference or difference == float("inf"):
        same = torch.equal(got.nan_to_num(), expected.nan_to_num())
        return 0.0 if same and torch.equal(got.isnan(), expected.isnan()) else float("inf")
    largest = expected.abs().max().item()
    return difference / largest if largest else float("inf")
