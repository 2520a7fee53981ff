"""Sums over ranks in a named order, built from two-operand additions.

IEEE addition is commutative but not associative, so with three or more ranks the order decides the
last bits. `Tensor.sum` is never used, because it picks its own order and accumulator.

[Note: which rank comes when]
In these orders, an element's position in the backend's buffer decides how its ranks are added. With
N ranks, x[q] is rank q's element, and indices are modulo N:

- `ring`, `nccl-ring`: an element that ends on rank q adds x[q+1], x[q+2], ..., x[q]. If a single
  rank gets the result, q is this rank. If all ranks do, `ring` cuts n elements into N chunks with
  ceil(n / N) elements, and chunk c ends on c - 1. `nccl-ring` cuts them into runs with N chunks
  each. A chunk has 2 MiB, but in the last run ceil(rest / N) elements, rounded up to 16 bytes.
  Chunk c ends on c.
- `gloo`: chunk c adds x[c-1], x[c-2], ..., x[c]. `gloo_chunk_elems` returns the chunk length.
- `nccl-sym`: rank q reduces x[q], x[q+1], ..., in fp32 if elements have 16 bits. If a single rank
  gets the result, q is this rank. Otherwise ranks take turns, 32 elements each.
- `random-tree`: elements with equal positions modulo 7 share a tree. Its joints are drawn in order,
  as blake2b hashes of `seed/N/class/draw index`. From a list of m trees, draw d removes entry
  `d % m`, then entry `d // m % (m - 1)`, and appends their joint. If `d // m // (m - 1)` is odd,
  this joint leaves 16-bit elements in fp32, except at the root.
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
"""Name of a summation order."""

CallKind = Literal["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list"]

POSITION_FREE: tuple[AddOrder, ...] = ("linear", "linear-fp32", "tree")
"""Orders that all elements in a call share."""

# Position classes in `random-tree`.
_TREES = 7
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class SumSite:
    """Observed position of consecutive elements in the call that adds them."""

    kind: CallKind
    elems: int
    """Elements in the call's tensor; in a list form, in the list's entry."""
    offset: int
    """Offset of the first element in that tensor."""
    ends_on: int = 0
    """Group rank that gets the sum; ignored if all ranks do."""
    joined_elems: int | None = None
    """Elements in all tensors of a coalesced call; None for a single tensor."""
    joined_offset: int | None = None
    """Offset of the first element if these tensors are concatenated."""
    arrangements: tuple[Arrangement, ...] = ()
    """Communicator arrangement of each shard group, if observed for `nccl-ring`. Empty for rings in
    rank order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SumSpan:
    """Consecutive elements of a flattened param, and the calls that add them over ranks."""

    start: int
    """First element, counted from the param's start."""
    stop: int
    """End of the span, exclusive."""
    site: SumSite
    """Position in the sum over a replica's ranks."""
    replica_site: SumSite | None = None
    """Position in the second sum, over replicas; None for a single replica."""


def add_replicas(
    contributions: Sequence[Tensor],
    *,
    replica_count: int,
    order: AddOrder,
    spans: Sequence[SumSpan] | None = None,
    seed: int = 0,
) -> Tensor:
    """Add contributions within each replica, then add the replicas' sums, in the same order.

    Args:
        contributions: One tensor per rank, in rank order, with equal shapes and dtypes. Consecutive
            ranks form a replica.
        replica_count: Number of replicas; divides the number of ranks.
        order: Order of both sums. The first is rounded to the dtype before the second.
        spans: As for `add_ranks`.
        seed: As for `add_ranks`.

    Returns:
        A new tensor with the contributions' shape and dtype.
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
    """Add contributions within each replica; arguments as for `add_replicas`.

    Returns:
        One sum per replica.
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
    """Add the replicas' sums; arguments as for `add_replicas`."""
    if spans is not None and order not in POSITION_FREE:
        # The second sum uses other calls in another group, so its elements have other positions.
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
    """Add one param's contributions over all ranks.

    Args:
        contributions: One tensor per rank, in rank order, with equal shapes and dtypes.
        order: Summation order. Each sum is rounded to the dtype, except in `linear-fp32`,
            `nccl-sym` and at some joints of `random-tree`.
        spans: Calls and positions that add the param; must tile it. Ignored by `linear`,
            `linear-fp32` and `tree`.
        seed: Seed of `random-tree`.
        block: Index into `SumSite.arrangements`.

    Returns:
        A new tensor with the contributions' shape and dtype.

    Raises:
        UsageError: The order depends on positions, and spans are missing or do not tile the param.
    """
    # A copy, so that no result aliases a rank's gradient.
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
    """Return ((x0 + x1) + x2) + ..., with each sum rounded to the dtype."""
    return functools.reduce(operator.add, contributions)


