"""Drawn second layouts. A case with a second layout is compared with itself in this layout."""

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

# Powers of two, because dividing by other numbers of ranks rounds.
_SIZES = (2, 1, 4)
# With these settings, two layouts may differ without a fault: steps may be skipped for some params,
# ranks may differ in data, or a reload adds layouts.
_IN_THE_WAY = (
    *("optimizer.loss_scale", "reload", "reload.async_steps", "run.own_micro_batches"),
    *("model.unused", "model.skip", "model.one_rank", "model.freeze"),
)


def needs_pair(target: Target) -> bool:
    """Return True if the reference has no update rule for a target's own optimizer."""
    return "own" in capabilities_of(target).optimizers and not has_own_rule(target)


def pairable(able: Capabilities) -> Capabilities:
    """Return the capabilities without settings that exclude a second layout."""
    follows = tuple(
        path
        for path in able.follows
        if path not in _IN_THE_WAY and not path.startswith("topology.")
    )
    models: tuple[ModelName, ...] = tuple(name for name in PAIRED_MODELS if name in able.models)
    # Unknown orders may give other bits in another layout, so only known orders are drawn.
    return replace(able, models=models, orders=able.known_orders, follows=follows)


def with_second_layout(
    choices: Choices, scenario: Scenario, *, able: Capabilities, sizes: Sequence[int]
) -> Scenario:
    """Return the case with a second layout.

    Args:
        choices: Source of choices. Refuses cases that cannot have a second layout.
        scenario: The case in its first layout.
        able: The target's capabilities.
        sizes: Elements by param.
    """
    names = [name for name, path in PAIRED.items() if path in able.independent_of]
    if not names:
        choices.refuse()
    # At least one property differs, and each other property in a third of the cases.
    surely = choices.among(names)
    chosen = {name for name in names if name == surely or choices.among((False, False, True))}
    pair: dict[str, Any] = {}
    if "world_size" in chosen:
        most = able.world_size_max or max(_SIZES)
        ranks = choices.among([size for size in _SIZES if size <= most])
        others = [size for size in sorted(_SIZES) if size <= most and size != ranks]
        pair["world_size"] = choices.among(others) if others else choices.refuse()
        # With another number of ranks the data would change, so all ranks get the same data.
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
    # Sorted, because the order of a set of strings differs between processes.
    for name in sorted(chosen - {"world_size"}):
        others = [each for each in values[name] if each != getattr(scenario.system, name)]
        pair[name] = choices.among(others) if others else choices.refuse()
    paired = replace(scenario, pair=PairSpec(**pair))
    return choices.refuse() if check_scenario(paired) else paired
