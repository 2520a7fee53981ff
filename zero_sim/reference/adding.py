"""The orders in which the ranks' numbers are added: chains of two-operand sums, nothing else.

IEEE addition commutes but does not associate, so from three ranks on the order decides the last
bits. `Tensor.sum` is never used: it picks an order and an accumulator of its own.

[Note: which rank comes when]
For the orders that depend on where an element stands, everything follows from one table: which rank
is added when, element by element. The table is written as arithmetic on the element's position in
the buffer that the backend adds as one, with N ranks, all indices modulo N:

- `ring`, `nccl-ring`: an element that ends on rank q is x[q+1], x[q+2], ..., x[q]. Where one rank
  gets the result, that is q. Where all do, `ring` cuts the buffer into N chunks of ceil(n / N), and
  chunk c ends on c - 1; `nccl-ring` cuts it into runs of N chunks of 2 MiB, the last run into N
  chunks of ceil(rest / N) rounded up to 16 bytes, and chunk c ends on c.
- `gloo`: chunk c is x[c-1], x[c-2], ..., x[c]. Chunks are as long as `gloo_chunk_elems` says.
- `nccl-sym`: what rank q reduces is x[q], x[q+1], ..., in fp32 for 16-bit numbers. Where one rank
  gets the result, that is q; else ranks take turns, 32 elements each.
- `random-tree`: elements at one position modulo 7 share a tree. Its joints are drawn one by one
  from blake2b hashes of `seed/N/class/number of the draw`: entry `d % m` of the list of the m trees
  there are, then entry `d // m % (m - 1)` of the others, are joined and go to the list's end. If
  `d // m // (m - 1)` is odd, 16-bit numbers leave that joint in fp32; but not the last one.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.reference.arrangement import Arrangement, add_arranged
from zero_sim.scenario.spec import OrderName

AddOrder = OrderName
"""Name of an order."""

CallKind = Literal["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list"]

POSITION_FREE: tuple[AddOrder, ...] = ("linear", "linear-fp32", "tree")
"""Orders that are the same for every element of a call."""

_TREES = 7
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class SumSite:
    """Where some consecutive elements stand in the call that adds them: observed facts."""

    kind: CallKind
    elems: int
    """Elements of the tensor that they are part of; in a list form, of the list's entry."""
    offset: int
    """Offset of the first one in that tensor."""
    ends_on: int = 0
    """Rank, counted within the group, that gets the sum; not read where all do."""
    joined_elems: int | None = None
    """Elements of all tensors of a coalesced call; None for a call of one tensor."""
    joined_offset: int | None = None
    """Offset of the first one in all of these, one after another."""
    arrangements: tuple[Arrangement, ...] = ()
    """How the communicator of each block of ranks adds, where that was observed and the order is
    `nccl-ring`; empty for ranks in their own order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SumSpan:
    """Some elements of a flattened param, and the calls that add them over the ranks."""

    start: int
    """First element, counted within the param."""
    stop: int
    """One past the last element."""
    site: SumSite
    """Where they stand in the sum over the ranks of a replica."""
    replica_site: SumSite | None = None
    """The same in the second sum, over replicas; None where there is one replica."""


def add_replicas(
    contributions: Sequence[Tensor],
    *,
    replica_count: int,
    order: AddOrder,
    spans: Sequence[SumSpan] | None = None,
    seed: int = 0,
) -> Tensor:
    """Add the contributions of each replica's ranks, then the replicas' sums, in the same order.

    Args:
        contributions: One tensor a rank, in rank order, all of one shape and dtype; a replica is a
            block of consecutive ranks.
        replica_count: Number of replicas; it divides the number of ranks.
        order: How either sum is added; the first one is rounded to the dtype before the second.
        spans: As for `add_ranks`.
        seed: As for `add_ranks`.

    Returns:
        A new tensor of the contributions' shape and dtype.
    """
    if replica_count == 1:
        return add_ranks(contributions, order=order, spans=spans, seed=seed)
    sums = add_blocks(
        contributions, replica_count=replica_count, order=order, spans=spans, seed=seed
    )
    return add_block_sums(sums, order=order, spans=spans, seed=seed)


def add_blocks(
    contributions: Sequence[Tensor],
    *,
    replica_count: int,
    order: AddOrder,
    spans: Sequence[SumSpan] | None = None,
    seed: int = 0,
) -> list[Tensor]:
    """Add the contributions of each replica's ranks; arguments as for `add_replicas`.

    Returns:
        One sum a replica.
    """
    share = len(contributions) // replica_count
    return [
        add_ranks(
            contributions[block * share : (block + 1) * share],
            order=order,
            spans=spans,
            seed=seed,
            block=block,
        )
        for block in range(replica_count)
    ]


def add_block_sums(
    sums: Sequence[Tensor],
    *,
    order: AddOrder,
    spans: Sequence[SumSpan] | None = None,
    seed: int = 0,
) -> Tensor:
    """Add the sums of all replicas; arguments as for `add_replicas`."""
    if spans is not None and order not in POSITION_FREE:
        spans = [
            SumSpan(start=span.start, stop=span.stop, site=span.replica_site)
            for span in spans
            if span.replica_site is not None
        ]
    return add_ranks(sums, order=order, spans=spans, seed=seed)


def add_ranks(
    contributions: Sequence[Tensor],
    *,
    order: AddOrder,
    spans: Sequence[SumSpan] | None = None,
    seed: int = 0,
    block: int = 0,
) -> Tensor:
    """Add one param's contributions of all ranks.

    Args:
        contributions: One tensor a rank, in rank order, all of one shape and dtype.
        order: How they are added; each sum is rounded to that dtype, save in `linear-fp32`,
            `nccl-sym` and at some joints of `random-tree`.
        spans: Which call adds each element, and where in it; must tile the param. Not read by
            `linear`, `linear-fp32` and `tree`.
        seed: What `random-tree` draws from.
        block: Which block of ranks they are, of those that `SumSite.arrangements` tells of.

    Returns:
        A new tensor of the contributions' shape and dtype.

    Raises:
        UsageError: The order depends on positions and spans are missing or do not tile the param.
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
        case _:
            return _add_by_position(contributions, order=order, spans=spans, seed=seed, block=block)


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