def add_linear_fp32(contributions: Sequence[Tensor]) -> Tensor:
    """Return the linear sum in fp32, rounded once at the end."""
    wide = add_linear([contribution.to(torch.float32) for contribution in contributions])
    return wide.to(contributions[0].dtype)


def add_tree(contributions: Sequence[Tensor]) -> Tensor:
    """Add neighbours, (x0 + x1), (x2 + x3), ..., then their sums; an odd last tensor moves up."""
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
    # [ranks, elements], gradient dtype
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
    """Return each element's position in the buffer that the backend adds as a whole."""
    site, offset = span.site, span.site.offset
    # gloo adds the tensors of a coalesced all-reduce as one buffer.
    if order == "gloo" and site.kind == "all_reduce" and site.joined_offset is not None:
        offset = site.joined_offset
    return torch.arange(offset, offset + span.stop - span.start)


def add_in_turn(rows: Tensor, *, first: Tensor, stride: int, wide: bool) -> Tensor:
    """Add each column's ranks in turn, each column from its own first rank.

    Args:
        rows: 2D (ranks, elements).
        first: 1D, int64: first rank to add, per element; taken modulo the number of ranks.
        stride: 1 for ascending ranks, -1 for descending.
        wide: True to add 16-bit elements in fp32 and round once.

    Returns:
        1D, in the rows' dtype.
    """
    table = rows.to(torch.float32) if wide and rows.element_size() == 2 else rows
    columns = torch.arange(rows.shape[1], device=rows.device)
    # turns[t][column] is the value of the rank that is added t-th in this column.
    turns = [table[(first + stride * turn) % len(rows), columns] for turn in range(len(rows))]
    return add_linear(turns).to(rows.dtype)


