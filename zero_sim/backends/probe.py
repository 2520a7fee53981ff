"""Measures in which order a backend adds, from its outputs alone, and compares it with a model.

To be called by every rank of a group, on any backend, before an order model is trusted.

[Note: rooted triples]
Let rank i bring B, rank j bring -B, rank k bring 1 and all others 0, with B so large that B + 1 is
rounded to B. If i and j are joined before k comes to either of them, the sum is 1; else the 1 is
lost and the sum is 0. Of the three ways to hand out the roles in a triple of ranks exactly one
leaves the 1, and that for all triples determines the binary tree of additions: the ranks of a set
that are joined first are those that some triple joins before a third one of the set (Aho, Sagiv,
Szymanski and Ullman, 1981). Every element of a tensor is measured in the same calls, three for each
triple of ranks.

Where the 1 is never lost, the accumulator is wider than the data; a larger B finds the tree inside
of fp32. Where it is lost in some triples only, partial sums are kept in more than one dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.reference import AddOrder, SumSite, SumSpan
from zero_sim.reference.adding import add_ranks

Reduction = Callable[[Sequence[float]], Tensor]
"""Reduces one tensor a rank, each filled with the rank's number of those given, in group-rank
order; returns what came of every element, 1D, the same on every rank."""

Kind = Literal["all_reduce", "reduce_scatter"]
Accumulator = Literal["data", "wider", "mixed"]

_LARGE_AND_SMALL = {
    torch.bfloat16: ((2.0**10, 1.0), (2.0**30, 1.0)),
    torch.float16: ((2.0**13, 1.0), (2.0**15, 2.0**-14)),
    torch.float32: ((2.0**26, 1.0), (2.0**60, 1.0)),
    torch.float64: ((2.0**56, 1.0), (2.0**56, 1.0)),
}
"""B and what stands for the 1, beyond the data's own significand and beyond fp32's (fp64's)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedOrder:
    """How a reduction was seen to add."""

    trees: tuple[str, ...]
    """For each run of elements that are added alike, the tree, as `((0+1)+2)`; `?` where the
    outputs fit none."""
    starts: tuple[int, ...]
    """The first element of each run."""
    accumulator: Accumulator
    """Whether partial sums are kept in the data's dtype, in a wider one, or some in either."""

    def tree_of(self, element: int) -> str:
        """The tree of one element."""
        return [
            tree for tree, start in zip(self.trees, self.starts, strict=True) if start <= element
        ][-1]


def observe(reduce: Reduction, *, rank_count: int, dtype: torch.dtype) -> ObservedOrder:
    """Measure a reduction; see [Note: rooted triples].

    Args:
        reduce: What is measured; it is called the same number of times on every rank.
        rank_count: Ranks of the group; more than 16 take thousands of calls.
        dtype: Of the data: bf16, fp16, fp32 or fp64.
    """
    narrow, wide = (
        _measure(reduce, rank_count=rank_count, large=large, small=small)
        for large, small in _LARGE_AND_SMALL[dtype]
    )
    accumulator: Accumulator = "mixed"
    if bool((narrow.sum(dim=1) == 1).all()):
        accumulator = "data"
    elif bool(narrow.all()):
        accumulator = "wider"
    # Between neighbours that differ in any triple a new run starts.
    flat = wide.reshape(-1, wide.shape[-1])
    differs = (flat[:, 1:] != flat[:, :-1]).any(dim=0).nonzero().reshape(-1).tolist()
    starts = [0, *(index + 1 for index in differs)]
    trees = [_build_tree(wide[:, :, start], rank_count=rank_count) for start in starts]
    return ObservedOrder(trees=tuple(trees), starts=tuple(starts), accumulator=accumulator)


def _roles(rank_count: int) -> Iterator[tuple[int, int, int]]:
    """Every triple of ranks, with each of them once in the last place, three in a row."""
    for a, b, c in combinations(range(rank_count), 3):
        yield from ((a, b, c), (a, c, b), (b, c, a))


def _measure(reduce: Reduction, *, rank_count: int, large: float, small: float) -> Tensor:
    """Bool, (triples, 3, elements): whether the third rank joined last."""
    seen = []
    for i, j, k in _roles(rank_count):
        values = [0.0] * rank_count
        values[i], values[j], values[k] = large, -large, small
        seen.append(reduce(values) == small)
    if not seen:
        return torch.ones((0, 3, len(reduce([0.0] * rank_count))), dtype=torch.bool)
    return torch.stack(seen).view(-1, 3, len(seen[0]))


def _build_tree(triples: Tensor, *, rank_count: int) -> str:
    """The tree that one element's triples, (triples, 3), determine; `?` if they contradict."""
    joined = {
        (i, j, k)
        for (i, j, k), first in zip(_roles(rank_count), triples.reshape(-1).tolist(), strict=True)
        if first
    }
    return _tree_over(tuple(range(rank_count)), joined) or "?"


def _tree_over(ranks: tuple[int, ...], joined: set[tuple[int, int, int]]) -> str | None:
    if len(ranks) == 1:
        return str(ranks[0])
    parts = {rank: {rank} for rank in ranks}
    for i, j, k in joined:
        if parts.keys() >= {i, j, k} and parts[i] is not parts[j]:
            parts[i] |= parts[j]
            parts.update(dict.fromkeys(parts[j], parts[i]))
    sides = {min(part): tuple(sorted(part)) for part in parts.values()}
    if len(sides) != 2:
        return None
    left, right = (_tree_over(side, joined) for _, side in sorted(sides.items()))
    return None if left is None or right is None else f"({left}+{right})"


def by_calling(
    kind: Kind,
    *,
    group: dist.ProcessGroup,
    elems: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Reduction:
    """A real reduction over a group, of `elems` elements a rank; they must divide for a scatter."""
    rank, rank_count = group.rank(), group.size()
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def reduce(values: Sequence[float]) -> Tensor:
        x = torch.full((elems,), values[rank], dtype=dtype, device=device)
        if kind == "all_reduce":
            dist.all_reduce(x, group=group)
            return x.cpu()
        part = torch.empty(elems // rank_count, dtype=dtype, device=device)
        scatter(part, x, group=group)
        gather(x, part, group=group)
        return x.cpu()

    return reduce


def by_model(
    kind: Kind,
    *,
    order: AddOrder,
    rank_count: int,
    elems: int,
    dtype: torch.dtype,
    order_seed: int = 0,
) -> Reduction:
    """The reduction as the oracle models it; nothing is communicated."""
    spans = [
        SumSpan(
            start=start,
            stop=stop,
            site=SumSite(kind=kind, elems=elems, offset=start, ends_on=ends_on),
        )
        for start, stop, ends_on in _destinations(kind, elems=elems, rank_count=rank_count)
    ]

    def reduce(values: Sequence[float]) -> Tensor:
        parts = [torch.full((elems,), value, dtype=dtype) for value in values]
        return add_ranks(parts, order=order, spans=spans, seed=order_seed)

    return reduce


def _destinations(kind: Kind, *, elems: int, rank_count: int) -> Iterator[tuple[int, int, int]]:
    if kind == "all_reduce":
        yield 0, elems, 0
        return
    shard_elems = elems // rank_count
    for rank in range(rank_count):
        yield rank * shard_elems, (rank + 1) * shard_elems, rank


def compare(expected: ObservedOrder, observed: ObservedOrder, *, name: str) -> str:
    """Say whether a backend adds as a model does.

    Args:
        expected: What the model gives, measured with `by_model`.
        observed: What the backend gives, measured with `by_calling`.
        name: Of the model.

    Returns:
        `agrees with NAME`; or `drift: expected ..., observed ...`, at the first element that is
        added otherwise.
    """
    if expected.accumulator != observed.accumulator:
        return (
            f"drift: expected partial sums as in {name}, {_IN_WORDS[expected.accumulator]}, "
            f"observed them {_IN_WORDS[observed.accumulator]}"
        )
    for element in sorted({*expected.starts, *observed.starts}):
        wanted, got = expected.tree_of(element), observed.tree_of(element)
        if wanted != got:
            return (
                f"drift: expected {wanted} as in {name}, observed tree {got}, at element {element}"
            )
    return f"agrees with {name}"


_IN_WORDS: dict[Accumulator, str] = {
    "data": "in the data's dtype",
    "wider": "in a wider dtype",
    "mixed": "in more than one dtype",
}
