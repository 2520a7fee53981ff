"""Drawn second layouts, for cases that are compared with themselves in another layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from zero_sim.fuzz.choices import Choices
from zero_sim.fuzz.shapes import bucket_size
from zero_sim.scenario.pair import PAIRED, PAIRED_MODELS
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import ModelName, PairSpec, PartitionName, Scenario
from zero_sim.targets import Capabilities, Target, capabilities_of
from zero_sim.targets.declared import has_own_rule

# Powers of two only, because dividing by any other number of ranks rounds.
_SIZES = (2, 1, 4)
# With these, a step may be skipped for some or all params, ranks differ in data, or a reload adds
# layouts, so two layouts may differ without a fault.
_IN_THE_WAY = (
    *("optimizer.loss_scale", "reload", "reload.async_steps", "run.own_micro_batches"),
    *("model.unused", "model.skip", "model.one_rank", "model.freeze"),
)


def needs_pair(target: Target) -> bool:
    """Return True if the reference has no update rule for a target's own optimizer."""
    return "own" in capabilities_of(target).optimizers and not has_own_rule(target)


def pairable(able: Capabilities) -> Capabilities:
    """Return the capabilities without settings that a second layout excludes."""
    follows = tuple(
        path
        for path in able.follows
        if path not in _IN_THE_WAY and not path.startswith("topology.")
    )
    models: tuple[ModelName, ...] = tuple(name for name in PAIRED_MODELS if name in able.models)
    # Sums of unknown order are known only within bounds, so equal bits prove nothing there.
    return replace(able, models=models, orders=able.known_orders, follows=follows)


def with_second_layout(
    choices: Choices, scenario: Scenario, *, able: Capabilities, sizes: Sequence[int]
) -> Scenario:
    """Return the case with another layout to compare with.

    Args:
        choices: Draws the layout, and refuses cases that cannot have it.
        scenario: The case in one layout.
        able: The target's capabilities.
        sizes: Elements by param.
    """
    names = [name for name, path in PAIRED.items() if path in able.independent_of]
    if not names:
        choices.refuse()
    # At least one property differs, and each further one in a third of the cases.
    surely = choices.among(names)
    chosen = {name for name in names if name == surely or choices.among((False, False, True))}
    pair: dict[str, Any] = {}
    if "world_size" in chosen:
        most = able.world_size_max or max(_SIZES)
        ranks = choices.among([size for size in _SIZES if size <= most])
        others = [size for size in sorted(_SIZES) if size <= most and size != ranks]
        pair["world_size"] = choices.among(others) if others else choices.refuse()
        # Another number of ranks would change the data, so all ranks get the same data.
        data = replace(scenario.data, ranks="same", uneven_rows=False)
        scenario = replace(scenario, world=replace(scenario.world, size=ranks), data=data)
    ranks = pair.get("world_size", scenario.world.size)
    values: dict[str, Sequence[Any]] = {
        "stage": able.stages,
        "redundancy": [each for each in _SIZES if ranks % each == 0],
        "bucket_elems": [bucket_size(choices, sizes)],
        "partition": get_args(PartitionName),
        "param_order": ("registration", "reverse"),
    }
    # Sorted, because the order of a set of strings changes from process to process.
    for name in sorted(chosen - {"world_size"}):
        others = [each for each in values[name] if each != getattr(scenario.system, name)]
        pair[name] = choices.among(others) if others else choices.refuse()
    paired = replace(scenario, pair=PairSpec(**pair))
    return choices.refuse() if check_scenario(paired) else paired
