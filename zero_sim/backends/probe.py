"""Measurement of a backend's summation order, from its outputs alone.

Every rank of a group calls it, on any backend, before an order model is trusted.

[Note: pairs that cancel]
Let rank i contribute B, rank j -B, some other ranks a power of two each, and the rest 0. B is so
large that anything added to it is rounded away. The powers are so few that their sums are exact. A
contribution is lost if it joins i or j before these two join, and kept if it joins later. So the
bits of the sum show the ranks outside the smallest subtree that contains i and j.

For a fixed i and every j, these subtrees are the ancestors of i, nested in each other. The ranks
between two ancestors form a smaller tree, which is measured in the same way. The leaf sets of its
subtrees determine a binary tree, and one pair tests one subtree. Elements do not affect each
other's sums, so each element has its own pair, and a run of elements that are added alike tests all
pairs in one call.

If i is chosen well, a tree of N ranks takes N to 2 N pairs. Each pair takes as many calls as the
significand needs for the powers of the other ranks: 20 for 128 ranks and bf16. Verifying a model
takes as many calls as one pair, for any N.

There are two choices of powers and B. In the first, only the data's significand is too short for
their sum; in the second, fp32's (fp64's) is too. If nothing is lost in the first and all in the
second, the accumulator is wider than the data. If some is lost, partial sums have more than one
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.reference.arrangement import ADD, Tree

Values = Callable[[int], Tensor]
"""A group rank's contribution: 1D, on the CPU."""
Reduction = Callable[[Values], Tensor]
"""Reduces all ranks' contributions. Returns each element's sum: 1D, on the CPU, equal on all
ranks."""

