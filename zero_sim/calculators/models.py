"""Models whose costs are asked for: the cases of a scenario file, or a module of somebody else.

Of a model only the sizes of its params are taken; one of somebody else is built without memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from zero_sim.calculators.counted import Model
from zero_sim.cost.forms import sizes_of
from zero_sim.errors import UsageError
from zero_sim.run.dp_cp_groups import dp_cp_groups_of
from zero_sim.scenario.load import load_cases
from zero_sim.scenario.spec import ModelSpec, Scenario
from zero_sim.targets.imported import attribute_of, import_module, theirs
from zero_sim.workloads import build_module, build_workload

_NAME = "module:name"


def models_of_file(path: Path) -> list[Model]:
    """What each case of a scenario file trains, on the ranks of its first dp-cp group.

    Raises:
        ScenarioError: with every problem of the file.
    """
    return [_model_of_case(scenario) for scenario in load_cases(path)]


def _model_of_case(scenario: Scenario) -> Model:
    dp_cp_group = dp_cp_groups_of(scenario)[0].scenario
    module = build_module(build_workload(dp_cp_group), expert_index=0, tp_index=0)
    return Model(sizes=sizes_of(module), scenario=dp_cp_group)


def model_of_name(name: str) -> Model:
    """A module of somebody else; runs its code.

    Args:
        name: `module:name`: a module of Python, and what in it is an `nn.Module`, or makes one
            without arguments.

    Raises:
        UsageError: There is no such thing, or it is not what it should be.
    """
    said = f"the model {name}"
    imported = import_module(name, said=said, form=_NAME)
    attribute = name.partition(":")[2]
    with theirs(f"{attribute!r} of {name} to be an nn.Module, or to make one without arguments"):
        made = attribute_of(imported, attribute, said=said)
        if not isinstance(made, nn.Module):
            made = _without_memory(made)
    if not isinstance(made, nn.Module):
        raise UsageError(f"expected {name} to be or to make an nn.Module, got {made!r}.")
    sizes = sizes_of(made)
    if not sizes:
        raise UsageError(f"expected {name} to have params that are trained, got none.")
    scenario = Scenario(schema=1, name=name, model=ModelSpec(name="mlp"))
    return Model(sizes=sizes, scenario=scenario, imported=True)


def _without_memory(make: Callable[[], object]) -> object:
    with torch.device("meta"):
        return make()
