"""Closed form of the buckets in a textbook ZeRO layout.

It needs only the scenario and param sizes, not the code under test.
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
"""Kind of a collective, group size, and elements that a rank contributes."""


def in_words(call: Call) -> str:
    """Return a call as text for findings."""
    kind, ranks, elems = call
    return f"{kind} of {elems} elements on {ranks} ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSize:
    """Sizes and dtypes of a param."""

    name: str
    kind: str
    """`dense`, or `expert` for params below a module named `experts`."""
    dtype: str
    elems: int
    param_bytes: int
    """Bytes per element."""
    grad_bytes: int
    """Bytes per element in autograd's gradient."""
    grad_dtype: str = ""
    """Dtype of autograd's gradient; empty for the param's dtype."""
    row_elems: int = 1
    """Elements per row (dim 0); 1 for scalars and empty params."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Cuts between a bucket's shards."""

    elems: int
    shards: int
    owner: int | None = None
    """Shard that has all elements; None to spread them as evenly as possible."""

    def start(self, shard: int) -> int:
        """Return a shard's first element; `elems` for the index after the last shard."""
        if self.owner is not None:
            # All other shards are empty: those before the owner start at 0, those after at the end.
            return 0 if shard <= self.owner else self.elems
        shortest, longer_count = divmod(self.elems, self.shards)
        # The first `longer_count` shards have an additional element.
        return shard * shortest + min(shard, longer_count)

    def owners_of(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (shard, elements) for the owners of elements [start, stop), in order."""
        shortest, longer_count = divmod(self.elems, self.shards)
        first = self.owner or 0
        if self.owner is None and start < stop:
            # Jump to the shard that contains `start`: a longer shard, or one after these.
            behind = start - longer_count * (shortest + 1)
            first = start // (shortest + 1) if behind < 0 else longer_count + behind // shortest
        while start < stop:
            end = min(self.start(first + 1), stop)
            # Pass over empty shards: there may be more ranks than elements.
            if end > start:
                yield first, end - start
            start, first = max(start, end), first + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketForm:
    """A non-empty bucket, as one rank has it."""

    names: tuple[str, ...]
    """All its params, in registration order."""
    kind: str
    starts: tuple[tuple[str, int], ...]
    """Non-empty params, each with its offset in the bucket."""
    payload_elems: int
    """Elements without padding."""
    cuts: Cuts
    """Shards, padding included."""
    shard: int
    """Shard index of this rank."""
    group_size: int
    """Shard group size; at stage 0, number of ranks that sum the bucket."""
    replica_count: int
    is_sharded: bool
    """False at stage 0, where each rank has the whole bucket."""
    sum_by: SumBy
    """Gradient reduction. `first-rank`: the first rank adds all ranks' gradients and
    broadcasts the sum."""
    is_last: bool
    """True for the last bucket of a forward. Its first param is registered last, among buckets
    sharded by the same group."""
    param_bytes: int
    grad_bytes: int
    param_dtype: str
    """Dtype name as in the event log, such as `bfloat16`."""
    grad_dtype: str
    chunk_elems: int | None = None
    """Elements per rank in each gathered chunk; None to gather the bucket at once."""

    @property
    def elems(self) -> int:
        """Elements, including padding."""
        return self.cuts.elems

    @property
    def shard_elems(self) -> int:
        """Elements in this rank's shard, including padding."""
        return self.cuts.start(self.shard + 1) - self.shard_start

    @property
    def shard_start(self) -> int:
        """First element of this rank's shard."""
        return self.cuts.start(self.shard)

    @property
    def is_even(self) -> bool:
        """True if all shards have the same length."""
        return self.elems % self.cuts.shards == 0

    @property
    def has_one_owner(self) -> bool:
        """True if a single rank owns the bucket."""
        return self.cuts.owner is not None

    @property
    def is_summed_unsharded(self) -> bool:
        """True if each rank receives the whole sum, and keeps its shard."""
        return self.sum_by != "reduce-scatter"

    @property
    def names_with_elems(self) -> tuple[str, ...]:
        """Names of non-empty params, in no particular order."""
        return tuple(name for name, _ in self.starts)

    @property
    def sum_call(self) -> Call:
        """Call that reduces the bucket within a shard group."""
        if self.sum_by == "first-rank":
            return ("gather", self.group_size, self.elems)
        if not self.is_sharded or self.is_summed_unsharded:
            return ("all_reduce", self.group_size, self.elems)
        return (self._scatter_kind, self.group_size, self.elems)

    @property
    def sent_back_call(self) -> Call | None:
        """Broadcast of the sum by the first rank; None for other reductions."""
        if self.sum_by != "first-rank":
            return None
        return ("broadcast", self.group_size, self.elems)

    @property
    def _scatter_kind(self) -> str:
        if self.has_one_owner:
            # Only the owner receives the sum.
            return "reduce"
        return "reduce_scatter" if self.is_even else "reduce_scatter_list"

    @property
    def replica_call(self) -> Call | None:
        """Sum over the replicas of a shard; None without replicas or elements."""
        if not self.is_sharded or self.replica_count == 1 or not self.shard_elems:
            return None
        return ("all_reduce", self.replica_count, self.shard_elems)

    @property
    def gather_calls(self) -> list[Call]:
        """Calls that gather the params within a shard group: one, or one per chunk."""
        each = self.chunk_elems
        if each is None:
            return [self.whole_call]
        return [
            self._gathered(self.group_size, max(0, min(each, self.shard_elems - first)))
            # All ranks make as many calls as the longest shard needs, which is shard 0.
            for first in range(0, self.cuts.start(1), each)
        ]

    @property
    def whole_call(self) -> Call:
        """Call that gathers the whole bucket, or another tensor with its shards, at once."""
        return self._gathered(self.group_size, self.shard_elems)

    def _gathered(self, ranks: int, elems: int) -> Call:
        if self.has_one_owner:
            # The owner contributes the whole bucket.
            return ("broadcast", ranks, self.elems)
        # all_gather needs equal shards, so uneven shards use an all_to_all.
        return (
            ("all_gather", ranks, elems) if self.is_even else ("all_to_all", ranks, elems * ranks)
        )

    @property
    def is_cut(self) -> bool:
        """True if the bucket is spread over several ranks."""
        return self.is_sharded and not self.has_one_owner and self.group_size > 1

    @property
    def owned_elems(self) -> int:
        """Elements in this rank's shard, without padding."""
        # Padding is at the end of the bucket.
        return max(0, min(self.payload_elems - self.shard_start, self.shard_elems))

    @property
    def owns_elems(self) -> bool:
        """True if this rank's shard is not only padding."""
        return self.owned_elems > 0


def sizes_of(module: nn.Module) -> tuple[ParamSize, ...]:
    """Return the sizes of a bare module's trained params, in registration order.

    Do not pass a wrapped module, because wrappers may replace or rename params.
    """
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
    """Return the layout's non-empty buckets, in no particular order.

    Args:
        sizes: The rank's trained params, in registration order.
        scenario: The dp-cp group's case.
        rank: Group rank.
    """
    return _bucket_forms(tuple(sizes), scenario, rank)


# Cached, because calls, bytes, peaks and overlap all use a rank's buckets.
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
    # `is_last` needs all buckets. If group sizes differ, dense and expert buckets each have a last
    # bucket, because not all ranks have the same experts.
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
    """Return the params in each flat buffer, in registration order."""
    by_group = scenario.system.buffers_by == "param-group"
    buffers: dict[tuple[str, str, int], list[ParamSize]] = {}
    for size in sizes:
        group = _group_of(size.name, scenario=scenario) if by_group else 0
        # Kinds are summed over different ranks, and dtypes have different widths, so they cannot
        # share a buffer.
        buffers.setdefault((size.kind, size.dtype, group), []).append(size)
    return list(buffers.values())


def _group_of(name: str, *, scenario: Scenario) -> int:
    groups = scenario.optimizer.groups
    fitting = (index for index, group in enumerate(groups) if name.endswith(group.match))
    # The first match counts. Params without a match form the last group.
    return next(fitting, len(groups))


def _cut(members: Sequence[ParamSize], *, scenario: Scenario) -> Iterator[list[ParamSize]]:
    """Yield buckets; each is closed once it has `bucket_elems`. Empty params open no bucket."""
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
    # `place` is the rank's index among `holders`, the ranks with the same params.
    system, ways = scenario.system, scenario.topology.ep
    holders, place = scenario.world.size, rank
    if bucket[0].kind == "expert":
        holders, place = holders // ways, rank // ways
    group_size = holders // system.redundancy
    # At stage 0, each rank has the whole bucket as a single shard.
    shards = group_size if system.stage else 1
    payload = sum(size.elems for size in bucket)
    param_bytes = bucket[0].param_bytes
    # Round up, so that shards are equally long and aligned.
    elems = payload
    if system.partition == "padded":
        aligned = system.align_bytes // math.gcd(system.align_bytes, param_bytes)
        unit = shards * math.lcm(system.align_elems, aligned)
        elems = -(-payload // unit) * unit
    elif system.partition == "rows":
        # Empty params have no rows.
        unit = shards * max((size.row_elems for size in bucket if size.elems), default=1)
        elems = -(-payload // unit) * unit
    shard = place % group_size if system.stage else 0
    has_one_owner = system.partition == "one-owner"
    grad_dtype = bucket[0].grad_dtype or bucket[0].dtype
    # Offsets follow buffer order, but names follow registration order. Not strict, because
    # `accumulate` also returns the last param's end.
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
        # `_bucket_forms` sets it, because it depends on all buckets.
        is_last=False,
        param_bytes=param_bytes,
        chunk_elems=None
        if system.gather_chunk_elems is None
        # The setting counts elements over all ranks, and each rank contributes its share.
        else max(1, system.gather_chunk_elems // group_size),
        grad_bytes=4 if system.grad_dtype == "fp32" else bucket[0].grad_bytes,
        param_dtype=_named(bucket[0].dtype),
        grad_dtype="float32" if system.grad_dtype == "fp32" else _named(grad_dtype),
    )


def by_registration(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int
) -> list[BucketForm]:
    """Return the buckets in order of their first registered param, as a forward uses them."""
    place = {size.name: index for index, size in enumerate(sizes)}
    forms = bucket_forms(sizes, scenario=scenario, rank=rank)
    return sorted(forms, key=lambda form: min(place[name] for name in form.names))


def _named(dtype: str) -> str:
    return dtype.removeprefix("torch.")


def _in_order(members: Sequence[ParamSize], *, scenario: Scenario) -> Sequence[ParamSize]:
    """Convert registration order to buffer order, or back."""
    return members if scenario.system.param_order == "registration" else members[::-1]
