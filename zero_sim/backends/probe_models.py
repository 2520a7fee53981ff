"""Order models for the probe: reductions without communication, and their trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_sim.backends.probe import Kind, Reduction, Values
from zero_sim.reference import AddOrder, Arrangement, SumSite, SumSpan
from zero_sim.reference.adding import add_ranks, first_ranks
from zero_sim.reference.arrangement import ADD, Tree, chain_of
from zero_sim.reference.arrangement import pieces as arranged_pieces


def by_model(
    kind: Kind,
    *,
    order: AddOrder,
    rank_count: int,
    elems: int,
    order_seed: int = 0,
    arrangement: Arrangement | None = None,
    sizes: Sequence[int] = (),
) -> Reduction:
    """Return a reduction as the oracle models it, without communication."""
    spans = [
        SumSpan(start=start, stop=stop, site=site)
        for start, stop, site in sites_of(
            kind, elems=elems, rank_count=rank_count, arrangement=arrangement, sizes=sizes
        )
    ]

    def reduce(values: Values) -> Tensor:
        parts = [values(rank) for rank in range(rank_count)]
        return add_ranks(parts, order=order, spans=spans, seed=order_seed)

    return reduce


def sites_of(
    kind: Kind,
    *,
    elems: int,
    rank_count: int,
    arrangement: Arrangement | None = None,
    sizes: Sequence[int] = (),
) -> Iterator[tuple[int, int, SumSite]]:
    """Yield parts of a reduction that end on the same rank, with their sites."""
    arrangements = () if arrangement is None else (arrangement,)
    if kind == "all_reduce":
        site = SumSite(kind=kind, elems=elems, offset=0, arrangements=arrangements)
        yield 0, elems, site
        return
    # Elements per rank.
    shares = list(sizes) if kind == "reduce_scatter_list" else [elems // rank_count] * rank_count
    start = 0
    for rank, share in enumerate(shares):
        # List entries are reduced like separate calls.
        is_list = kind == "reduce_scatter_list"
        yield (
            start,
            start + share,
            SumSite(
                kind=kind,
                elems=share if is_list else elems,
                offset=0 if is_list else start,
                ends_on=rank,
                arrangements=arrangements,
            ),
        )
        start += share


def pieces_of(
    kind: Kind,
    *,
    order: AddOrder,
    rank_count: int,
    elems: int,
    elem_bytes: int,
    sizes: Sequence[int] = (),
    arrangement: Arrangement | None = None,
) -> list[tuple[int, int, Tree]]:
    """Return runs of elements that a model adds alike, with their trees.

    The order adds in chains, or is `tree`. An observed arrangement replaces the model. `sizes` are
    each rank's elements in a `reduce_scatter_list`.
    """
    found = []
    for start, stop, site in sites_of(kind, elems=elems, rank_count=rank_count, sizes=sizes):
        if start == stop:
            continue
        offset = start - site.offset
        if arrangement is not None:
            # Offsets are within the call, so shift them below.
            kept = arranged_pieces(
                arrangement,
                kind=kind,
                elems=site.elems,
                elem_bytes=elem_bytes,
                ends_on=site.ends_on,
            )
            found += [(offset + one, offset + other, tree) for one, other, tree in kept]
        elif order == "tree":
            found.append((start, stop, _balanced(range(rank_count))))
        else:
            found += _chains(site, start, stop, order, rank_count, elem_bytes)
    return found


def _chains(
    site: SumSite, start: int, stop: int, order: AddOrder, rank_count: int, elem_bytes: int
) -> Iterator[tuple[int, int, Tree]]:
    """Yield runs of a call that an order adds as chains."""
    # Within the call, because a ring's first rank depends on this position.
    positions = torch.arange(site.offset, site.offset + stop - start)
    if order == "linear":
        firsts, stride = torch.zeros_like(positions), 1
    else:
        firsts, stride = first_ranks(
            site, positions=positions, order=order, rank_count=rank_count, elem_bytes=elem_bytes
        )
    # Ring chunks start at different ranks, and go round with a fixed stride.
    values, counts = (firsts % rank_count).unique_consecutive(return_counts=True)
    for first, count in zip(values.tolist(), counts.tolist(), strict=True):
        ranks = [(first + stride * hop) % rank_count for hop in range(rank_count)]
        yield start, start + count, chain_of(ranks)
        start += count


def _balanced(ranks: Sequence[int]) -> Tree:
    """Return the tree that adds neighbours, then their sums. An odd one out moves up."""
    level: list[Tree] = [(rank,) for rank in ranks]
    while len(level) > 1:
        pairs = [(*one, *other, ADD) for one, other in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def text_of(tree: Tree) -> str:
    """Return a tree's text as in `ObservedOrder`: the side with the smallest rank comes first."""
    stack: list[tuple[int, str]] = []
    for step in tree:
        if step != ADD:
            stack.append((step, str(step)))
            continue
        sides = sorted([stack.pop(), stack.pop()])
        stack.append((sides[0][0], f"({sides[0][1]}+{sides[1][1]})"))
    return stack[0][1]


def tree_of(text: str) -> Tree:
    """Parse a tree's text, as made by `text_of`."""
    steps: list[int] = []
    number = ""
    for char in text:
        if char.isdigit():
            number += char
            continue
        if number:
            steps.append(int(number))
            number = ""
        # In postfix order, an addition comes at its closing bracket.
        if char == ")":
            steps.append(ADD)
    return (*steps, int(number)) if number else tuple(steps)
