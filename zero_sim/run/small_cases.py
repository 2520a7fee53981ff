"""Small cases that commands vary to find out how a target computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zero_sim.scenario.spec import (
    AnyModelName,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    WorldSpec,
)
from zero_sim.workloads import EXACT_MODELS

BASE = Scenario(
    schema=1,
    name="3 ranks",
    model=ModelSpec(name="mlp", hidden=3, blocks=1),
    # Adam divides a gradient by its size. With a small learning rate, params would not show the
    # quotient's last bits.
    optimizer=OptimizerSpec(lr=0.1),
    # At least three ranks, because with two all orders are equal and divisions are exact.
    world=WorldSpec(size=3),
    run=RunSpec(steps=1),
)


def changed(case: Scenario, name: str = "", **fields: Any) -> Scenario:
    """Return the case with some fields replaced.

    Args:
        case: Any case.
        name: The new case's name; empty to keep the old.
        fields: New fields by table name; a mapping of the table's fields, or a whole table.
    """
    new = {
        table: replace(getattr(case, table), **values) if isinstance(values, Mapping) else values
        for table, values in fields.items()
    }
    return replace(case, name=name or case.name, **new)


def with_model(base: Scenario, name: AnyModelName, *, divisor: int = 1) -> Scenario:
    """Return the case with another, small model, with sizes that are multiples of `divisor`."""
    bare = ((rounded(3, divisor),), (rounded(2, divisor), 2))
    shapes = bare if name in ("params", "bit-hash") else None
    # The default width fits every model.
    hidden = rounded(ModelSpec(name=name).hidden, divisor)
    if name in EXACT_MODELS:
        # Dividing by three before the sum rounds, so the model would not be exact.
        base = changed(base, world={"size": min(2, base.world.size)})
    return changed(base, model=ModelSpec(name=name, shapes=shapes, hidden=hidden))


def rounded(number: int, divisor: int) -> int:
    """Round a number up to a multiple of a divisor."""
    return -(-number // divisor) * divisor