Kind = Literal["all_reduce", "reduce_scatter", "reduce_scatter_list"]
Accumulator = Literal["data", "wider", "mixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A number so large that small powers of two are rounded away when added to it."""

    large: float
    small: float
    """Smallest power of two in use."""
    room: int
    """Number of powers per call."""


_SCALES: Mapping[torch.dtype, tuple[Scale, Scale]] = {
    torch.bfloat16: (
        Scale(large=2.0**16, small=1.0, room=7),
        Scale(large=2.0**60, small=1.0, room=7),
    ),
    torch.float16: (
        Scale(large=2.0**15, small=2.0**-6, room=9),
        # Smaller numbers are subnormal and may be flushed to 0.
        Scale(large=2.0**15, small=2.0**-14, room=5),
    ),
    torch.float32: (
        Scale(large=2.0**48, small=1.0, room=22),
        Scale(large=2.0**80, small=1.0, room=22),
    ),
    torch.float64: (
        Scale(large=2.0**110, small=1.0, room=50),
        Scale(large=2.0**110, small=1.0, room=50),
    ),
}
"""By dtype: scales beyond the data's own significand, and beyond fp32's (fp64's)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedOrder:
    """A reduction's observed summation order."""

    trees: tuple[str, ...]
    """Tree of each run of elements that are added alike, such as `((0+1)+2)`; `?` if no tree
    fits."""
    starts: tuple[int, ...]
    """Each run's first element."""
    accumulator: Accumulator
    """Dtype of partial sums: the data's, a wider dtype, or both."""

    def tree_of(self, element: int) -> str:
        """Return an element's tree."""
        return [
            tree for tree, start in zip(self.trees, self.starts, strict=True) if start <= element
        ][-1]


def observe(reduce: Reduction, *, rank_count: int, elems: int, dtype: torch.dtype) -> ObservedOrder:
    """Measure a reduction of bf16, fp16, fp32 or fp64; see [Note: pairs that cancel].

    Every rank of the group must call this.
    """
    narrow, wide = _SCALES[dtype]
    query = _Query(reduce, rank_count=rank_count, elems=elems, dtype=dtype)
    # All elements form one class, until some are added differently.
    classes = [_Class(elements=torch.arange(elems), rank_count=rank_count)]
    # Each round measures one subtree per class, so all ranks make the same calls.
    while any(each.next_set() for each in classes):
        classes = list(_look(query, classes, wide))
    found = sorted((start, each.text()) for each in classes for start in _starts_of(each.elements))
    trees = [(start, text) for start, text in found]
    # Join neighbouring runs with the same tree.
    kept = [
        (start, text)
        for (start, text), before in zip(trees, [None, *trees], strict=False)
        if before is None or before[1] != text
    ]
    return ObservedOrder(
        trees=tuple(text for _, text in kept),
        starts=tuple(start for start, _ in kept),
        accumulator=_accumulator(query, classes, narrow),
    )


class _Query:
    """Queries for the ranks outside the smallest subtree of two given ranks."""

    def __init__(
        self,
        reduce: Reduction,
        *,
        rank_count: int,
        elems: int,
        dtype: torch.dtype,
        positions: Tensor | None = None,
    ) -> None:
        self._reduce, self._ranks, self._elems = reduce, rank_count, elems
        self._dtype = dtype
        # Elements to query. All others contribute 0.
        self._positions = torch.arange(elems) if positions is None else positions

    def __call__(
        self, firsts: Tensor, seconds: Tensor, members: Tensor, scale: Scale
    ) -> tuple[Tensor, Tensor]:
        """Query all elements at once, in as many calls as needed.

        Args:
            firsts: [elements]: a rank per element.
            seconds: [elements]: another rank per element; the same rank for no query.
            members: [elements, ranks], bool: ranks to query.
            scale: Numbers to contribute.

        Returns:
            [elements, ranks], bool: ranks outside; and [elements], bool: True if some tree can have
            this sum.
        """
        rank_ids = torch.arange(self._ranks)
        # [elements, ranks]: the pair itself contributes B and -B, but no power.
        queried = members & (rank_ids != firsts[:, None]) & (rank_ids != seconds[:, None])
        queried &= (firsts != seconds)[:, None]
        place = queried.cumsum(1) - 1  # [elements, ranks]: index among the element's queried ranks.
        outside = torch.zeros_like(queried)
        fits = torch.ones(len(firsts), dtype=torch.bool)
        # Rounded up, at least one.
        calls = -(-max(1, int(queried.sum(1).max())) // scale.room) if len(firsts) else 0
        # The same on every rank, because each call is a collective.
        for turn in range(calls):
            here = queried & (place // scale.room == turn)

            def bring(rank: int, here: Tensor = here) -> Tensor:
                power = torch.pow(2.0, (place[:, rank] % scale.room).double()) * scale.small
                values = torch.where(here[:, rank], power, 0.0)
                pair = firsts != seconds
                values = torch.where(pair & (firsts == rank), scale.large, values)
                values = torch.where(pair & (seconds == rank), -scale.large, values)
                whole = torch.zeros(self._elems, dtype=self._dtype)
                whole[self._positions] = values.to(self._dtype)
                return whole

            # In units of the smallest power, so bit k belongs to the rank with power k.
            sums = self._reduce(bring)[self._positions].double() / scale.small
            bits = sums.round().clamp(0, 2.0**scale.room - 1).to(torch.int64)
            # Bits must be 0 if their rank was not queried.
            powers = torch.where(here, 1 << (place % scale.room), 0)
            fits &= (bits.double() == sums) & ((bits & ~powers.sum(1)) == 0)
            outside |= here & ((bits[:, None] & powers) != 0)
        return outside, fits


class _Class:
    """Elements that were added alike so far, and the known part of their tree."""

    def __init__(self, *, elements: Tensor, rank_count: int) -> None:
        self.elements = elements
        whole = frozenset(range(rank_count))
        self.parts: dict[frozenset[int], tuple[frozenset[int], ...]] = {}
        """For each known subtree, by its ranks: the subtrees joined in it, in order."""
        self._whole = whole
        self.is_tree = True

    def next_set(self) -> frozenset[int]:
        """Return the next subtree to measure; empty if all are known."""
        if not self.is_tree:
            return frozenset()
        waiting = [self._whole]
        while waiting:
            here = waiting.pop()
            # One or two ranks have only one tree.
            if len(here) < 3:
                continue
            if here not in self.parts:
                return here
            waiting.extend(self.parts[here])
        return frozenset()

    def split(self, elements: Tensor) -> _Class:
        """Return a copy for some elements."""
        new = _Class(elements=elements, rank_count=len(self._whole))
        # Measurements from before the split hold for all parts.
        new.parts, new.is_tree = dict(self.parts), self.is_tree
        return new

    def text(self) -> str:
        """Return the tree as text; `?` if there is none."""
        return self._text(self._whole) if self.is_tree else "?"

    def _text(self, ranks: frozenset[int]) -> str:
        if len(ranks) < 3:
            joined = "+".join(map(str, sorted(ranks)))
            return f"({joined})" if len(ranks) == 2 else joined
        first, *rest = self.parts[ranks]
        total, least = self._text(first), min(first)
        for part in rest:
            # The side with the smallest rank first, because a + b is b + a.
            sides = sorted([(least, total), (min(part), self._text(part))])
            total, least = f"({sides[0][1]}+{sides[1][1]})", sides[0][0]
        return total

    def pairs(self) -> Iterator[tuple[int, int, frozenset[int]]]:
        """Yield a rank of either side and the ranks outside, for subtrees of 2 or more ranks."""
        waiting = [self._whole] if self.is_tree else []
        while waiting:
            here = waiting.pop()
            if len(here) == 2:
                one, other = sorted(here)
                yield one, other, self._whole - here
            elif len(here) > 2:
                chain = self.parts[here]
                inside = set(chain[0])
                for part in chain[1:]:
                    one = min(inside)
                    inside |= part
                    yield one, min(part), self._whole - inside
                waiting.extend(chain)


def _look(query: _Query, classes: Sequence[_Class], scale: Scale) -> Iterator[_Class]:
    """Measure one subtree per class, and split classes whose elements differ."""
    elems = sum(len(each.elements) for each in classes)
    ranks = len(classes[0]._whole)
    sets = [each.next_set() for each in classes]
    members = torch.zeros((elems, ranks), dtype=torch.bool)
    # [elements]: rank whose ancestors this round measures.
    pivots = torch.zeros(elems, dtype=torch.int64)
    for each, here in zip(classes, sets, strict=True):
        if here:
            members[each.elements[:, None], torch.tensor(sorted(here))] = True
            pivots[each.elements] = _pivot_of(here)
    others = [sorted(here - {_pivot_of(here)}) if here else [] for here in sets]
    # [pairs, elements, ranks].
    outsides = torch.zeros((max(map(len, others)), elems, ranks), dtype=torch.bool)
    fits = torch.ones(elems, dtype=torch.bool)
    # Classes share calls, so the class with the most pairs decides the number of calls.
    for turn in range(len(outsides)):
        seconds = pivots.clone()
        for each, rest in zip(classes, others, strict=True):
            if turn < len(rest):
                seconds[each.elements] = rest[turn]
        outsides[turn], fit = query(pivots, seconds, members, scale)
        fits &= fit
    for each, here, rest in zip(classes, sets, others, strict=True):
        if not here:
            yield each
            continue
        # [elements, pairs * ranks + 1]: results, and if all sums fitted. Equal rows stay together.
        seen = outsides[: len(rest), each.elements].permute(1, 0, 2).reshape(len(each.elements), -1)
        seen = torch.cat([seen, fits[each.elements, None]], dim=1)
        # One new class per distinct row.
        kinds, which = seen.unique(dim=0, return_inverse=True)
        for kind in range(len(kinds)):
            part = each.split(each.elements[which == kind])
            sides = kinds[kind, :-1].view(len(rest), ranks)
            inside = [here - set(side.nonzero().flatten().tolist()) for side in sides]
            chain = _chain_of(_pivot_of(here), dict(zip(rest, inside, strict=True)))
            part.is_tree = bool(kinds[kind, -1]) and chain is not None
            part.parts[here] = chain or ()
            yield part


def _pivot_of(ranks: frozenset[int]) -> int:
    """Return the rank whose ancestors are measured. The middle rank is as good as any."""
    return sorted(ranks)[len(ranks) // 2]


def _chain_of(
    pivot: int, inside: Mapping[int, frozenset[int]]
) -> tuple[frozenset[int], ...] | None:
    """Return the subtrees that join a rank, in order; None if no tree has these sets."""
    # From the smallest ancestor to the largest.
    chain, before = [frozenset({pivot})], frozenset({pivot})
    for ancestor in sorted(set(inside.values()), key=len):
        new = ancestor - before
        # Ancestors are nested. If a rank joins in an ancestor, this is its smallest common subtree
        # with the pivot.
        if not before < ancestor or any(inside[rank] != ancestor for rank in new):
            return None
        chain.append(new)
        before = ancestor
    return tuple(chain)


def _starts_of(elements: Tensor) -> list[int]:
    """Return each consecutive run's first element."""
    ordered = elements.sort().values
    is_start = torch.ones_like(ordered, dtype=torch.bool)
    is_start[1:] = ordered[1:] != ordered[:-1] + 1
    return ordered[is_start].tolist()


def _accumulator(query: _Query, classes: Sequence[_Class], scale: Scale) -> Accumulator:
    """Return the dtype of partial sums, measured with numbers for which only the data is narrow."""
    elems = sum(len(each.elements) for each in classes)
    pairs = [list(each.pairs()) for each in classes]
    ranks = len(classes[0]._whole)
    members = torch.ones((elems, ranks), dtype=torch.bool)
    are_lost = are_kept = True
    for turn in range(max(map(len, pairs))):
        firsts = torch.zeros(elems, dtype=torch.int64)
        seconds, wanted = firsts.clone(), torch.zeros((elems, ranks), dtype=torch.bool)
        for each, own in zip(classes, pairs, strict=True):
            if turn < len(own):
                first, second, outside = own[turn]
                firsts[each.elements], seconds[each.elements] = first, second
                if outside:
                    wanted[each.elements[:, None], torch.tensor(sorted(outside))] = True
        # With the narrow scale, only the data's dtype has no room for both numbers.
        got, fits = query(firsts, seconds, members, scale)
        ids = torch.arange(ranks)
        all_others = (ids != firsts[:, None]) & (ids != seconds[:, None])
        all_others &= (firsts != seconds)[:, None]
        # Lost exactly as the tree predicts, so every partial sum was rounded to the data's dtype.
        are_lost &= bool(fits.all()) and torch.equal(got, wanted)
        are_kept &= bool(fits.all()) and torch.equal(got, all_others)
    if are_lost:
        return "data"
    return "wider" if are_kept else "mixed"


Pieces = Sequence[tuple[int, int, Tree]]
"""Element runs that tile a reduction, each with its tree."""


def verify(
    reduce: Reduction, pieces: Pieces, *, rank_count: int, elems: int, dtype: torch.dtype
) -> int | None:
    """Check that a reduction adds as a model predicts, in as many calls as one pair takes.

    Neighbours at both ends of a run test the subtrees in turn. A run with fewer elements than
    subtrees tests as many subtrees as it has elements.

    Returns:
        First element that is added in another way or in a wider dtype; None without such elements.
    """
    known: dict[Tree, tuple[Tensor, Tensor, Tensor]] = {}
    where: list[Tensor] = []
    tables: list[tuple[Tensor, ...]] = []
    for start, stop, tree in pieces:
        if tree not in known:
            # Once per tree, because many runs of a ring share a tree.
            known[tree] = _pairs_of(tree, rank_count)
        pair_count = len(known[tree][0])
        here = torch.arange(start, stop)
        # Both ends, so that a shifted boundary shows.
        if len(here) > 2 * pair_count:
            here = torch.cat([here[:pair_count], here[-pair_count:]])
        where.append(here)
        turn = (here - start) % pair_count
        tables.append(tuple(table[turn] for table in known[tree]))
    if not where:
        return None
    positions = torch.cat(where)
    # [positions], [positions], [positions, ranks].
    firsts, seconds, wanted = (torch.cat(column) for column in zip(*tables, strict=True))
    query = _Query(reduce, rank_count=rank_count, elems=elems, dtype=dtype, positions=positions)
    # Query all other ranks, so one pair per element suffices.
    members = torch.ones_like(wanted)
    got, fits = query(firsts, seconds, members, _SCALES[dtype][0])
    wrong = ((got != wanted).any(1) | ~fits).nonzero().flatten()
    return int(positions[wrong[0]]) if len(wrong) else None


def _pairs_of(tree: Tree, rank_count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank of either side, and by rank True if outside, for each sum in a tree."""
    stack: list[set[int]] = []
    firsts, seconds, outside = [], [], []
    for step in tree:
        if step != ADD:
            stack.append({step})
            continue
        right, left = stack.pop(), stack.pop()
        firsts.append(min(left))
        seconds.append(min(right))
        stack.append(left | right)
        outside.append([rank not in stack[-1] for rank in range(rank_count)])
    return torch.tensor(firsts), torch.tensor(seconds), torch.tensor(outside)


def by_calling(
    kind: Kind,
    *,
    group: dist.ProcessGroup,
    elems: int,
    device: str = "cpu",
    sizes: Sequence[int] = (),
) -> Reduction:
    """Return a reduction that calls the backend.

    Args:
        kind: Kind of reduction.
        group: Group whose ranks all call it.
        elems: Number of elements; for `reduce_scatter` a multiple of the ranks.
        device: Device of the data.
        sizes: For `reduce_scatter_list`, the elements of each rank.
    """
    rank, rank_count = group.rank(), group.size()
    # Newer torch versions have other names.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def reduce(values: Values) -> Tensor:
        # [elems], all reduced by each call.
        x = values(rank).to(device)
        if kind == "all_reduce":
            dist.all_reduce(x, group=group)
        elif kind == "reduce_scatter":
            part = torch.empty(elems // rank_count, dtype=x.dtype, device=device)
            scatter(part, x, group=group)
            gather(x, part, group=group)
        else:
            entries = list(x.split(list(sizes)))
            part = torch.empty_like(entries[rank])
            dist.reduce_scatter(part, entries, group=group)
            entries[rank].copy_(part)
            # Parts differ in length and cannot be gathered, so each rank broadcasts its own.
            for root, entry in enumerate(entries):
                if len(entry):
                    dist.broadcast(entry, dist.get_global_rank(group, root), group=group)
        return x.cpu()

    return reduce


def compare(expected: ObservedOrder, observed: ObservedOrder, *, name: str) -> str:
    """Compare a backend's order, measured with `by_calling`, with a model's from `by_model`.

    Returns:
        `agrees with NAME`; or `drift: expected ..., observed ...` at the first element that is
        added in another way.
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
