"""A case's second layout, and rules about both layouts.

[Note: why bits are equal]
In an exact model, no sum depends on the order of addition. If ranks have the same data, their mean
equals each rank's gradient, and dividing by a power of two does not round. So no input of the
optimizer depends on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

from zero_sim.errors import Problem
from zero_sim.scenario.applies import APPLIES
from zero_sim.scenario.conditions import CONDITIONS
from zero_sim.scenario.fields import show
from zero_sim.scenario.fitting import fitted_to_stage
from zero_sim.scenario.spec import ModelName, PairSpec, Scenario, TopologySpec

PAIRED = {
    "world_size": "world.size",
    **{
        name: f"system.{name}"
        for name in ("stage", "redundancy", "bucket_elems", "partition", "param_order")
    },
}
"""Fields of `pair`, with the paths that they replace."""
PAIR_READS = (
    *("pair", "world", "model", "data", "topology", "system", "optimizer", "run"),
    *("reload", "faults", "expect"),
)
PAIRED_MODELS: tuple[ModelName, ...] = ("bit-hash", "ternary")
"""Exact models: their sums are the same in every order."""


def paired(scenario: Scenario) -> dict[str, str]:
    """Return the fields that `pair` sets, with the paths that they replace."""
    pair = scenario.pair
    return {name: path for name, path in PAIRED.items() if getattr(pair, name, None) is not None}


def other_layout(scenario: Scenario) -> Scenario:
    """Return the case in its second layout, with the first layout as its `pair`."""
    # Only the fields that are set, so that the second layout's own pair has the same fields.
    chosen: dict[str, Any] = {n: getattr(scenario.pair, n) for n in paired(scenario)}
    first: dict[str, Any] = {n: attrgetter(path)(scenario) for n, path in PAIRED.items()}
    size = chosen.pop("world_size", scenario.world.size)
    other = replace(
        scenario,
        pair=PairSpec(**{name: first[name] for name in paired(scenario)}),
        world=replace(scenario.world, size=size),
        system=replace(scenario.system, **chosen),
    )
    # If only the world's size changes, all settings keep their effect.
    return fitted_to_stage(other) if chosen else other


def layouts_in_words(scenario: Scenario) -> str:
    """Describe the differences between the case's two layouts."""
    other = other_layout(scenario)

    def words(case: Scenario) -> str:
        values = ((path, attrgetter(path)(case)) for path in paired(scenario).values())
        return ", ".join(f"{path} = {show(value)}" for path, value in values)

    return f"expected: as in the layout {words(other)}\ngot: in the layout {words(scenario)}"


def placed_in_pair(problem: Problem, scenario: Scenario) -> Problem:
    """Return a problem in a case's second layout with its field's path in `pair`."""
    # If `pair` does not set the field, report the problem at the table.
    names = {path: f"pair.{name}" for name, path in paired(scenario).items()}
    return replace(problem, path=names.get(problem.path, "pair"))


def check_pair(scenario: Scenario) -> Iterator[Problem]:
    """Check that both layouts must give the same state."""
    other = other_layout(scenario)
    if replace(scenario, pair=None) == replace(other, pair=None):
        yield Problem(
            path="pair",
            message="expected a second layout, got the case's own.",
            suggestion="Try stage, world_size or bucket_elems.",
        )
    for path, is_in_the_way, why in _differences(scenario, other):
        if is_in_the_way:
            yield Problem(
                path=path,
                message=f"{why}, so two layouts may differ.",
                suggestion="Leave out this field or `pair`.",
            )
    for rule in (*APPLIES, *CONDITIONS):
        if not rule.broken(scenario):
            # If both layouts have a problem, it is reported once, at the case's own field.
            yield from (placed_in_pair(problem, scenario) for problem in rule.check(other))


def _differences(scenario: Scenario, other: Scenario) -> Iterator[tuple[str, bool, str]]:
    """Yield a path, True if its value may make the layouts differ, and the reason."""
    model, data, run, optimizer = scenario.model, scenario.data, scenario.run, scenario.optimizer
    is_exact = model.name in PAIRED_MODELS
    yield "model.name", not is_exact, f"sums of model {model.name!r} depend on the order"
    for name in ("freeze", "skip", "one_rank", "unused"):
        yield f"model.{name}", bool(getattr(model, name)), "not every param is stepped each time"
    yield "topology", scenario.topology != TopologySpec(), "ranks have different params"
    yield "reload", scenario.reload is not None, "a reload has layouts of its own"
    yield "faults", bool(scenario.faults), "a fault belongs to calls of one layout"
    yield "data.nan", data.nan is not None, "a step may be skipped"
    yield "optimizer.loss_scale", optimizer.loss_scale is not None, "a step may be skipped"
    yield "world.order_known", not scenario.world.order_known, "sums are known only within bounds"
    # With the same number of ranks, both layouts have the same data and divisor.
    if scenario.world.size == other.world.size:
        return
    # With other numbers of ranks, the mean must not change; see [Note: why bits are equal].
    yield "data.ranks", data.ranks != "same", "the data depends on the number of ranks"
    sizes = (scenario.world.size, other.world.size)
    # A power of two has one bit.
    has_others = any(size < 1 or size & (size - 1) for size in sizes)
    yield "pair.world_size", has_others, "dividing by a number that is no power of two rounds"
    yield "data.loss", data.loss == "mean-of-ranks", "the loss depends on the number of ranks"
    yield "data.uneven_rows", data.uneven_rows, "ranks differ in rows"
    yield "system.divide", scenario.system.divide == "none", "the sum depends on their number"
    yield "run.own_micro_batches", bool(run.own_micro_batches), "ranks differ in data"
