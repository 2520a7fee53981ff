"""The layout as data: where every param, bucket and shard lies, and who owns which element.

A *buffer* is the flat memory of all params of one kind, dtype and group. It is cut into *buckets*,
the units of communication; a bucket holds whole params and then padding. A bucket is cut into
*shards*, one a rank, without regard for where params begin or end; the part of a param inside one
shard is a *fragment*. Padding lies in a shard but belongs to nobody. The *partition* says how long
each shard is (`zero_sim.layout.partition`).

All spans count elements from the start of the buffer unless their name says otherwise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from zero_sim.errors import LayoutError
from zero_sim.layout.partition import Partition
from zero_sim.layout.request import LayoutPolicy, ParamSpec
from zero_sim.layout.span import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferKey:
    """What the params of one buffer have in common."""

    kind: str
    dtype: str
    group: int = 0
    """Number of the param group, where each has buffers of its own."""

    def __str__(self) -> str:
        of_group = f"/group {self.group}" if self.group else ""
        return f"{self.kind}/{self.dtype}{of_group}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedParam:
    """A param and its place."""

    spec: ParamSpec
    bucket: int
    """Index of the one bucket that holds the whole param."""
    span: Span

    @property
    def name(self) -> str:
        """Name of the param."""
        return self.spec.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """The part of one param that lies in one shard; never empty."""

    param: str
    """Name of the param."""
    bucket: int
    shard: int
    in_buffer: Span
    in_param: Span
    """Elements of the flattened param, in logical (row-major) order."""
    in_shard: Span
    """Elements counted from the start of the shard of this bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """One bucket: whole params, then padding, in shards."""

    index: int
    span: Span
    """The bucket with its padding."""
    params: tuple[PlacedParam, ...]
    padding: Span
    """The tail of the bucket that belongs to no param; often empty."""
    partition: Partition

    @property
    def shard_count(self) -> int:
        """Number of shards, one for each rank that owns a part."""
        return self.partition.shard_count

    @property
    def payload(self) -> Span:
        """The elements that belong to params."""
        return Span(self.span.start, self.padding.start)

    @property
    def is_even(self) -> bool:
        """Whether all shards are equally long."""
        return self.partition.is_even

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Number of elements of each shard, padding included."""
        return self.partition.sizes

    def shard_span(self, shard: int) -> Span:
        """Return where a shard lies.

        Raises:
            LayoutError: If there is no such shard.
        """
        if not 0 <= shard < self.shard_count:
            raise LayoutError(
                f"expected a shard index of 0 to {self.shard_count - 1}, got shard={shard} "
                f"in bucket {self.index}."
            )
        start = self.span.start
        return Span(start + self.partition.start(shard), start + self.partition.stop(shard))

    def shard_of(self, element: int) -> int:
        """Return the shard that holds an element of the bucket, padding included.

        Raises:
            LayoutError: If the element lies outside the bucket.
        """
        if not self.span.contains(element):
            raise LayoutError(
                f"expected an element of {self.span}, got {element} in bucket {self.index}."
            )
        return self.partition.shard_of(element - self.span.start)

    def fragments(self, shard: int) -> Iterator[Fragment]:
        """Yield the non-empty fragments inside a shard, in buffer order."""
        shard_span = self.shard_span(shard)
        # The last param that starts at or before the shard is the only one that can reach into it
        # from the left; searching for it keeps a thousand ranks from walking all params each.
        first = bisect_right(self.params, shard_span.start, key=lambda param: param.span.start)
        for param in self.params[max(0, first - 1) :]:
            if param.span.start >= shard_span.stop:
                break
            in_buffer = param.span.intersect(shard_span)
            if in_buffer.empty:
                continue
            yield Fragment(
                param=param.name,
                bucket=self.index,
                shard=shard,
                in_buffer=in_buffer,
                in_param=in_buffer.shift(-param.span.start),
                in_shard=in_buffer.shift(-shard_span.start),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlan:
    """The layout of one buffer."""

    key: BufferKey
    policy: LayoutPolicy
    params: tuple[PlacedParam, ...]
    """In buffer order; disjoint; each inside one bucket."""
    buckets: tuple[BucketPlan, ...]
    """At least one; adjacent; together they are the buffer."""

    @property
    def span(self) -> Span:
        """The whole buffer, padding included."""
        return Span(0, self.buckets[-1].span.stop)

    @property
    def numel(self) -> int:
        """Number of elements that belong to params."""
        return sum(bucket.payload.numel for bucket in self.buckets)

    @property
    def padding_elems(self) -> int:
        """Number of elements that belong to nobody."""
        return sum(bucket.padding.numel for bucket in self.buckets)

    def shard_span(self, *, bucket: int, shard: int) -> Span:
        """Return where a shard of a bucket lies.

        Raises:
            LayoutError: If there is no such bucket or shard.
        """
        if not 0 <= bucket < len(self.buckets):
            raise LayoutError(
                f"expected a bucket index of 0 to {len(self.buckets) - 1}, got bucket={bucket} "
                f"in buffer {self.key}."
            )
        return self.buckets[bucket].shard_span(shard)

    def fragments(self, shard: int) -> tuple[Fragment, ...]:
        """Return everything that the owner of a shard index owns, in buffer order.

        Empty for an owner that owns nothing, as happens with more ranks than elements.

        Raises:
            LayoutError: If there is no such shard.
        """
        return tuple(fragment for bucket in self.buckets for fragment in bucket.fragments(shard))

    def owner(self, element: int) -> int | None:
        """Return the shard index that owns an element; None for padding, which nobody owns.

        Raises:
            LayoutError: If the element lies outside the buffer.
        """
        if not self.span.contains(element):
            raise LayoutError(
                f"expected an element of {self.span}, got {element} in buffer {self.key}."
            )
        # Only the last bucket can be empty (then it is the only one), so every start is distinct.
        index = bisect_right(self.buckets, element, key=lambda bucket: bucket.span.start) - 1
        bucket = self.buckets[index]
        if bucket.padding.contains(element):
            return None
        return bucket.shard_of(element)
