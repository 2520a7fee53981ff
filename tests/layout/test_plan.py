"""Shards, fragments and owners of a planned buffer."""

from __future__ import annotations

import math
import time

import pytest

from zero_sim.errors import LayoutError
from zero_sim.layout import LayoutPolicy, ParamSpec, Span, plan_buffers


def plan_one(*sizes, **policy):
    params = [ParamSpec(name=f"p{i}", shape=(n,), dtype="fp32") for i, n in enumerate(sizes)]
    (buffer,) = plan_buffers(params, policy=LayoutPolicy(**policy))
    return buffer


class TestShards:
    """Even shards of each bucket."""

    def test_are_even_and_adjacent(self):
        """Three shards of a bucket of 7 elements have 3 each, the last with padding."""
        buffer = plan_one(7, shard_count=3)
        spans = [buffer.shard_span(bucket=0, shard=shard) for shard in range(3)]
        assert spans == [Span(0, 3), Span(3, 6), Span(6, 9)]

    def test_start_on_alignment_boundaries(self):
        """With alignment 4, every shard of every bucket starts at a multiple of 4."""
        buffer = plan_one(5, 9, shard_count=3, align_elems=4, bucket_elems=1)
        starts = [bucket.shard_span(s).start for bucket in buffer.buckets for s in range(3)]
        assert starts == [0, 4, 8, 12, 16, 20]

    def test_first_shards_are_longer_without_padding(self):
        """100 elements over 8 shards: four of 13, four of 12."""
        (bucket,) = plan_one(100, shard_count=8, partition="uneven").buckets
        assert bucket.shard_sizes == (13, 13, 13, 13, 12, 12, 12, 12)
        assert (bucket.is_even, bucket.padding.numel) == (False, 0)

    def test_first_shards_are_longer_in_each_bucket(self):
        """The first shards of every bucket are longer, not only those of the buffer."""
        buffer = plan_one(4, 5, shard_count=3, bucket_elems=1, partition="uneven")
        spans = [[bucket.shard_span(s) for s in range(3)] for bucket in buffer.buckets]
        assert spans == [[Span(0, 2), Span(2, 3), Span(3, 4)], [Span(4, 6), Span(6, 8), Span(8, 9)]]

    def test_last_shards_may_be_empty(self):
        """Two elements over four shards without padding: the last two are empty."""
        buffer = plan_one(2, shard_count=4, partition="uneven")
        assert buffer.buckets[0].shard_sizes == (1, 1, 0, 0)
        assert [buffer.owner(element) for element in range(2)] == [0, 1]
        assert [len(buffer.fragments(shard)) for shard in range(4)] == [1, 1, 0, 0]

    @pytest.mark.parametrize(
        ("dtype", "align_elems", "align_bytes", "multiple"),
        [("fp32", 1, 16, 4), ("bf16", 1, 16, 8), ("bf16", 3, 16, 24), ("fp32", 4, 6, 12)],
    )
    def test_start_on_byte_boundaries(self, dtype, align_elems, align_bytes, multiple):
        """The result is the least common multiple of both alignments, in elements."""
        policy = LayoutPolicy(shard_count=2, align_elems=align_elems, align_bytes=align_bytes)
        params = [ParamSpec(name="p", shape=(1,), dtype=dtype)]
        (buffer,) = plan_buffers(params, policy=policy)
        assert policy.shard_multiple(dtype) == multiple
        assert buffer.shard_span(bucket=0, shard=1).start == multiple

    @pytest.mark.parametrize("element", [-1, 5])
    def test_refuse_an_element_of_another_bucket(self, element):
        (bucket,) = plan_one(5, shard_count=2, partition="uneven").buckets
        with pytest.raises(LayoutError, match=rf"\[0, 5\), got {element} in bucket 0"):
            bucket.shard_of(element)

    @pytest.mark.parametrize("shard", [-1, 2])
    def test_refuse_an_index_that_does_not_exist(self, shard):
        """A negative shard is an error, not Python's count from the end."""
        with pytest.raises(LayoutError, match=f"0 to 1, got shard={shard} in bucket 0"):
            plan_one(4, shard_count=2).shard_span(bucket=0, shard=shard)

    @pytest.mark.parametrize("bucket", [-1, 1])
    def test_refuse_a_bucket_that_does_not_exist(self, bucket):
        """A negative bucket is an error too, and the message names the buffer."""
        with pytest.raises(LayoutError, match=f"bucket={bucket} in buffer dense/fp32"):
            plan_one(4, shard_count=2).shard_span(bucket=bucket, shard=0)


