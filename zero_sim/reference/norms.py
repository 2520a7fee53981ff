"""Whole-gradient norms that round in steps: norms of norms.

[Note: norms of norms]
A norm that is rounded to fp32 piece by piece depends on the pieces:

- `of-params`: the norm over all params' gradient norms. Each rank computes it locally, like
  torch.nn.utils.clip_grad_norm_.
- `of-rows`: the same for row-sharded gradients. One call adds squares over ranks, by param.
- `of-own-params`: each rank takes a norm per owned param part, then the norm over these norms, and
  one call adds the squares. fairscale's OSS does this, and Megatron-LM with shards.
- `of-shards`: each rank takes a single norm over its whole shard, and one call adds the squares.
- `of-squares`: each rank adds the squares of its whole shard, and one call adds these sums.

In the last three, squares are added in fp32, and a clip form that takes the root takes it from this
sum. With `reported`, the reference uses the reported norm, unchecked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from zero_sim.reference.adding import AddOrder, add_ranks
from zero_sim.reference.gradient import Measure, measure, squares_within_reach

Norm = Literal[
    "of-elements", "of-params", "of-rows", "of-own-params", "of-shards", "of-squares", "reported"
]
"""Norm rule. `of-elements` is one fp64 sum over all elements; for the rest see [Note: norms of
norms]."""

NORMS: tuple[Norm, ...] = get_args(Norm)
ROOTED: tuple[Norm, ...] = ("of-elements", "of-own-params", "of-shards", "of-squares")
"""Rules with a single sum of squares, whose root a clip form may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """The part of a param that a rank owns, and its position in the rank's shard."""

    param: str
    start: int
    stop: int
    """Half-open range in the flattened param."""
    shard: tuple[int, int] = (0, 0)
    """Key of the shard that contains it."""
    offset: int | None = None
    """Offset of the first element in the shard. None if not reported; parts are then contiguous."""
    shard_elems: int | None = None
    """Elements in the whole shard, including padding."""


Holdings = Sequence[Sequence[Holding]]
"""Owned parts by rank of one replica."""


def measure_by(
    norm: Norm,
    whole: Measure,
    *,
    grads: Mapping[str, Tensor],
    rank_count: int,
    order: AddOrder,
    holdings: Holdings,
) -> Measure:
    """Return a measure with its norm replaced by a rule's norm.

    Args:
        norm: The rule; not `reported`.
        whole: Measure by rule `of-elements`.
        grads: fp32, by param that has a gradient.
        rank_count: Ranks in one replica.
        order: Summation order over ranks; must not depend on positions.
        holdings: Owned parts by rank of one replica.
    """
    squares = whole.squares
    match norm:
        case "of-elements" | "reported":
            return whole
        case "of-params":
            taken = norm_of_params(grads.values())
        case "of-rows":
            taken = norm_of_rows(list(grads.values()), rank_count=rank_count, order=order)
        case "of-own-params" | "of-shards" | "of-squares":
            added = squares_of_holdings(norm, grads, holdings=holdings, order=order)
            taken, squares = added.sqrt(), float(added)
    device = whole.norm.device
    # Certified, because the rule fixes both the pieces and their summation order.
    return replace(whole, norm=taken.to(device), norm_certified=True, squares=squares)


def wide_ends(norm: Norm, measured: Measure) -> tuple[float, float]:
    """Return a norm's least and greatest fp64 value before it is rounded to fp32.

    `measured` must be by the same rule. Do not call it for `reported`.
    """
    if norm not in ROOTED:
        return measured.norm.item(), measured.norm.item()
    ends = (measured.squares, measured.squares)
    if norm == "of-elements":
        ends = squares_within_reach(measured.squares, terms=measured.terms)
    # x**0.5 is not correctly rounded, so it may differ from the root.
    roots = [root for square in ends for root in (math.sqrt(square), square**0.5)]
    return min(roots), max(roots)


