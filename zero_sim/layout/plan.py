"""Layout records: positions of params, buckets and shards, and the owner of each element.

A *buffer* is flat memory for all params with the same kind, dtype and group. It is cut into
*buckets*, the units of communication; a bucket contains whole params, then padding. A bucket is cut
into *shards*, one per rank, regardless of param boundaries. A *fragment* is the part of a param
inside a shard. Padding lies in a shard but has no owner. The *partition* sets the shard lengths
(`zero_sim.layout.partition`).

Spans count elements from the start of the buffer, unless their name differs (`in_shard`).
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
    """Properties that all params in a buffer share."""

    kind: str
    dtype: str
    group: int = 0
    """Param group, if groups have separate buffers; else 0."""

    def __str__(self) -> str:
        # Omit group 0, because most models have no param groups.
        of_group = f"/group {self.group}" if self.group else ""
        return f"{self.kind}/{self.dtype}{of_group}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedParam:
    """A param and its position."""

    spec: ParamSpec
    bucket: int
    """Bucket index; a param is never split across buckets."""
    span: Span

    @property
    def name(self) -> str:
        """The param's name."""
        return self.spec.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """The non-empty part of a param inside one shard."""

    param: str
    bucket: int
    shard: int
    in_buffer: Span
    in_param: Span
    """Elements in the flattened param, in logical (row-major) order."""
    in_shard: Span
    """Elements, counted from the start of the shard in this bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """A bucket: whole params, then padding, cut into shards."""

    index: int
    span: Span
    """Padding included."""
    params: tuple[PlacedParam, ...]
    padding: Span
    """Tail of the bucket that belongs to no param; often empty."""
    partition: Partition

    @property
    def shard_count(self) -> int:
        """Number of shards, which is the size of the shard group."""
        return self.partition.shard_count

    @property
    def payload(self) -> Span:
        """The elements that belong to params."""
        # Padding is always at the end.
        return Span(self.span.start, self.padding.start)

    @property
    def is_even(self) -> bool:
        """True if all shards have the same length."""
        return self.partition.is_even

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Number of elements in each shard, padding included."""
        return self.partition.sizes

    def shard_span(self, shard: int) -> Span:
        """Return the span of a shard.

        Raises:
            LayoutError: If the shard index is out of range.
        """
        if not 0 <= shard < self.shard_count:
            raise LayoutError(
                f"expected a shard index of 0 to {self.shard_count - 1}, got shard={shard} "
                f"in bucket {self.index}."
            )
        # Partitions count from the start of the bucket.
        start = self.span.start
        return Span(start + self.partition.start(shard), start + self.partition.stop(shard))

    def shard_of(self, element: int) -> int:
        """Return the index of the shard that contains an element, padding included.

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
        # Only the last param that starts at or before the shard can reach into it from the left.
        # Bisect for this param, because a walk over all params is slow with a thousand ranks.
        first = bisect_right(self.params, shard_span.start, key=lambda param: param.span.start)
        for param in self.params[max(0, first - 1) :]:
            if param.span.start >= shard_span.stop:
                # Params are in buffer order, so later params are outside the shard too.
                break
            in_buffer = param.span.intersect(shard_span)
            # Empty params have a position but no elements.
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
    """The layout of a buffer."""

    key: BufferKey
    policy: LayoutPolicy
    params: tuple[PlacedParam, ...]
    """In buffer order, disjoint, each inside one bucket."""
    buckets: tuple[BucketPlan, ...]
    """At least one; adjacent; together they cover the buffer."""

    @property
    def span(self) -> Span:
        """The whole buffer, padding included."""
        # Buckets are adjacent, so the last bucket ends the buffer.
        return Span(0, self.buckets[-1].span.stop)

    @property
    def numel(self) -> int:
        """Number of elements that belong to params."""
        return sum(bucket.payload.numel for bucket in self.buckets)

    @property
    def padding_elems(self) -> int:
        """Number of elements without an owner."""
        return sum(bucket.padding.numel for bucket in self.buckets)

    def shard_span(self, *, bucket: int, shard: int) -> Span:
        """Return the span of a shard in a bucket.

        Raises:
            LayoutError: If the bucket or shard index is out of range.
        """
        if not 0 <= bucket < len(self.buckets):
            raise LayoutError(
                f"expected a bucket index of 0 to {len(self.buckets) - 1}, got bucket={bucket} "
                f"in buffer {self.key}."
            )
        return self.buckets[bucket].shard_span(shard)

    def fragments(self, shard: int) -> tuple[Fragment, ...]:
        """Return the fragments in a rank's shards of all buckets, in buffer order.

        Empty if the rank owns nothing, for example with more ranks than elements.

        Raises:
            LayoutError: If the shard index is out of range.
        """
        return tuple(fragment for bucket in self.buckets for fragment in bucket.fragments(shard))

    def owner(self, element: int) -> int | None:
        """Return the shard index that owns an element; None for padding.

        Raises:
            LayoutError: If the element lies outside the buffer.
        """
        if not self.span.contains(element):
            raise LayoutError(
                f"expected an element of {self.span}, got {element} in buffer {self.key}."
            )
        # Bucket starts are distinct, because only the sole bucket of an empty buffer can be empty.
        index = bisect_right(self.buckets, element, key=lambda bucket: bucket.span.start) - 1
        bucket = self.buckets[index]
        if bucket.padding.contains(element):
            return None
        return bucket.shard_of(element)
