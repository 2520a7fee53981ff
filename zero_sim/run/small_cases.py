"""Small cases that commands derive from one another, to find out how a target behaves."""

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
    # Adam steps by a gradient over its own length: with a small rate, params do not show the last
    # bits of that.
    optimizer=OptimizerSpec(lr=0.1),
    world=WorldSpec(size=3),
    run=RunSpec(steps=1),
)


def changed(case: Scenario, name: str = "", **fields: Any) -> Scenario:
    """The case with fields of its tables replaced.

    Args:
        case: Any case.
        name: What the new one is called.
        fields: By name of a table the fields of it, as a mapping; or a whole table.
    """
    new = {
        table: replace(getattr(case, table), **said) if isinstance(said, Mapping) else said
        for table, said in fields.items()
    }
    return replace(case, name=name or case.name, **new)


def with_model(base: Scenario, name: AnyModelName, *, divisor: int = 1) -> Scenario:
    """The case with another model, a small one.

    Args:
        base: Any case.
        name: Of the model.
        divisor: Number of which the sizes that a case can choose are multiples.
    """
    bare = ((rounded(3, divisor),), (rounded(2, divisor), 2))
    shapes = bare if name in ("params", "bit-hash") else None
    hidden = rounded(ModelSpec(name=name).hidden, divisor)
    if name in EXACT_MODELS:
        # What is divided by three before the sum is no exact number any more.
        base = changed(base, world={"size": min(2, base.world.size)})
    return changed(base, model=ModelSpec(name=name, shapes=shapes, hidden=hidden))


def rounded(number: int, divisor: int) -> int:
    """The least multiple of a divisor that is at least a number."""
    return -(-number // divisor) * divisor