def norm_of_params(grads: Iterable[Tensor]) -> Tensor:
    """Return the norm of contiguous fp32 gradients, as torch.nn.utils.get_total_norm does."""
    # Both norms are rounded to fp32. Ranks add nothing, so no order can change the result.
    norms = [torch.linalg.vector_norm(grad) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


def norm_of_rows(grads: Sequence[Tensor], *, rank_count: int, order: AddOrder) -> Tensor:
    """Return torch's 0-D fp32 norm for row-sharded gradients.

    Each rank takes one norm per gradient, over its rows, and one call adds the squares over ranks.
    The roots of these sums are the whole gradients' norms.

    Args:
        grads: As for `norm_of_params`; a gradient without dimensions counts as a row.
        rank_count: Number of ranks. Rows are shared evenly, except that the last ranks may have
            fewer.
        order: Summation order over ranks; must not depend on positions.
    """
    # [ranks, gradients], fp32; 0 for a rank without rows
    norms = torch.zeros(rank_count, len(grads), device=grads[0].device if grads else None)
    for index, grad in enumerate(grads):
        for rank, rows in enumerate(torch.atleast_1d(grad).chunk(rank_count)):
            norms[rank, index] = torch.linalg.vector_norm(rows)
    # The only addition over ranks, so the only place where the order matters.
    squares = add_ranks(norms.square().unbind(), order=order)
    return torch.linalg.vector_norm(squares.sqrt())


def squares_of_holdings(
    norm: Norm, grads: Mapping[str, Tensor], *, holdings: Holdings, order: AddOrder
) -> Tensor:
    """Add the ranks' squared norms over their owned parts; 0-D fp32.

    Args:
        norm: `of-own-params`, `of-shards` or `of-squares`.
        grads: fp32, by param that has a gradient.
        holdings: Owned parts by rank.
        order: Summation order over ranks; must not depend on positions.
    """
    zero = torch.zeros((), device=next((grad.device for grad in grads.values()), None))
    squares: list[Tensor] = []
    for held in holdings:
        parts = [(each, _part(grads, each)) for each in held if each.param in grads]
        # A rank without parts still joins the call, with a zero.
        if not parts:
            squares.append(zero)
        elif norm == "of-own-params":
            each = [torch.linalg.vector_norm(part) for _, part in parts]
            squares.append(torch.linalg.vector_norm(torch.stack(each)).square())
        else:
            squares.append(_squares_of_shards(norm, parts))
    return add_ranks(squares, order=order) if squares else zero


def norms_of_shard(
    grads: Mapping[str, Tensor], holding: Sequence[Holding], *, rank: int, shard_count: int
) -> Iterator[Tensor]:
    """Yield 0-D fp32 norms that a rank might compute from its own shard only.

    Args:
        grads: fp32, by param that has a gradient.
        holding: Parts that the rank owns. If empty (not reported), equal shards are assumed: all
            params concatenated, or each param cut by rows or by elements.
        rank: Group rank among the ranks that shard the params.
        shard_count: Number of these ranks.
    """
    shards = [[_part(grads, each) for each in holding if each.param in grads]]
    # Not reported: assume equal shards, in three layouts.
    if not holding and grads:
        flat = torch.cat([grad.reshape(-1) for grad in grads.values()])
        shards = [[_dealt(flat, rank, shard_count)]]
        for rows in (torch.atleast_1d, torch.flatten):
            shards.append([_dealt(rows(grad), rank, shard_count) for grad in grads.values()])
    for parts in filter(None, shards):
        # Usual shard norms: in fp64, in fp32, and as a norm of norms.
        yield measure(torch.cat([part.reshape(-1) for part in parts])).norm
        yield torch.linalg.vector_norm(torch.cat([part.reshape(-1) for part in parts]))
        yield norm_of_params(parts)


def _dealt(tensor: Tensor, rank: int, shard_count: int) -> Tensor:
    """Return a rank's share of the rows: ceil(rows / ranks), fewer for the last ranks."""
    rows = -(-tensor.size(0) // shard_count)
    return tensor[rank * rows : (rank + 1) * rows]


def _part(grads: Mapping[str, Tensor], held: Holding) -> Tensor:
    return grads[held.param].reshape(-1)[held.start : held.stop]


def _squares_of_shards(norm: Norm, parts: Sequence[tuple[Holding, Tensor]]) -> Tensor:
    """Add the squared norms of a rank's shards, in sequence."""
    # A rank may own shards of several buffers.
    shards: dict[tuple[int, int], list[tuple[Holding, Tensor]]] = {}
    for held, part in parts:
        shards.setdefault(held.shard, []).append((held, part))
    whole = [_shard(each) for each in shards.values()]
    if norm == "of-squares":
        # torch's `sum` adds other pairs than its norm, so the bits differ.
        squares = [shard.square().sum() for shard in whole]
    else:
        squares = [torch.linalg.vector_norm(shard).square() for shard in whole]
    total = squares[0]
    # A plain chain, because `sum` on a stack would choose its own order.
    for each in squares[1:]:
        total = total + each
    return total


def _shard(parts: Sequence[tuple[Holding, Tensor]]) -> Tensor:
    """Return a rank's gradient shard, without padding if offsets are not reported."""
    first, _ = parts[0]
    if first.shard_elems is None or any(held.offset is None for held, _ in parts):
        return torch.cat([part for _, part in parts])
    # With padding: zeros add nothing, but they change which elements a vector loop pairs.
    shard = torch.zeros(first.shard_elems, device=parts[0][1].device)
    for held, part in parts:
        assert held.offset is not None
        shard[held.offset : held.offset + part.numel()] = part
    return shard
