"""Whole tensors, assembled from the ranks' pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_sim.against.points import Piece


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Whole:
    """A tensor assembled from all ranks."""

    kind: str
    """`replicated` or `sharded`."""
    candidates: Mapping[int, Tensor]
    """Each rank's copy if replicated. Otherwise the assembled tensor of each replica, by its lowest
    rank."""


def whole_of(pieces: Mapping[int, Piece]) -> Whole | None:
    """Assemble the ranks' pieces; None if their places are unknown."""
    first = pieces[min(pieces)]
    each = pieces.values()
    if any(piece.is_partial or len(piece.shards) != len(first.shards) for piece in each):
        return None
    if not first.shards:
        if any(piece.values.shape != first.values.shape for piece in each):
            return None
        return Whole(
            kind="replicated", candidates={rank: piece.values for rank, piece in pieces.items()}
        )
    # One dict per replica: rank by coordinates.
    replicas: list[dict[tuple[int, ...], int]] = []
    for rank in sorted(pieces):
        place = tuple(shard[1] for shard in pieces[rank].shards)
        # The first replica whose shard at this place is still missing.
        home = next((known for known in replicas if place not in known), None)
        if home is None:
            home = {}
            replicas.append(home)
        home[place] = rank
    candidates: dict[int, Tensor] = {}
    for home in replicas:
        # Assemble a replica only if it differs from the first.
        parts = {place: pieces[rank].values for place, rank in home.items()}
        if candidates and all(
            torch.equal(values, pieces[replicas[0][place]].values)
            for place, values in parts.items()
        ):
            continue
        tensor = _joined(parts, first)
        if tensor is None or tuple(tensor.shape) != first.shape:
            return None
        candidates[min(home.values())] = tensor
    return Whole(kind="sharded", candidates=candidates)


def _joined(parts: Mapping[tuple[int, ...], Tensor], like: Piece) -> Tensor | None:
    """Concatenate shards by coordinates, innermost mesh dimension first.

    In a flat tensor, some ranks may have no shard.
    """
    for depth in reversed(range(len(like.shards))):
        dim, _, count = like.shards[depth]
        # From place (i, j, ...) to (i, ...), joined along `dim`.
        joined: dict[tuple[int, ...], Tensor] = {}
        for prefix in {place[:depth] for place in parts}:
            row = [parts.get((*prefix, index)) for index in range(count)]
            present = [each for each in row if each is not None]
            if len(present) < count and not like.is_flat:
                return None
            joined[prefix] = torch.cat(present, dim=dim)
        parts = joined
    # One part is left, without coordinates.
    tensor = parts.get(())
    if tensor is None or not like.is_flat:
        return tensor
    numel = math.prod(like.shape)
    # Cut off the padding.
    return tensor[:numel].reshape(like.shape) if tensor.numel() >= numel else None


def relative_difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference divided by the largest expected value; 0 for equal bits."""
    if not expected.numel() or torch.equal(got, expected):
        return 0.0
    difference = (got - expected).abs().max().item()
    # A script may compute NaN, so NaN at the same elements counts as equal.
    if difference != difference or difference == float("inf"):
        same = torch.equal(got.nan_to_num(), expected.nan_to_num())
        return 0.0 if same and torch.equal(got.isnan(), expected.isnan()) else float("inf")
    largest = expected.abs().max().item()
    return difference / largest if largest else float("inf")