def first_ranks(
    site: SumSite, *, positions: Tensor, order: AddOrder, rank_count: int, elem_bytes: int
) -> tuple[Tensor, int]:
    """Return the first rank to add, per element, and the stride: 1 (ascending) or -1.

    See [Note: which rank comes when].

    Args:
        site: Position in the call.
        positions: 1D, int64: element positions in the backend's buffer.
        order: An order that depends on positions, except `random-tree`.
        rank_count: Ranks in the group.
        elem_bytes: Element size, in bytes.
    """
    if order == "gloo":
        return positions // gloo_chunk_elems(site, ranks=rank_count, elem_bytes=elem_bytes) - 1, -1
    # A single rank gets these elements, so no chunk of the buffer matters.
    if site.kind != "all_reduce":
        ends_on = torch.full_like(positions, site.ends_on)
        return (ends_on, 1) if order == "nccl-sym" else (ends_on + 1, 1)
    # Symmetric kernels deal out 32 elements per rank and turn.
    if order == "nccl-sym":
        return positions // 32, 1
    # -(-a // b) is ceil(a / b).
    if order == "ring":
        return positions // -(-site.elems // rank_count), 1
    # `nccl-ring`: a run is a chunk of half of NCCL's buffer (2 MiB) per rank.
    run = rank_count * (2 * _MIB // elem_bytes)
    # The last run is cut evenly, with chunks aligned to 16 bytes.
    rest = site.elems % run
    last_chunk = -(-(-(-rest // rank_count) * elem_bytes) // 16) * 16 // elem_bytes
    in_last = positions >= site.elems - rest
    lengths = torch.where(in_last, max(last_chunk, 1), run // rank_count)
    return positions % run // lengths + 1, 1


def gloo_chunk_elems(site: SumSite, *, ranks: int, elem_bytes: int) -> int:
    """Return gloo's chunk length: elements that are added with the same first rank.

    A chunk is a whole number of segments. All-reduces and flat reduce-scatters first choose the
    segment count: a multiple of the ranks, at least two per rank, with at most 1 MiB per segment.
    Rooted reduces first choose the segment length: half a rank's share, at most 1 MiB. A list
    reduce-scatter is a rooted reduce per entry.
    """
    elems = site.elems
    if site.kind == "all_reduce" and site.joined_elems is not None:
        elems = site.joined_elems
    size = elems * elem_bytes

    def ceil(a: int, b: int) -> int:
        return (a + b - 1) // b

    # Bytes per segment first, rounded up to whole elements.
    if site.kind in ("all_reduce", "reduce_scatter"):
        per_rank = ceil(max(ceil(size, _MIB), 2 * ranks), ranks)
        return per_rank * ceil(ceil(size, per_rank * ranks), elem_bytes)
    # Rooted: elements per segment first.
    segment = ceil(min(ceil(size, 2 * ranks), _MIB), elem_bytes)
    per_rank = ceil(max(ceil(elems, segment), 2 * ranks), ranks)
    return per_rank * segment


def add_by_random_trees(rows: Tensor, *, positions: Tensor, seed: int) -> Tensor:
    """Add each column of `rows` in its class's tree; see [Note: which rank comes when]."""
    # [elements], 0 to _TREES - 1
    classes = positions % _TREES
    out = torch.empty_like(rows[0])
    for element_class in classes.unique().tolist():
        mine = classes == element_class
        # Leaves: one row per rank, with the columns of this class.
        trees = list(rows[:, mine])
        for left, right, wide in _joints(seed, len(rows), element_class):
            one = trees.pop(left)
            other = trees.pop(right)
            if rows.element_size() > 2:
                total = one + other
            elif wide:
                total = one.float() + other.float()
            else:
                # Equals their 16-bit sum, because fp32 has more than twice their bits.
                total = (one.float() + other.float()).to(rows.dtype)
            trees.append(total)
        # A wide root is rounded here, so its joint's width does not matter.
        out[mine] = trees[0].to(rows.dtype)
    return out


def _joints(seed: int, rank_count: int, element_class: int) -> Iterator[tuple[int, int, bool]]:
    # Hash values instead of a generator, so that the trees are the same in every process.
    for number, trees in enumerate(range(rank_count, 1, -1)):
        name = "/".join(map(str, (seed, rank_count, element_class, number)))
        spelled = hashlib.blake2b(name.encode("ascii"), digest_size=8).digest()
        # Little-endian, 64 bits.
        draw = sum(byte << (8 * place) for place, byte in enumerate(spelled))
        left, rest = draw % trees, draw // trees
        yield left, rest % (trees - 1), rest // (trees - 1) % 2 == 1


def _check_spans(
    spans: Sequence[SumSpan] | None, *, order: AddOrder, param_elems: int, rank_count: int
) -> list[SumSpan]:
    """Return the non-empty spans in order, after checking that they tile the param."""
    if spans is None:
        raise UsageError(
            f"expected spans for each param, because order {order!r} depends on the position of an "
            "element in the call that adds it, got none. Pass `orders`, or choose order "
            "'linear'."
        )
    tiles = sorted((span for span in spans if span.stop != span.start), key=lambda span: span.start)
    # End of the tiles so far; the next must begin here.
    reached = 0
    for tile in tiles:
        fits = tile.stop > tile.start and 0 <= tile.site.ends_on < rank_count
        if tile.start != reached or not fits:
            raise UsageError(
                f"expected spans that continue at element {reached} and end on a rank below "
                f"{rank_count}, got {tile}. Pass spans that tile the param, no gap or overlap."
            )
        reached = tile.stop
    if reached != param_elems:
        raise UsageError(
            f"expected spans that tile all {param_elems} elements of the param, got spans that "
            f"cover {reached}. Count their elements in the flattened param, from 0."
        )
    return tiles
