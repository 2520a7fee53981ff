"""Size of a case: how hard it is to understand."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from zero_sim.scenario.dump import to_chosen_data
from zero_sim.scenario.fields import choices_of, fields_of
from zero_sim.scenario.spec import RunSpec, Scenario
from zero_sim.workloads import params_of

SIMPLEST_MODEL = "params"
UNCOUNTED = frozenset(
    {
        "schema", "name", "description", "model.shapes", "model.hidden", "model.blocks",
        "model.experts", "world.size", "run.steps", "run.seed", "run.stall_seconds",
    }
)  # fmt: skip
"""Fields that count elsewhere, or that do not affect the computation."""


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Size:
    """Size of a case. Sizes compare by their first different number."""

    ranks: int
    """Ranks in the largest world, because a reload or second layout has another world."""
    params: int
    elements: int
    """Elements of all params."""
    steps: int
    features: int
    """Non-default settings, including optional tables, and micro-batches after the first."""

    def as_dict(self) -> dict[str, int]:
        """Return all fields as JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return ", ".join(
            f"{count} {name if count != 1 else name.removesuffix('s')}"
            for name, count in self.as_dict().items()
        )


Order = tuple[Size, int, int, str, int]


def size_of(scenario: Scenario) -> Size:
    """Return the size of a valid case."""
    others = (each.world_size or 0 for each in (scenario.reload, scenario.pair) if each is not None)
    elems = [math.prod(shape) for _, shape in params_of(scenario.model)]
    return Size(
        ranks=max((scenario.world.size, *others)),
        params=len(elems),
        elements=sum(elems),
        steps=scenario.run.steps,
        features=sum(count for count, _ in _features(scenario)),
    )


def order_of(scenario: Scenario) -> Order:
    """Return a sort key: size, then values, text length, text and seed."""
    # A total order, so that the search is deterministic: cases with equal keys only differ in name
    # and description. Of equal sizes, smaller numbers and plainer choices come first.
    bulk = sum(weight for _, weight in _features(scenario))
    anonymous = replace(
        # The seed is compared last, so it must not affect the text.
        scenario,
        name="",
        description="",
        run=replace(scenario.run, seed=RunSpec().seed),
    )
    text = json.dumps(to_chosen_data(anonymous), sort_keys=True)
    return size_of(scenario), bulk, len(text), text, scenario.run.seed


def settings_of(scenario: Scenario) -> frozenset[str]:
    """Return the paths of settings that count as features."""
    return frozenset(path for path, _, _ in features_with_values(scenario))


def features_with_values(scenario: Scenario) -> Iterator[tuple[str, Any, tuple[object, ...]]]:
    """Yield path, value and choices of each feature. Each list item is a feature."""
    for path, value, choices in _settings(scenario, ""):
        if path not in UNCOUNTED and not (path == "model.name" and value == SIMPLEST_MODEL):
            yield path, value, choices


def _features(scenario: Scenario) -> Iterator[tuple[int, int]]:
    """Yield count and weight of each feature."""
    for path, value, choices in features_with_values(scenario):
        # Earlier choices are plainer, and smaller numbers are easier to read.
        weight = 0
        if value in choices:
            weight = choices.index(value)
        elif isinstance(value, int):
            weight = int(value)
        # Each further micro-batch is a feature.
        yield value - 1 if path == "run.micro_batches" else 1, weight


def _settings(record: Any, prefix: str) -> Iterator[tuple[str, Any, tuple[object, ...]]]:
    """Yield path, value and choices of non-default settings, item by item for lists."""
    for name, default, is_table, choices in _columns(type(record)):
        value, path = getattr(record, name), prefix + name
        if is_table:
            yield from _settings(value, f"{path}.")
            continue
        # Required fields belong to their table, which already counts.
        is_required = default is dataclasses.MISSING and path != "model.name"
        if value == default or is_required:
            continue
        # Each of these two tuples is a single value.
        is_list = isinstance(value, tuple) and path not in ("model.shapes", "optimizer.betas")
        for item in value if is_list else (value,):
            yield path, item, choices
            if dataclasses.is_dataclass(item):
                yield from _settings(item, f"{path}.")


@cache
def _columns(record: type) -> tuple[tuple[str, object, bool, tuple[object, ...]], ...]:
    """Return name, default, True for a table that is always present, and choices, by field."""
    types = fields_of(record)
    return tuple(
        (
            column.name,
            column.default,
            column.default_factory is not dataclasses.MISSING or column.type == "ModelSpec",
            choices_of(types[column.name]),
        )
        for column in dataclasses.fields(record)
    )
