"""The orders in which the ranks' numbers are added: chains of two-operand sums, nothing else.

IEEE addition commutes but does not associate, so from three ranks on the order decides the last
bits. `Tensor.sum` is never used: it picks an order and an accumulator of its own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import OrderName

AddOrder = OrderName
"""Name of an order: `linear`, `linear-fp32`, `tree` or `ring`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSpan:
    """Some elements of a flattened param that travel the ring in one chunk."""

    start: int
    """First element, counted within the param."""
    stop: int
    """One past the last element."""
    chunk: int
    """Where in the ring of the first sum its journey ends: the rank, within its replica, whose
    contribution is added last."""
    replica_chunk: int = 0
    """The same in the second sum, over replicas; not read where there is one."""


def add_replicas(
    contributions: Sequence[Tensor],
    *,
    replica_count: int,
    order: AddOrder,
    spans: Sequence[RingSpan] | None = None,
) -> Tensor:
    """Add the contributions of each replica's ranks, then the replicas' sums, in the same order.

    Args:
        contributions: One tensor a rank, in rank order, all of one shape and dtype; a replica is a
            block of consecutive ranks.
        replica_count: Number of replicas; it divides the number of ranks.
        order: How either sum is added; the first one is rounded to the dtype before the second.
        spans: For `ring`, as for `add_ranks`.

    Returns:
        A new tensor of the contributions' shape and dtype.
    """
    if replica_count == 1:
        return add_ranks(contributions, order=order, spans=spans)
    share = len(contributions) // replica_count
    sums = [
        add_ranks(contributions[start : start + share], order=order, spans=spans)
        for start in range(0, len(contributions), share)
    ]
    if order == "ring" and spans is not None:
        spans = [
            RingSpan(start=span.start, stop=span.stop, chunk=span.replica_chunk) for span in spans
        ]
    return add_ranks(sums, order=order, spans=spans)


def add_ranks(
    contributions: Sequence[Tensor], *, order: AddOrder, spans: Sequence[RingSpan] | None = None
) -> Tensor:
    """Add one param's contributions of all ranks.

    Args:
        contributions: One tensor a rank, in rank order, all of one shape and dtype.
        order: How they are added; each sum is rounded to that dtype, save in `linear-fp32`.
        spans: For `ring`: which chunk each element is in; must tile the param. Ignored otherwise.

    Returns:
        A new tensor of the contributions' shape and dtype.

    Raises:
        UsageError: `ring` without spans, or with spans that do not tile the param.
    """
    if len(contributions) == 1:
        return contributions[0].clone()
    match order:
        case "linear":
            return add_linear(contributions)
        case "linear-fp32":
            return add_linear_fp32(contributions)
        case "tree":
            return add_tree(contributions)
        case "ring":
            return add_ring(contributions, spans=spans)


def add_linear(contributions: Sequence[Tensor]) -> Tensor:
    """Return ((x0 + x1) + x2) + ... of two or more, each sum rounded to their dtype."""
    return functools.reduce(operator.add, contributions)


def add_linear_fp32(contributions: Sequence[Tensor]) -> Tensor:
    """Return the linear sum kept in fp32 and rounded once, at the end."""
    wide = add_linear([contribution.to(torch.float32) for contribution in contributions])
    return wide.to(contributions[0].dtype)


def add_tree(contributions: Sequence[Tensor]) -> Tensor:
    """Add neighbours, (x0 + x1), (x2 + x3), ..., then their sums; an odd one out moves up as is."""
    level = list(contributions)
    while len(level) > 1:
        pairs = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def add_ring(contributions: Sequence[Tensor], *, spans: Sequence[RingSpan] | None) -> Tensor:
    """Add each chunk c as x[c+1], x[c+2], ..., x[c], ranks modulo their number, left to right.

    A chunk starts its journey at its owner's successor; the owner adds its own contribution last.
    """
    world_size, shape = len(contributions), contributions[0].shape
    flat = [contribution.reshape(-1) for contribution in contributions]
    tiles = _check_spans(spans, param_elems=flat[0].numel(), world_size=world_size)
    out = torch.empty_like(flat[0])
    for tile in tiles:
        ranks = [(tile.chunk + 1 + hop) % world_size for hop in range(world_size)]
        out[tile.start : tile.stop] = add_linear(
            [flat[rank][tile.start : tile.stop] for rank in ranks]
        )
    return out.view(shape)


def _check_spans(
    spans: Sequence[RingSpan] | None, *, param_elems: int, world_size: int
) -> list[RingSpan]:
    """Return the non-empty spans in order, once they are known to tile the param."""
    if spans is None:
        raise UsageError(
            "Expected ring spans for each param, because order 'ring' adds each chunk in its own "
            "order, but got none. Try passing `orders`, or another order."
        )
    tiles = sorted((span for span in spans if span.stop != span.start), key=lambda span: span.start)
    reached = 0
    for tile in tiles:
        if tile.start != reached or tile.stop < tile.start or not 0 <= tile.chunk < world_size:
            raise UsageError(
                f"Expected ring spans that continue at element {reached} with a chunk below "
                f"{world_size}, but got {tile}. Try spans that tile the param, no gap or overlap."
            )
        reached = tile.stop
    if reached != param_elems:
        raise UsageError(
            f"Expected ring spans that tile all {param_elems} elements of the param, but they "
            f"cover {reached}. Try spans that count elements of the flattened param, from 0."
        )
    return tiles
