"""Norms of the whole gradient that are norms of norms, each rounded in its own way.

[Note: norms of norms]
A norm that is rounded to fp32 piece by piece depends on the pieces. `of-params`: the norm of the
norms of whole gradients, as torch.nn.utils.clip_grad_norm_ takes it on every rank by itself.
`of-rows`: the same where each rank has rows of them, and one call adds the squares of their norms.
`of-own-params`: each rank takes the norm of the norms of what it owns of each param, and one call
adds the squares of these over the ranks; fairscale's OSS and Megatron-LM do, the latter with shards
of params. `of-shards`: each rank takes one norm of its whole shard. In both the sum of squares is
fp32, and a form of clipping that takes the root takes that of this sum.

`told` is no rule: the norm is taken as the system tells it, and compared with nothing.
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

Norm = Literal["of-elements", "of-params", "of-rows", "of-own-params", "of-shards", "told"]
"""What a norm is rounded from: one fp64 sum over all elements, which every order of adding gives;
or as in [Note: norms of norms]."""

NORMS: tuple[Norm, ...] = get_args(Norm)
ROOTED: tuple[Norm, ...] = ("of-elements", "of-own-params", "of-shards")
"""Those that are the root of one sum of squares, which a form of clipping may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """A part of a param that a rank owns, and where in its shard it lies."""

    param: str
    start: int
    stop: int
    """Half-open range of the flattened param's elements."""
    shard: tuple[int, int] = (0, 0)
    """Which of the rank's shards it lies in."""
    offset: int | None = None
    """Of its first element in the shard; None where that is not told: then parts are one behind the
    other."""
    shard_elems: int | None = None
    """Elements of the whole shard, padding included."""


Holdings = Sequence[Sequence[Holding]]
"""By rank of one replica: what it owns."""


def measure_by(
    norm: Norm,
    whole: Measure,
    *,
    grads: Mapping[str, Tensor],
    rank_count: int,
    order: AddOrder,
    holdings: Holdings,
) -> Measure:
    """Return the measure of a gradient with its norm by a rule.

    Args:
        norm: The rule; not `told`.
        whole: The measure with the norm of elements.
        grads: fp32, by param that has a gradient.
        rank_count: Number of ranks of one replica.
        order: In which a call adds over the ranks; not one that depends on positions.
        holdings: What each rank of one replica owns.
    """
    squares = whole.squares
    match norm:
        case "of-elements" | "told":
            return whole
        case "of-params":
            taken = norm_of_params(grads.values())
        case "of-rows":
            taken = norm_of_rows(list(grads.values()), rank_count=rank_count, order=order)
        case "of-own-params" | "of-shards":
            added = squares_of_holdings(
                grads, holdings=holdings, order=order, joined=norm == "of-shards"
            )
            taken, squares = added.sqrt(), float(added)
    device = whole.norm.device
    return replace(whole, norm=taken.to(device), norm_certified=True, squares=squares)


def wide_ends(norm: Norm, measured: Measure) -> tuple[float, float]:
    """Return the least and the largest fp64 number that a norm can be before it is rounded to fp32.

    Args:
        norm: The rule; not `told`.
        measured: Of the whole gradient, by that rule.
    """
    if norm not in ROOTED:
        return measured.norm.item(), measured.norm.item()
    ends = (measured.squares, measured.squares)
    if norm == "of-elements":
        ends = squares_within_reach(measured.squares, terms=measured.terms)
    # A power of 0.5 is not rounded correctly, so it may differ from the root.
    roots = [root for square in ends for root in (math.sqrt(square), square**0.5)]
    return min(roots), max(roots)


