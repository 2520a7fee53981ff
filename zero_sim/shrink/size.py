"""The size of a case, to whoever has to hold it in the head."""

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
"""Fields that are counted otherwise, or say nothing of what the case does."""


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Size:
    """How large a case is; the first number in which two differ decides which is the smaller."""

    ranks: int
    """Of the largest world, if a reload or a second layout makes two."""
    params: int
    elements: int
    """Of all params together, on all ranks."""
    steps: int
    features: int
    """Settings that are not as by default, tables among them that are there at all, and
    micro-batches beyond the first."""

    def as_dict(self) -> dict[str, int]:
        """Everything, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return ", ".join(
            f"{count} {name if count != 1 else name.removesuffix('s')}"
            for name, count in self.as_dict().items()
        )


Order = tuple[Size, int, int, str, int]


def size_of(scenario: Scenario) -> Size:
    """The size of a case.

    Args:
        scenario: A valid case.
    """
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
    """Where a case stands among all: by size, then by its numbers, its length and its seed.

    No two cases have one place, unless they differ in nothing but a name.
    """
    bulk = sum(weight for _, weight in _features(scenario))
    anonymous = replace(
        scenario, name="", description="", run=replace(scenario.run, seed=RunSpec().seed)
    )
    text = json.dumps(to_chosen_data(anonymous), sort_keys=True)
    return size_of(scenario), bulk, len(text), text, scenario.run.seed


def settings_of(scenario: Scenario) -> frozenset[str]:
    """Paths of the settings of a case that count as features."""
    return frozenset(path for path, _, _ in features_with_values(scenario))


def features_with_values(scenario: Scenario) -> Iterator[tuple[str, Any, tuple[object, ...]]]:
    """Path, value and choices of each setting that counts as a feature; of a list, of each item."""
    for path, value, choices in _settings(scenario, ""):
        if path not in UNCOUNTED and not (path == "model.name" and value == SIMPLEST_MODEL):
            yield path, value, choices


def _features(scenario: Scenario) -> Iterator[tuple[int, int]]:
    """Count and weight of each setting that is not as by default."""
    for path, value, choices in features_with_values(scenario):
        weight = 0
        if value in choices:
            weight = choices.index(value)
        elif isinstance(value, int):
            weight = int(value)
        yield value - 1 if path == "run.micro_batches" else 1, weight


def _settings(record: Any, prefix: str) -> Iterator[tuple[str, Any, tuple[object, ...]]]:
    """Path, value and choices of what is not as by default; of a list, of each item."""
    for name, default, is_table, choices in _columns(type(record)):
        value, path = getattr(record, name), prefix + name
        if is_table:
            yield from _settings(value, f"{path}.")
            continue
        # What has to be said of a table that is there is no feature beside the table.
        is_owed = default is dataclasses.MISSING and path != "model.name"
        if value == default or is_owed:
            continue
        # In order, or the shapes of a model would count by the dimension.
        is_list = isinstance(value, tuple) and path not in ("model.shapes", "optimizer.betas")
        for item in value if is_list else (value,):
            yield path, item, choices
            if dataclasses.is_dataclass(item):
                yield from _settings(item, f"{path}.")


@cache
def _columns(record: type) -> tuple[tuple[str, object, bool, tuple[object, ...]], ...]:
    """Of each field the name, the default, whether it is a table that is always there, choices."""
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
