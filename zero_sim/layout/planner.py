"""Layout planning: the arithmetic of ZeRO's partitioning, without tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

from zero_sim.errors import LayoutError
from zero_sim.layout.integers import round_up
from zero_sim.layout.partition import Partition
from zero_sim.layout.plan import BucketPlan, BufferKey, BufferPlan, PlacedParam
from zero_sim.layout.request import LayoutPolicy, ParamSpec
from zero_sim.layout.span import Span


def plan_buffers(params: Iterable[ParamSpec], *, policy: LayoutPolicy) -> tuple[BufferPlan, ...]:
    """Place params into a buffer for each (kind, dtype, group).

    Ranks with equal params and policy compute equal plans, so their collectives match without any
    communication.

    Args:
        params: Params in registration order, with unique names.
        policy: Shards, alignment, bucket size, order and partition.

    Returns:
        Buffers, ordered by their first registered param. `policy.param_order` only affects the
        order inside a buffer.

    Raises:
        LayoutError: If there are no params, two params share a name, or the policy aligns to bytes
            and a dtype's size is unknown.

    Source:
        ZeRO (arXiv 1910.02054), section 5: equal partitions of the flattened params. torch's
        ZeroRedundancyOptimizer instead assigns whole params to ranks; only its round-robin variant
        is available here. Other partitions: `zero_sim.layout.partition`.
    """
    groups: dict[BufferKey, list[ParamSpec]] = {}
    names: set[str] = set()
    for spec in params:
        if spec.name in names:
            raise LayoutError(
                f"expected unique param names, got {spec.name!r} twice. "
                f"A tied param is one param: list it once."
            )
        names.add(spec.name)
        # A dict keeps registration order, so buffers have the same order on every rank.
        groups.setdefault(BufferKey(kind=spec.kind, dtype=spec.dtype, group=spec.group), []).append(
            spec
        )
    if not groups:
        raise LayoutError("expected at least one param to lay out, got none.")
    return tuple(_plan_buffer(key, specs, policy=policy) for key, specs in groups.items())


def _plan_buffer(key: BufferKey, specs: list[ParamSpec], *, policy: LayoutPolicy) -> BufferPlan:
    # `reverse`, because backward produces gradients last layer first: bucket 0 is then ready first.
    ordered = specs if policy.param_order == "registration" else specs[::-1]
    buckets: list[BucketPlan] = []
    start = 0
    for index, members in enumerate(_cut_into_buckets(ordered, bucket_elems=policy.bucket_elems)):
        bucket = _plan_bucket(index, members, start=start, policy=policy, dtype=key.dtype)
        buckets.append(bucket)
        start = bucket.span.stop
    return BufferPlan(
        key=key,
        policy=policy,
        params=tuple(param for bucket in buckets for param in bucket.params),
        buckets=tuple(buckets),
    )


def _cut_into_buckets(specs: list[ParamSpec], *, bucket_elems: int | None) -> list[list[ParamSpec]]:
    """Close a bucket once it has `bucket_elems` or more; a param is never split."""
    buckets: list[list[ParamSpec]] = [[]]
    held_elems = 0
    for spec in specs:
        is_full = bucket_elems is not None and held_elems >= bucket_elems
        # An empty param joins the full bucket, because a new bucket would add a collective.
        if is_full and spec.numel > 0:
            buckets.append([])
            held_elems = 0
        buckets[-1].append(spec)
        held_elems += spec.numel
    return buckets


def _plan_bucket(
    index: int, specs: list[ParamSpec], *, start: int, policy: LayoutPolicy, dtype: str
) -> BucketPlan:
    placed: list[PlacedParam] = []
    end = start
    # Params are adjacent: no alignment between them, only at shard boundaries.
    for spec in specs:
        span = Span(end, end + spec.numel)
        placed.append(PlacedParam(spec=spec, bucket=index, span=span))
        end = span.stop
    # Pad each bucket, not the buffer as a whole, so that shards in every bucket are even and
    # aligned.
    shard_count, owner = policy.shard_count, None
    stop = end
    if policy.partition == "padded":
        stop = start + round_up(end - start, shard_count * policy.shard_multiple(dtype))
    elif policy.partition == "rows":
        stop = start + round_up(end - start, shard_count * _row_elems(specs))
        # LayoutPolicy ensures that the bucket is a single param, so its rows are equally long.
    elif policy.partition == "one-owner":
        owner = index % shard_count
        # Round-robin by bucket index, as in torch's ZeroRedundancyOptimizer with overlap.
    return BucketPlan(
        index=index,
        span=Span(start, stop),
        params=tuple(placed),
        padding=Span(end, stop),
        partition=Partition(numel=stop - start, shard_count=shard_count, owner=owner),
    )


def _row_elems(specs: list[ParamSpec]) -> int:
    """Return the elements per row of dim 0; 1 for a scalar or an empty param."""
    shapes = [spec.shape for spec in specs if spec.numel]
    return max((math.prod(shape[1:]) for shape in shapes), default=1)
