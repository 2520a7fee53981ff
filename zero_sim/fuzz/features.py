"""Features of cases: non-default settings and special layout properties.

A feature has the name of its setting: `system.stage=3` if the setting has a few values,
`system.bucket_elems` if it is a number or list. Layout features such as `layout: empty param`
depend on the planned buffers. So if a bucket size has no effect, it gives no layout feature.
Numbers of ranks, steps and params, and the seed, are no features.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache

from zero_sim.fuzz.plans import layouts_of
from zero_sim.layout import BucketPlan, BufferPlan
from zero_sim.scenario.fields import choices_of, fields_of, is_table
from zero_sim.scenario.spec import OptionSpec, Scenario
from zero_sim.shrink.size import UNCOUNTED, features_with_values
from zero_sim.targets import Capabilities
from zero_sim.targets.declared import followed

LAYOUT = "layout: "
"""Name prefix of layout features."""
_OPTIONS = "system.options."
_OWN_MODELS = "model.name=own:"
# Fields that are no features: faults, expectations, second layout and target.
_ASSERTED = ("faults", "expect", "pair", "system.target")
# Cache sizes, bounded because names may come from a forged file.
_NAMES_KEPT, _PAIRS_KEPT = 1 << 10, 1 << 15
# Fields of `Capabilities` with supported values, by setting.
_CAPABLE = {
    "model.name": "models",
    "model.dtype": "dtypes",
    "system.stage": "stages",
    "reload.stage": "stages",
    "optimizer.name": "optimizers",
    "world.order": "known_orders",
}
Plans = Sequence[BufferPlan]


def features_of(scenario: Scenario) -> frozenset[str]:
    """Return the names of a case's features.

    Args:
        scenario: A valid case.
    """
    found = {
        _called(path, value, choices)
        for path, value, choices in features_with_values(scenario)
        if not path.startswith(_ASSERTED)
    }
    # Even the default model is a feature.
    found.add(f"model.name={scenario.model.name}")
    found.update(LAYOUT + name for name in layout_features(layouts_of(scenario)))
    return frozenset(found)


def features_for(able: Capabilities) -> tuple[str, ...]:
    """Return all features that a target's cases can have, in field order.

    The target's own options are not included.

    Args:
        able: The target's capabilities.
    """
    return tuple(name for name in every_feature() if _may_have(able, name))


@cache
def every_feature() -> tuple[str, ...]:
    """Return all features that a case can have, in field order."""
    return (*_within(Scenario, ""), *(LAYOUT + name for name in FEATURES))


@lru_cache(maxsize=_NAMES_KEPT)
def is_feature(name: str) -> bool:
    """Return True if a case can have this feature, including any target's own options."""
    return name in every_feature() or name.startswith((_OPTIONS, _OWN_MODELS))


def setting_of(feature: str) -> str:
    """Return a feature's setting; for a layout feature, its name."""
    return feature.partition("=")[0]


@lru_cache(maxsize=_PAIRS_KEPT)
def may_meet(one: str, other: str) -> bool:
    """Return False if two features have the same setting, or are a table and its field."""
    # If a path contains the other, the shorter path is the table.
    first, second = sorted((setting_of(one), setting_of(other)), key=len)
    return first != second and not second.startswith(f"{first}.")


def _within(record: type, prefix: str) -> Iterator[str]:
    """Yield the features of a record, including nested records."""
    types = fields_of(record)
    for column in dataclasses.fields(record):
        path, expected = prefix + column.name, types[column.name]
        if path in UNCOUNTED or path == _OPTIONS[:-1] or path.startswith(_ASSERTED):
            continue
        table = _table_of(expected)
        if table is None:
            # A required field adds nothing to its table's feature.
            if column.default is not dataclasses.MISSING or path == "model.name":
                yield from _values(path, expected, default=column.default)
            continue
        # Top-level tables always exist, except `reload`, so they are no features.
        if prefix or path == "reload":
            yield path
        yield from _within(table, f"{path}.")