def _add_by_position(
    contributions: Sequence[Tensor],
    *,
    order: AddOrder,
    spans: Sequence[SumSpan] | None,
    seed: int,
    block: int,
) -> Tensor:
    rows = torch.stack([contribution.reshape(-1) for contribution in contributions])
    out = torch.empty_like(rows[0])
    for span in _check_spans(
        spans, order=order, param_elems=out.numel(), rank_count=len(contributions)
    ):
        part = rows[:, span.start : span.stop]
        positions = _positions(span, order=order).to(rows.device)
        site = span.site
        if order == "nccl-ring" and site.arrangements:
            total = add_arranged(
                part,
                site.arrangements[block],
                kind=site.kind,
                elems=site.elems,
                offset=site.offset,
                ends_on=site.ends_on,
            )
        elif order == "random-tree":
            total = add_by_random_trees(part, positions=positions, seed=seed)
        else:
            first, stride = first_ranks(
                span.site,
                positions=positions,
                order=order,
                rank_count=len(contributions),
                elem_bytes=out.element_size(),
            )
            total = add_in_turn(part, first=first, stride=stride, wide=order == "nccl-sym")
        out[span.start : span.stop] = total
    return out.view(contributions[0].shape)


def _positions(span: SumSpan, *, order: AddOrder) -> Tensor:
    """Where each element of a span stands in the buffer that the backend adds as one."""
    site, offset = span.site, span.site.offset
    if order == "gloo" and site.kind == "all_reduce" and site.joined_offset is not None:
        offset = site.joined_offset
    return torch.arange(offset, offset + span.stop - span.start)


def add_in_turn(rows: Tensor, *, first: Tensor, stride: int, wide: bool) -> Tensor:
    """Add each column's ranks one after the other, in a column's own order.

    Args:
        rows: 2D (ranks, elements).
        first: 1D, int64: the rank that comes first, by element; may lie outside of 0 to ranks.
        stride: 1 or -1: from each rank to the next one.
        wide: Whether 16-bit numbers are added in fp32 and rounded once.

    Returns:
        1D, of the rows' dtype.
    """
    table = rows.to(torch.float32) if wide and rows.element_size() == 2 else rows
    columns = torch.arange(rows.shape[1], device=rows.device)
    turns = [table[(first + stride * turn) % len(rows), columns] for turn in range(len(rows))]
    return add_linear(turns).to(rows.dtype)


