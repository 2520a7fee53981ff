"""Size of a case, as an order of how hard it is to understand."""

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
"""Fields that count elsewhere, or that do not affect what the case does."""


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Size:
    """Size of a case. The first number in which two sizes differ decides which is smaller."""

    ranks: int
    """Number of ranks; of the largest world, if a reload or a second layout makes two."""
    params: int
    elements: int
    """Elements of all params, on all ranks."""
    steps: int
    features: int
    """Non-default settings, including optional tables, and micro-batches after the first."""

    def as_dict(self) -> dict[str, int]:
        """Return all fields, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return ", ".join(
            f"{count} {name if count != 1 else name.removesuffix('s')}"
            for name, count in self.as_dict().items()
        )


Order = tuple[Size, int, int, str, int]


def size_of(scenario: Scenario) -> Size:
    """Compute the size of a case.

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
    """Return the position of a case among all: by size, then values, length of text, and seed.

    The order is total: two cases compare equal only if they differ in nothing but their names.
    """
    # Breaks ties of equal sizes: smaller numbers and plainer choices first.
    bulk = sum(weight for _, weight in _features(scenario))
    anonymous = replace(
        # The seed comes last by itself, so it must not affect the length of the text.
        scenario,
        name="",
        description="",
        run=replace(scenario.run, seed=RunSpec().seed),
    )
    text = json.dumps(to_chosen_data(anonymous), sort_keys=True)
    return size_of(scenario), bulk, len(text), text, scenario.run.seed


def settings_of(scenario: Scenario) -> frozenset[str]:
    """Return the paths of the settings that count as features."""
    return frozenset(path for path, _, _ in features_with_values(scenario))


def features_with_values(scenario: Scenario) -> Iterator[tuple[str, Any, tuple[object, ...]]]:
    """Yield path, value and choices of each setting that counts as a feature, by list item."""
    for path, value, choices in _settings(scenario, ""):
        if path not in UNCOUNTED and not (path == "model.name" and value == SIMPLEST_MODEL):
            yield path, value, choices


def _features(scenario: Scenario) -> Iterator[tuple[int, int]]:
    """Yield the count and the weight of each feature."""
    for path, value, choices in features_with_values(scenario):
        weight = 0
        if value in choices:
            # An earlier choice is plainer, a smaller number lighter.
            weight = choices.index(value)
        elif isinstance(value, int):
            weight = int(value)
        yield value - 1 if path == "run.micro_batches" else 1, weight
        # Each further micro-batch is a feature.


def _settings(record: Any, prefix: str) -> Iterator[tuple[str, Any, tuple[object, ...]]]:
    """Yield path, value and choices of non-default settings, by list item."""
    for name, default, is_table, choices in _columns(type(record)):
        value, path = getattr(record, name), prefix + name
        if is_table:
            yield from _settings(value, f"{path}.")
            continue
        # A field without a default is part of its table, which counts already.
        is_required = default is dataclasses.MISSING and path != "model.name"
        if value == default or is_required:
            continue
        # These two are one value each, not lists of settings.
        is_list = isinstance(value, tuple) and path not in ("model.shapes", "optimizer.betas")
        for item in value if is_list else (value,):
            yield path, item, choices
            if dataclasses.is_dataclass(item):
                yield from _settings(item, f"{path}.")


@cache
def _columns(record: type) -> tuple[tuple[str, object, bool, tuple[object, ...]], ...]:
    """Return name, default, True for a table that is always present, and choices of each field."""
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
