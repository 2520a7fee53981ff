"""Buffer plans from params and a policy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zero_sim.errors import LayoutError
from zero_sim.layout import LayoutPolicy, ParamSpec, Span, plan_buffers


def spec(name, numel, dtype="fp32", kind="dense"):
    return ParamSpec(name=name, shape=(numel,), dtype=dtype, kind=kind)


def bucket_members(sizes, **policy):
    """Return the param sizes of each bucket of a buffer with these params."""
    params = [spec(f"p{i}", n) for i, n in enumerate(sizes)]
    (buffer,) = plan_buffers(params, policy=LayoutPolicy(**policy))
    return [[param.spec.numel for param in bucket.params] for bucket in buffer.buckets]


class TestGroups:
    """Params, grouped by kind and dtype."""

    def test_come_in_order_of_first_appearance(self):
        """Buffers follow registration, even if params inside them are reversed."""
        params = [spec("a", 1, "bf16"), spec("b", 1), spec("c", 1, "bf16", "expert"), spec("d", 1)]
        for order in ("registration", "reverse"):
            plans = plan_buffers(params, policy=LayoutPolicy(shard_count=1, param_order=order))
            assert [str(plan.key) for plan in plans] == ["dense/bf16", "dense/fp32", "expert/bf16"]

    def test_refuse_a_name_twice(self):
        with pytest.raises(LayoutError, match=r"'a' twice.*tied"):
            plan_buffers([spec("a", 1), spec("a", 1, "bf16")], policy=LayoutPolicy(shard_count=1))

    def test_refuse_no_params(self):
        with pytest.raises(LayoutError, match="at least one param"):
            plan_buffers([], policy=LayoutPolicy(shard_count=1))


class TestPlaces:
    """Adjacent params inside a bucket."""

    @pytest.mark.parametrize(
        ("order", "a", "b"),
        [("registration", Span(0, 3), Span(3, 5)), ("reverse", Span(2, 5), Span(0, 2))],
    )
    def test_follow_the_order(self, order, a, b):
        """Each param starts where the previous one ends; `reverse` begins with the last one."""
        policy = LayoutPolicy(shard_count=4, param_order=order)
        (plan,) = plan_buffers([spec("a", 3), spec("b", 2)], policy=policy)
        assert {p.name: p.span for p in plan.params} == {"a": a, "b": b}

    def test_skip_the_padding_of_the_previous_bucket(self):
        """The first param of a bucket starts after the padding."""
        policy = LayoutPolicy(shard_count=4, bucket_elems=1)
        (plan,) = plan_buffers([spec("a", 3), spec("b", 2)], policy=policy)
        assert [b.span for b in plan.buckets] == [Span(0, 4), Span(4, 8)]
        assert [b.padding for b in plan.buckets] == [Span(3, 4), Span(6, 8)]
        assert plan.params[1].span == Span(4, 6)
        assert (plan.numel, plan.padding_elems, plan.span) == (5, 3, Span(0, 8))


class TestBuckets:
    """Buckets, closed once they have bucket_elems."""

    @pytest.mark.parametrize(
        ("bucket_elems", "expected"),
        [
            (None, [[3, 2, 4]]),
            (1, [[3], [2], [4]]),
            (4, [[3, 2], [4]]),
            (5, [[3, 2], [4]]),
            (6, [[3, 2, 4]]),
            (9, [[3, 2, 4]]),
            (100, [[3, 2, 4]]),
        ],
    )
    def test_close_at_their_size(self, bucket_elems, expected):
        """Equality closes a bucket; a param is never split."""
        assert bucket_members([3, 2, 4], shard_count=2, bucket_elems=bucket_elems) == expected

    def test_large_param_has_its_own_bucket(self):
        assert bucket_members([9, 1, 1], shard_count=2, bucket_elems=2) == [[9], [1, 1]]

    def test_do_not_change_for_empty_params(self):
        """Empty params join a bucket and never open one, so they add no collective."""
        sizes = [0, 3, 0, 0, 4, 0]
        assert bucket_members(sizes, shard_count=2, bucket_elems=3) == [[0, 3, 0, 0], [4, 0]]

    def test_bucket_of_empty_params_has_no_length(self):
        policy = LayoutPolicy(shard_count=2, align_elems=8, bucket_elems=3)
        (plan,) = plan_buffers([spec("a", 0), spec("b", 0)], policy=policy)
        (bucket,) = plan.buckets
        assert (bucket.span, bucket.shard_sizes, len(bucket.params)) == (Span(0, 0), (0, 0), 2)


class TestImports:
    """Layouts, which consist of integers only."""

    def test_do_not_load_torch(self):
        """Planning works, and starts fast, without torch."""
        code = "import sys, zero_sim.layout; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