class TestFragments:
    """Fragments, the parts of params inside a shard."""

    def test_split_a_param_over_shards(self):
        buffer = plan_one(3, 5, shard_count=2)
        (_, left) = buffer.fragments(0)
        (right,) = buffer.fragments(1)
        assert (left.in_param, right.in_param) == (Span(0, 1), Span(1, 5))
        assert (left.in_buffer, right.in_buffer) == (Span(3, 4), Span(4, 8))
        assert (left.in_shard, right.in_shard) == (Span(3, 4), Span(0, 4))

    def test_span_full_shards(self):
        """The middle shard contains nothing but part of this param."""
        (middle,) = plan_one(1, 10, 1, shard_count=3).fragments(1)
        assert (middle.param, middle.in_param, middle.in_shard) == ("p1", Span(3, 7), Span(0, 4))

    def test_count_from_the_shard_of_their_own_bucket(self):
        fragments = plan_one(4, 4, shard_count=2, bucket_elems=4).fragments(1)
        assert [(f.bucket, f.in_shard) for f in fragments] == [(0, Span(0, 2)), (1, Span(0, 2))]

    def test_skip_empty_params(self):
        buffer = plan_one(0, 2, 0, 0, 2, 0, shard_count=2)
        assert [[f.param for f in buffer.fragments(s)] for s in range(2)] == [["p1"], ["p4"]]

    def test_shard_of_only_padding_has_none(self):
        """Padding to aligned shards can fill a full shard: 9 elements in 3 shards of 8."""
        assert plan_one(9, shard_count=3, align_elems=8).fragments(2) == ()


class TestPartitions:
    """Owners of a bucket's elements for each partition."""

    def test_one_owner_assigns_buckets_in_turn(self):
        """Four buckets over three shards: the fourth belongs to the first shard again."""
        buffer = plan_one(4, 2, 3, 5, shard_count=3, bucket_elems=1, partition="one-owner")
        sizes = [bucket.shard_sizes for bucket in buffer.buckets]
        assert sizes == [(4, 0, 0), (0, 2, 0), (0, 0, 3), (5, 0, 0)]
        assert [buffer.owner(element) for element in (0, 3, 4, 6, 9, 13)] == [0, 0, 1, 2, 0, 0]

    def test_one_owner_has_no_padding(self):
        buffer = plan_one(4, 3, shard_count=2, bucket_elems=1, partition="one-owner")
        assert buffer.padding_elems == 0
        assert [[f.param for f in buffer.fragments(shard)] for shard in range(2)] == [
            ["p0"],
            ["p1"],
        ]

    def test_single_shard_is_even(self):
        """A single rank owns all elements in every partition."""
        (bucket,) = plan_one(4, shard_count=1, partition="one-owner").buckets
        assert bucket.is_even

    @pytest.mark.parametrize(
        ("shape", "rows_owned"),
        [((5, 3), [2, 2, 1]), ((3, 7), [1, 1, 1]), ((2, 4), [1, 1, 0]), ((4,), [2, 2, 0])],
    )
    def test_rows_are_not_cut(self, shape, rows_owned):
        """As in torch.chunk over dim 0, the last ranks get fewer rows or none."""
        policy = LayoutPolicy(shard_count=3, bucket_elems=1, partition="rows")
        (plan,) = plan_buffers([ParamSpec(name="a", shape=shape, dtype="fp32")], policy=policy)
        row_elems = math.prod(shape[1:])
        owned = [sum(f.in_param.numel for f in plan.fragments(shard)) for shard in range(3)]
        assert [elems / row_elems for elems in owned] == rows_owned
        assert plan.buckets[0].is_even


class TestOwner:
    """owner(), from a flat element to its shard."""

    def test_agrees_with_the_shards(self):
        buffer = plan_one(3, 2, 4, shard_count=2, bucket_elems=5)
        assert [buffer.owner(e) for e in range(10)] == [0, 0, 0, 1, 1, None, 0, 0, 1, 1]

    @pytest.mark.parametrize("element", [-1, 4])
    def test_refuses_an_element_outside(self, element):
        with pytest.raises(LayoutError, match=rf"\[0, 4\), got {element}"):
            plan_one(4, shard_count=2).owner(element)


class TestScale:
    """Cost of planning, by the number of params rather than elements."""

    def test_plans_seven_billion_params_for_a_thousand_ranks(self):
        """Plans 300 params of 23M elements, with one rank's fragments, in half a second of work."""
        start = time.thread_time()
        buffer = plan_one(
            *[23_347_200] * 300, shard_count=1024, align_elems=128, bucket_elems=40_000_000
        )
        owned_elems = sum(f.in_buffer.numel for f in buffer.fragments(512))
        assert time.thread_time() - start < 0.5
        assert (buffer.numel, owned_elems) == (7_004_160_000, 150 * 357 * 128)