def first_ranks(
    site: SumSite, *, positions: Tensor, order: AddOrder, rank_count: int, elem_bytes: int
) -> tuple[Tensor, int]:
    """Return which rank is added first, by element, and 1 or -1 for upwards or downwards.

    See [Note: which rank comes when].

    Args:
        site: The call that adds, and where in its buffer the elements are.
        positions: 1D, int64: where the elements stand in the buffer that is added as one.
        order: One that depends on positions and is not `random-tree`.
        rank_count: Ranks of the group.
        elem_bytes: Size of an element.
    """
    if order == "gloo":
        return positions // gloo_chunk_elems(site, ranks=rank_count, elem_bytes=elem_bytes) - 1, -1
    if site.kind != "all_reduce":
        ends_on = torch.full_like(positions, site.ends_on)
        return (ends_on, 1) if order == "nccl-sym" else (ends_on + 1, 1)
    if order == "nccl-sym":
        return positions // 32, 1
    if order == "ring":
        return positions // -(-site.elems // rank_count), 1
    run = rank_count * (2 * _MIB // elem_bytes)
    rest = site.elems % run
    last_chunk = -(-(-(-rest // rank_count) * elem_bytes) // 16) * 16 // elem_bytes
    in_last = positions >= site.elems - rest
    lengths = torch.where(in_last, max(last_chunk, 1), run // rank_count)
    return positions % run // lengths + 1, 1


def gloo_chunk_elems(site: SumSite, *, ranks: int, elem_bytes: int) -> int:
    """Return how many elements gloo adds in one order before it comes to the next one.

    A chunk is a whole number of segments. An all-reduce, which a flat reduce-scatter is too, first
    says how many segments there are, at least two a rank and as many as keep them within 1 MiB, a
    multiple of the ranks; then how long. A rooted reduce, of which a list form does one an entry,
    first says how long they are, half a rank's share or 1 MiB; then how many.
    """
    elems = site.elems
    if site.kind == "all_reduce" and site.joined_elems is not None:
        elems = site.joined_elems
    size = elems * elem_bytes

    def ceil(a: int, b: int) -> int:
        return (a + b - 1) // b

    if site.kind in ("all_reduce", "reduce_scatter"):
        per_rank = ceil(max(ceil(size, _MIB), 2 * ranks), ranks)
        return per_rank * ceil(ceil(size, per_rank * ranks), elem_bytes)
    segment = ceil(min(ceil(size, 2 * ranks), _MIB), elem_bytes)
    per_rank = ceil(max(ceil(elems, segment), 2 * ranks), ranks)
    return per_rank * segment


def add_by_random_trees(rows: Tensor, *, positions: Tensor, seed: int) -> Tensor:
    """Add every column by the tree of its class; see [Note: which rank comes when].

    Args:
        rows: 2D (ranks, elements).
        positions: 1D, int64: where the elements stand in their buffer.
        seed: What the trees are drawn from.

    Returns:
        1D, of the rows' dtype.
    """
    classes = positions % _TREES
    out = torch.empty_like(rows[0])
    for element_class in classes.unique().tolist():
        mine = classes == element_class
        trees = list(rows[:, mine])
        for left, right, wide in _joints(seed, len(rows), element_class):
            one = trees.pop(left)
            other = trees.pop(right)
            if rows.element_size() > 2:
                total = one + other
            elif wide:
                total = one.float() + other.float()
            else:
                # Of two 16-bit numbers this is their sum: fp32 has more than twice their bits.
                total = (one.float() + other.float()).to(rows.dtype)
            trees.append(total)
        out[mine] = trees[0].to(rows.dtype)
    return out


def _joints(seed: int, rank_count: int, element_class: int) -> Iterator[tuple[int, int, bool]]:
    for number, trees in enumerate(range(rank_count, 1, -1)):
        name = "/".join(map(str, (seed, rank_count, element_class, number)))
        spelled = hashlib.blake2b(name.encode("ascii"), digest_size=8).digest()
        draw = sum(byte << (8 * place) for place, byte in enumerate(spelled))
        left, rest = draw % trees, draw // trees
        yield left, rest % (trees - 1), rest // (trees - 1) % 2 == 1


def _check_spans(
    spans: Sequence[SumSpan] | None, *, order: AddOrder, param_elems: int, rank_count: int
) -> list[SumSpan]:
    """Return the non-empty spans in order, once they are known to tile the param."""
    if spans is None:
        raise UsageError(
            f"expected spans for each param, because order {order!r} depends on where an element "
            "stands in the call that adds it, got none. Try passing `orders`, or order "
            "'linear'."
        )
    tiles = sorted((span for span in spans if span.stop != span.start), key=lambda span: span.start)
    reached = 0
    for tile in tiles:
        fits = tile.stop > tile.start and 0 <= tile.site.ends_on < rank_count
        if tile.start != reached or not fits:
            raise UsageError(
                f"expected spans that continue at element {reached} and end on a rank below "
                f"{rank_count}, got {tile}. Try spans that tile the param, no gap or overlap."
            )
        reached = tile.stop
    if reached != param_elems:
        raise UsageError(
            f"expected spans that tile all {param_elems} elements of the param, but they "
            f"cover {reached}. Try spans that count elements of the flattened param, from 0."
        )
    return tiles