def norm_of_params(grads: Iterable[Tensor]) -> Tensor:
    """Return the 0-D fp32 norm of whole gradients as torch.nn.utils.get_total_norm has it.

    Each gradient's norm is rounded to fp32, then that of these norms: a function of the gradients
    alone, without an order that ranks could change.

    Args:
        grads: fp32, contiguous, in the order of the params.
    """
    norms = [torch.linalg.vector_norm(grad) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


def norm_of_rows(grads: Sequence[Tensor], *, rank_count: int, order: AddOrder) -> Tensor:
    """Return the same norm as torch has it for gradients whose rows are dealt out to ranks.

    Each rank takes the norm of its rows of each gradient; one call adds the squares of these over
    the ranks; their roots are the norms of whole gradients.

    Args:
        grads: As for `norm_of_params`; one without dimensions is a row by itself.
        rank_count: Number of ranks; each has as many rows as the first, the last ones fewer.
        order: In which that call adds; not one that depends on positions.
    """
    norms = torch.zeros(rank_count, len(grads), device=grads[0].device if grads else None)
    for index, grad in enumerate(grads):
        for rank, rows in enumerate(torch.atleast_1d(grad).chunk(rank_count)):
            norms[rank, index] = torch.linalg.vector_norm(rows)
    squares = add_ranks(norms.square().unbind(), order=order)
    return torch.linalg.vector_norm(squares.sqrt())


def squares_of_holdings(
    grads: Mapping[str, Tensor], *, holdings: Holdings, order: AddOrder, joined: bool
) -> Tensor:
    """Return the 0-D fp32 sum of squares of the norms that ranks take of what they own.

    Args:
        grads: fp32, by param that has a gradient.
        holdings: What each rank owns.
        order: In which a call adds over the ranks; not one that depends on positions.
        joined: Whether a rank takes one norm of its whole shard, or the norm of those of parts.
    """
    zero = torch.zeros((), device=next((grad.device for grad in grads.values()), None))
    squares: list[Tensor] = []
    for held in holdings:
        parts = [(each, _part(grads, each)) for each in held if each.param in grads]
        if not parts:
            squares.append(zero)
        elif joined:
            squares.append(_squares_of_shards(parts))
        else:
            each = [torch.linalg.vector_norm(part) for _, part in parts]
            squares.append(torch.linalg.vector_norm(torch.stack(each)).square())
    return add_ranks(squares, order=order) if squares else zero


def norms_of_shard(
    grads: Mapping[str, Tensor], holding: Sequence[Holding], *, rank: int, shard_count: int
) -> Iterator[Tensor]:
    """Return 0-D fp32 norms that a rank may take of its own shard alone.

    Args:
        grads: fp32, by param that has a gradient.
        holding: What the rank owns; empty if nobody reported it: then shards of equal size are
            supposed, of all params behind one another, or of each by rows or elements.
        rank: The rank among those that share the params.
        shard_count: Number of these ranks.
    """
    shards = [[_part(grads, each) for each in holding if each.param in grads]]
    if not holding and grads:
        flat = torch.cat([grad.reshape(-1) for grad in grads.values()])
        shards = [[_dealt(flat, rank, shard_count)]]
        for rows in (torch.atleast_1d, torch.flatten):
            shards.append([_dealt(rows(grad), rank, shard_count) for grad in grads.values()])
    for parts in filter(None, shards):
        yield measure(torch.cat([part.reshape(-1) for part in parts])).norm
        yield torch.linalg.vector_norm(torch.cat([part.reshape(-1) for part in parts]))
        yield norm_of_params(parts)


def _dealt(tensor: Tensor, rank: int, shard_count: int) -> Tensor:
    """A rank's share of the rows, where all but the last ones have as many as the first."""
    rows = -(-tensor.size(0) // shard_count)
    return tensor[rank * rows : (rank + 1) * rows]


def _part(grads: Mapping[str, Tensor], held: Holding) -> Tensor:
    return grads[held.param].reshape(-1)[held.start : held.stop]


def _squares_of_shards(parts: Sequence[tuple[Holding, Tensor]]) -> Tensor:
    """The squares of the norms of a rank's shards, added one after the other."""
    shards: dict[tuple[int, int], list[tuple[Holding, Tensor]]] = {}
    for held, part in parts:
        shards.setdefault(held.shard, []).append((held, part))
    squares = [torch.linalg.vector_norm(_shard(each)).square() for each in shards.values()]
    total = squares[0]
    for each in squares[1:]:
        total = total + each
    return total


def _shard(parts: Sequence[tuple[Holding, Tensor]]) -> Tensor:
    """A rank's shard of the gradient: where places are not told, without anything in between."""
    first, _ = parts[0]
    if first.shard_elems is None or any(held.offset is None for held, _ in parts):
        return torch.cat([part for _, part in parts])
    shard = torch.zeros(first.shard_elems, device=parts[0][1].device)
    for held, part in parts:
        assert held.offset is not None
        shard[held.offset : held.offset + part.numel()] = part
    return shard
