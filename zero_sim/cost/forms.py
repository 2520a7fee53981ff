"""The buckets that a layout of the textbook's ZeRO has to have, in closed form.

They follow from the scenario and the sizes of the params alone, and share no code with the layout
that is judged by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from zero_sim.scenario.kinds import kind_of
from zero_sim.scenario.spec import Scenario

if TYPE_CHECKING:
    from torch import nn

SumBy = Literal["reduce-scatter", "all-reduce", "first-rank"]
Call = tuple[str, int, int]
"""Kind of a collective, size of its group, and the elements that a rank contributes."""


def in_words(call: Call) -> str:
    """The call as findings name it."""
    kind, ranks, elems = call
    return f"{kind} of {elems} elements on {ranks} ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSize:
    """One param as far as costs depend on it."""

    name: str
    kind: str
    """`dense`, or `expert`: what lies below a module named `experts`."""
    dtype: str
    elems: int
    param_bytes: int
    """Size of an element."""
    grad_bytes: int
    """Size of an element of its gradient, as autograd gives it."""
    grad_dtype: str = ""
    """Dtype of that; empty for the param's own."""
    row_elems: int = 1
    """Of a row of its dim 0; 1 without dims, or without elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Where a bucket is cut into shards."""

    elems: int
    shards: int
    owner: int | None = None
    """The shard that has all of it; None where they are as even as they can be."""

    def start(self, shard: int) -> int:
        """First element of a shard; of the one behind the last, the number of elements."""
        if self.owner is not None:
            return 0 if shard <= self.owner else self.elems
        shortest, longer_count = divmod(self.elems, self.shards)
        return shard * shortest + min(shard, longer_count)

    def owners_of(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Shards that have some of a stretch of elements, and how many, in their order."""
        shortest, longer_count = divmod(self.elems, self.shards)
        first = self.owner or 0
        if self.owner is None and start < stop:
            # In the shards that are one longer, or behind them.
            behind = start - longer_count * (shortest + 1)
            first = start // (shortest + 1) if behind < 0 else longer_count + behind // shortest
        while start < stop:
            end = min(self.start(first + 1), stop)
            if end > start:
                yield first, end - start
            start, first = max(start, end), first + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketForm:
    """One bucket with elements, as one rank sees it."""

    names: tuple[str, ...]
    """Its params, in registration order."""
    kind: str
    starts: tuple[tuple[str, int], ...]
    """Those of them that have elements, and where each begins in it."""
    payload_elems: int
    """Without its padding."""
    cuts: Cuts
    """Shards of it, padding included."""
    shard: int
    """Index of this rank's shard."""
    group_size: int
    """Ranks that shard it; those that sum it with stage 0."""
    replica_count: int
    is_sharded: bool
    """True if each rank has a shard of it; with stage 0 each has all."""
    sum_by: SumBy
    """Reduction of its gradients: to the ranks with the shards, to all ranks, or by the first rank,
    which adds what all send it and sends the sum back."""
    is_last: bool
    """Whether it is the one that a forward is expected to need last: of all that as many ranks
    shard, which are the same ones, the one whose first param is registered last."""
    param_bytes: int
    grad_bytes: int
    param_dtype: str
    """As the event log names it, `bfloat16`."""
    grad_dtype: str
    chunk_elems: int | None = None
    """Of what each rank has in its place, how much is gathered at a time; None for all."""

    @property
    def elems(self) -> int:
        """Elements with padding."""
        return self.cuts.elems

    @property
    def shard_elems(self) -> int:
        """Elements of this rank's shard, padding included."""
        return self.cuts.start(self.shard + 1) - self.shard_start

    @property
    def shard_start(self) -> int:
        """First element of this rank's shard."""
        return self.cuts.start(self.shard)

    @property
    def is_even(self) -> bool:
        """True if all shards are equally long."""
        return self.elems % self.cuts.shards == 0

    @property
    def has_one_owner(self) -> bool:
        """True if one rank has the one shard with elements."""
        return self.cuts.owner is not None

    @property
    def is_summed_whole(self) -> bool:
        """True if each rank gets the sum of all of it, and keeps its shard."""
        return self.sum_by != "reduce-scatter"

    @property
    def names_with_elems(self) -> tuple[str, ...]:
        """Its params that have elements, in no order that matters."""
        return tuple(name for name, _ in self.starts)

    @property
    def sum_call(self) -> Call:
        """The call that reduces it, the first of two where there are copies of its shards."""
        if self.sum_by == "first-rank":
            return ("gather", self.group_size, self.elems)
        if not self.is_sharded or self.is_summed_whole:
            return ("all_reduce", self.group_size, self.elems)
        return (self._scatter_kind, self.group_size, self.elems)

    @property
    def sent_back_call(self) -> Call | None:
        """The call by which all learn what the first rank added; None where it does not."""
        if self.sum_by != "first-rank":
            return None
        return ("broadcast", self.group_size, self.elems)

    @property
    def _scatter_kind(self) -> str:
        if self.has_one_owner:
            return "reduce"
        return "reduce_scatter" if self.is_even else "reduce_scatter_list"

    @property
    def copies_call(self) -> Call | None:
        """The second of them, over blocks; None with one block, or without elements."""
        if not self.is_sharded or self.replica_count == 1 or not self.shard_elems:
            return None
        return ("all_reduce", self.replica_count, self.shard_elems)

    @property
    def gather_calls(self) -> list[Call]:
        """The calls that make whole params of what the ranks of a block have: one, or chunks."""
        each = self.chunk_elems
        if each is None:
            return [self.whole_call]
        return [
            self._gathered(self.group_size, max(0, min(each, self.shard_elems - first)))
            # The first rank's shard is the longest.
            for first in range(0, self.cuts.start(1), each)
        ]

    @property
    def whole_call(self) -> Call:
        """The call that makes the whole of some other number an element, all at once."""
        return self._gathered(self.group_size, self.shard_elems)

    def _gathered(self, ranks: int, elems: int) -> Call:
        if self.has_one_owner:
            return ("broadcast", ranks, self.elems)
        return (
            ("all_gather", ranks, elems) if self.is_even else ("all_to_all", ranks, elems * ranks)
        )

    @property
    def is_cut(self) -> bool:
        """Whether several ranks have a shard of it."""
        return self.is_sharded and not self.has_one_owner and self.group_size > 1

    @property
    def owned_elems(self) -> int:
        """Elements of params in this rank's shard, its padding left out."""
        return max(0, min(self.payload_elems - self.shard_start, self.shard_elems))

    @property
    def owns_elems(self) -> bool:
        """Whether a param reaches into this rank's shard."""
        return self.owned_elems > 0


def sizes_of(module: nn.Module) -> tuple[ParamSize, ...]:
    """The trained params of a module, in registration order; before anybody wrapped it."""
    return tuple(
        ParamSize(
            name=name,
            kind=kind_of(name),
            dtype=str(param.dtype),
            elems=param.numel(),
            row_elems=math.prod(param.shape[1:]) or 1,
            param_bytes=param.element_size(),
            grad_bytes=(getattr(param, "grad_dtype", None) or param.dtype).itemsize,
            grad_dtype=str(getattr(param, "grad_dtype", None) or param.dtype),
        )
        for name, param in module.named_parameters()
        if param.requires_grad
    )


def bucket_forms(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int
) -> tuple[BucketForm, ...]:
    """The buckets with elements that a layout has to have, in no order that matters.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
    """
    return _bucket_forms(tuple(sizes), scenario, rank)


# Calls, bytes, peaks and overlap of a rank are all held to them.
@lru_cache(maxsize=256)
def _bucket_forms(
    sizes: tuple[ParamSize, ...], scenario: Scenario, rank: int
) -> tuple[BucketForm, ...]:
    forms = [
        form
        for members in by_buffer(sizes, scenario=scenario)
        for turn, bucket in enumerate(_cut(members, scenario=scenario))
        if (form := _form(bucket, scenario=scenario, rank=rank, turn=turn)).elems
    ]
    index = {size.name: index for index, size in enumerate(sizes)}
    firsts = [min(index[name] for name in form.names) for form in forms]
    last_of: dict[int, int] = {}
    for form, first in zip(forms, firsts, strict=True):
        last_of[form.group_size] = max(first, last_of.get(form.group_size, first))
    return tuple(
        replace(form, is_last=True) if first == last_of[form.group_size] else form
        for form, first in zip(forms, firsts, strict=True)
    )


def by_buffer(sizes: Sequence[ParamSize], *, scenario: Scenario) -> Sequence[Sequence[ParamSize]]:
    """The params of each flat buffer, in registration order."""
    by_group = scenario.system.buffers_by == "param-group"
    buffers: dict[tuple[str, str, int], list[ParamSize]] = {}
    for size in sizes:
        group = _group_of(size.name, scenario=scenario) if by_group else 0
        buffers.setdefault((size.kind, size.dtype, group), []).append(size)
    return list(buffers.values())


def _group_of(name: str, *, scenario: Scenario) -> int:
    """The param group that steps a param: the first whose `match` its name ends with."""
    groups = scenario.optimizer.groups
    fitting = (index for index, group in enumerate(groups) if name.endswith(group.match))
    return next(fitting, len(groups))


def _cut(members: Sequence[ParamSize], *, scenario: Scenario) -> Iterator[list[ParamSize]]:
    """A bucket closes as soon as it holds enough; a param without elements opens none."""
    system = scenario.system
    bucket: list[ParamSize] = []
    for size in _in_order(members, scenario=scenario):
        held = sum(member.elems for member in bucket)
        if system.bucket_elems is not None and held >= system.bucket_elems and size.elems:
            yield bucket
            bucket = []
        bucket.append(size)
    yield bucket


def _form(bucket: Sequence[ParamSize], *, scenario: Scenario, rank: int, turn: int) -> BucketForm:
    system, ways = scenario.system, scenario.topology.ep
    holders, place = scenario.world.size, rank
    if bucket[0].kind == "expert":
        holders, place = holders // ways, rank // ways
    group_size = holders // system.redundancy
    shards = group_size if system.stage else 1
    payload = sum(size.elems for size in bucket)
    param_bytes = bucket[0].param_bytes
    elems = payload
    if system.partition == "padded":
        aligned = system.align_bytes // math.gcd(system.align_bytes, param_bytes)
        unit = shards * math.lcm(system.align_elems, aligned)
        elems = -(-payload // unit) * unit
    elif system.partition == "rows":
        # Of params without elements alone no row is cut.
        unit = shards * max((size.row_elems for size in bucket if size.elems), default=1)
        elems = -(-payload // unit) * unit
    shard = place % group_size if system.stage else 0
    has_one_owner = system.partition == "one-owner"
    grad_dtype = bucket[0].grad_dtype or bucket[0].dtype
    # As it lies in the buffer; the names are told in registration order.
    placed = list(zip(bucket, accumulate((s.elems for s in bucket), initial=0), strict=False))
    members = _in_order(bucket, scenario=scenario)
    return BucketForm(
        names=tuple(size.name for size in members),
        kind=bucket[0].kind,
        starts=tuple((size.name, before) for size, before in placed if size.elems),
        payload_elems=payload,
        cuts=Cuts(elems=elems, shards=shards, owner=turn % shards if has_one_owner else None),
        shard=shard,
        group_size=group_size,
        replica_count=system.redundancy,
        is_sharded=system.stage > 0,
        sum_by=system.sum_by,
        is_last=False,
        param_bytes=param_bytes,
        chunk_elems=None
        if system.gather_chunk_elems is None
        else max(1, system.gather_chunk_elems // group_size),
        grad_bytes=4 if system.grad_dtype == "fp32" else bucket[0].grad_bytes,
        param_dtype=_named(bucket[0].dtype),
        grad_dtype="float32" if system.grad_dtype == "fp32" else _named(grad_dtype),
    )


def by_registration(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int
) -> list[BucketForm]:
    """The same buckets, by the first registered param of each: the order of a forward."""
    place = {size.name: index for index, size in enumerate(sizes)}
    forms = bucket_forms(sizes, scenario=scenario, rank=rank)
    return sorted(forms, key=lambda form: min(place[name] for name in form.names))


def _named(dtype: str) -> str:
    return dtype.removeprefix("torch.")


def _in_order(members: Sequence[ParamSize], *, scenario: Scenario) -> Sequence[ParamSize]:
    """From registration order to that in a buffer, or back."""
    return members if scenario.system.param_order == "registration" else members[::-1]
