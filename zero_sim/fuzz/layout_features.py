"""Features of layouts: what is special about where the params of a case lie.

Integers only: features are read off the plans that result, not off what a case asked for, so that a
bucket size nobody notices counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zero_sim.layout import BucketPlan, BufferPlan

Plans = Sequence[BufferPlan]


def _any_param(test: Callable[[BufferPlan, int], bool]) -> Callable[[Plans], bool]:
    return lambda plans: any(
        test(plan, param.span.numel) for plan in plans for param in plan.params
    )


def _any_bucket(test: Callable[[BufferPlan, BucketPlan], bool]) -> Callable[[Plans], bool]:
    return lambda plans: any(test(plan, bucket) for plan in plans for bucket in plan.buckets)


def _cut_count(plan: BufferPlan, bucket: BucketPlan) -> int:
    """Most fragments that one param of a bucket is cut into."""
    starts = {bucket.shard_span(shard).start for shard in range(bucket.shard_count)}
    return max(
        (
            1 + sum(param.span.start < start < param.span.stop for start in starts)
            for param in bucket.params
            if param.span.numel
        ),
        default=0,
    )


def _boundary_between_params(plan: BufferPlan, bucket: BucketPlan) -> bool:
    """Whether a shard ends exactly where one param does and another one begins."""
    inner = {param.span.start for param in bucket.params if param.span.numel}
    starts = (bucket.shard_span(shard).start for shard in range(1, bucket.shard_count))
    return any(start in inner for start in starts)


def _empty_shard(plan: BufferPlan, bucket: BucketPlan) -> bool:
    return any(
        bucket.shard_span(shard).intersect(bucket.payload).empty
        for shard in range(bucket.shard_count)
    )


def _idle_owner(plans: Plans) -> bool:
    """Whether some rank owns nothing of any buffer."""
    most = max(plan.policy.shard_count for plan in plans)
    return any(
        not any(plan.fragments(shard % plan.policy.shard_count) for plan in plans)
        for shard in range(most)
    )


def _unit(plan: BufferPlan) -> int:
    """What a padded bucket is a multiple of, in elements."""
    return plan.policy.shard_count * plan.policy.shard_multiple(plan.key.dtype)


def _remainder(by: int) -> Callable[[BufferPlan, BucketPlan], bool]:
    """Whether a bucket holds so many elements more than its shards can share evenly."""
    return lambda plan, bucket: (
        _unit(plan) > 1
        and not bucket.payload.empty
        and bucket.payload.numel % _unit(plan) == by % _unit(plan)
    )


FEATURES: Mapping[str, Callable[[Plans], bool]] = {
    "one shard": lambda plans: any(plan.policy.shard_count == 1 for plan in plans),
    "param cut once": _any_bucket(lambda plan, bucket: _cut_count(plan, bucket) == 2),
    "param cut often": _any_bucket(lambda plan, bucket: _cut_count(plan, bucket) > 2),
    "shard ends between params": _any_bucket(_boundary_between_params),
    "bucket with padding": _any_bucket(lambda plan, bucket: not bucket.padding.empty),
    "shard without payload": _any_bucket(_empty_shard),
    "rank that owns nothing": _idle_owner,
    "empty param": _any_param(lambda plan, numel: numel == 0),
    "one-element param": _any_param(lambda plan, numel: numel == 1),
    "param smaller than N": _any_param(lambda plan, numel: 0 < numel < plan.policy.shard_count),
    "param of N": _any_param(
        lambda plan, numel: plan.policy.shard_count > 1 and numel == plan.policy.shard_count
    ),
    "payload just fits": _any_bucket(_remainder(0)),
    "payload one over": _any_bucket(_remainder(1)),
    "payload one short": _any_bucket(_remainder(-1)),
    "bucket exactly full": _any_bucket(
        lambda plan, bucket: bucket.payload.numel == plan.policy.bucket_elems
    ),
    "bucket of one param": _any_bucket(
        lambda plan, bucket: len(plan.buckets) > 1 and len(bucket.params) == 1
    ),
    "several buckets": lambda plans: any(len(plan.buckets) > 1 for plan in plans),
    "several buffers": lambda plans: len(plans) > 1,
    "buffers sharded differently": lambda plans: (
        len({plan.policy.shard_count for plan in plans}) > 1
    ),
    "uneven shards": _any_bucket(lambda plan, bucket: not bucket.is_even),
    "aligned": lambda plans: any(_unit(plan) > plan.policy.shard_count for plan in plans),
    "reversed": lambda plans: any(
        plan.policy.param_order == "reverse" and len(plan.params) > 1 for plan in plans
    ),
}
"""By name: whether a layout has it."""


def layout_features(plans: Plans) -> frozenset[str]:
    """What is special about a layout.

    Args:
        plans: Its buffers.
    """
    return frozenset(name for name, has in FEATURES.items() if has(plans))