def _values(path: str, expected: object, *, default: object) -> Iterator[str]:
    choices = choices_of(expected) or ((True, False) if expected is bool else ())
    if not choices:
        yield path
    yield from (_called(path, value, choices) for value in choices if value != default)


def _table_of(expected: object) -> type | None:
    """Return the record type of a setting or its list items; None for plain values."""
    inner = typing.get_args(expected)[0] if typing.get_origin(expected) is tuple else expected
    return inner if isinstance(inner, type) and is_table(inner) else None


def _called(path: str, value: object, choices: tuple[object, ...]) -> str:
    if isinstance(value, OptionSpec):
        return f"{path}.{value.name}={value.value}"
    if isinstance(value, bool):
        return f"{path}={str(value).lower()}"
    return f"{path}={value}" if value in choices else path


def _may_have(able: Capabilities, feature: str) -> bool:
    setting, _, value = feature.partition("=")
    if setting in _CAPABLE:
        # If a target declares no order, cases have any order and are checked against bounds.
        capable = getattr(able, _CAPABLE[setting])
        return not capable or value in map(str, capable)
    # If a target follows a setting, it also follows the setting after a reload.
    before = setting.replace("reload.", "system.", 1) if setting.startswith("reload.") else setting
    heads = {path for each in (setting, before) for path in _heads(each)}
    return not heads & (set(followed()) - set(able.follows))


def _heads(path: str) -> Iterator[str]:
    """Yield the paths of all enclosing tables, outermost first, and the path itself."""
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _any_param(test: Callable[[BufferPlan, int], bool]) -> Callable[[Plans], bool]:
    return lambda plans: any(
        test(plan, param.span.numel) for plan in plans for param in plan.params
    )


def _any_bucket(test: Callable[[BufferPlan, BucketPlan], bool]) -> Callable[[Plans], bool]:
    return lambda plans: any(test(plan, bucket) for plan in plans for bucket in plan.buckets)


def _cut_count(plan: BufferPlan, bucket: BucketPlan) -> int:
    """Return the maximum number of fragments per param in a bucket."""
    starts = {bucket.shard_span(shard).start for shard in range(bucket.shard_count)}
    return max(
        (
            # A shard that starts at a param's edge does not cut the param.
            1 + sum(param.span.start < start < param.span.stop for start in starts)
            for param in bucket.params
            if param.span.numel
        ),
        default=0,
    )


def _boundary_between_params(plan: BufferPlan, bucket: BucketPlan) -> bool:
    """Return True if a shard ends exactly between two params."""
    inner = {param.span.start for param in bucket.params if param.span.numel}
    # Skip shard 0, which starts with the bucket.
    starts = (bucket.shard_span(shard).start for shard in range(1, bucket.shard_count))
    return any(start in inner for start in starts)


def _empty_shard(plan: BufferPlan, bucket: BucketPlan) -> bool:
    return any(
        bucket.shard_span(shard).intersect(bucket.payload).empty
        for shard in range(bucket.shard_count)
    )


def _idle_owner(plans: Plans) -> bool:
    """Return True if a rank owns nothing in any buffer."""
    # If a buffer has fewer shards than another, its shards repeat over the ranks.
    most = max(plan.policy.shard_count for plan in plans)
    return any(
        not any(plan.fragments(shard % plan.policy.shard_count) for plan in plans)
        for shard in range(most)
    )


def _unit(plan: BufferPlan) -> int:
    """Return the unit in elements of which padded buckets are multiples."""
    return plan.policy.shard_count * plan.policy.shard_multiple(plan.key.dtype)


def _remainder(by: int) -> Callable[[BufferPlan, BucketPlan], bool]:
    """Return a test for buckets with a payload `by` elements above a multiple of the unit."""
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
"""Tests for layout features by name."""


def layout_features(plans: Plans) -> frozenset[str]:
    """Return the names of a layout's features.

    Args:
        plans: Plans of the layout's buffers.
    """
    return frozenset(name for name, has in FEATURES.items() if has(plans))
