"""Features of layouts, and which of them, alone and in pairs, a campaign has met.

Integers only: features are read off the plans that result, not off what a case asked for, so that a
bucket size nobody notices counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

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
    pieces = Counter(
        fragment.param
        for shard in range(bucket.shard_count)
        for fragment in bucket.fragments(shard)
    )
    return max(pieces.values(), default=0)


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
REDUNDANT = "redundant"
"""One more, which is no matter of the plans: several ranks own every element."""
NAMES = (*FEATURES, REDUNDANT)


def features_of(plans: Plans, *, redundancy: int = 1) -> frozenset[str]:
    """What is special about a layout.

    Args:
        plans: Its buffers.
        redundancy: Copies of the sharded state.
    """
    found = {name for name, has in FEATURES.items() if has(plans)}
    return frozenset(found | ({REDUNDANT} if redundancy > 1 else set()))


@dataclass(kw_only=True, slots=True)
class Grid:
    """How many cases had each feature and each pair of them."""

    counts: Counter[str] = field(default_factory=Counter)
    """By name of the feature, or of two joined by ` + ` in the order of `NAMES`."""

    def add(self, features: Collection[str]) -> None:
        """Count one case.

        Args:
            features: What `features_of` gave for it.
        """
        ordered = [name for name in NAMES if name in features]
        self.counts.update(ordered)
        self.counts.update(map(_pair, combinations(ordered, 2)))

    def merge(self, counts: Mapping[str, int]) -> None:
        """Count the cases of another grid, too."""
        self.counts.update(counts)

    @property
    def features_seen(self) -> int:
        """Number of features met, of `len(NAMES)`."""
        return sum(name in self.counts for name in NAMES)

    @property
    def pairs_seen(self) -> int:
        """Number of pairs met, of `pairs_count()`."""
        return sum(_pair(two) in self.counts for two in combinations(NAMES, 2))

    def pairs_unseen(self) -> list[str]:
        """The pairs not met yet; some cannot be."""
        return [_pair(two) for two in combinations(NAMES, 2) if _pair(two) not in self.counts]

    def table(self) -> str:
        """A triangle of pairs, a row a feature: `.` where a pair was not met, `#` where it was."""
        width = max(map(len, NAMES))
        lines = []
        for row, name in enumerate(NAMES):
            marks = ("#" if _pair((left, name)) in self.counts else "." for left in NAMES[:row])
            lines.append(f"{name:<{width}} {self.counts[name]:>7}  {' '.join(marks)}".rstrip())
        return "\n".join(lines)


def pairs_count() -> int:
    """Number of pairs of features."""
    return len(NAMES) * (len(NAMES) - 1) // 2


def _pair(two: Iterable[str]) -> str:
    return " + ".join(two)
