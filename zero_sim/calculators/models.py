"""Models for the calculators: cases in a scenario file, or the user's module.

Closed forms need only param sizes. Runs need a case. If only the number of params is known, it is a
chain of modules with a bucket each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_sim.calculators.counted import Model
from zero_sim.cost.forms import sizes_of
from zero_sim.errors import ScenarioError, UsageError
from zero_sim.run.dp_cp_groups import dp_cp_groups_of
from zero_sim.scenario.load import load_cases
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import DtypeName, ModelSpec, OwnModelName, Scenario
from zero_sim.targets.imported import attribute_of, import_module, theirs
from zero_sim.workloads import build_module, build_workload
from zero_sim.workloads.own_model import OwnModel, known_while

_NAME = "module:name"
_MEASURED = OwnModelName("own:measured")
_DTYPES: dict[str, DtypeName] = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_FUNCTIONS = {"batch": "batch(generator, rows)", "loss": "loss(model, *batch)"}
"""Functions that a run needs beside an imported model: the fields of `OwnModel`."""


def models_of_file(path: Path) -> list[Model]:
    """Return the model for each case in a scenario file, on the ranks of its first dp-cp group.

    Raises:
        ScenarioError: If the file has problems; the error lists all of them.
    """
    return [_model_of_case(scenario) for scenario in load_cases(path)]


def _model_of_case(scenario: Scenario) -> Model:
    dp_cp_group = dp_cp_groups_of(scenario)[0].scenario
    module = build_module(build_workload(dp_cp_group), expert_index=0, tp_index=0)
    return Model(sizes=sizes_of(module), scenario=dp_cp_group)


def model_of_name(name: str) -> Model:
    """Import the user's module; this runs its code.

    Args:
        name: `module:name`, where `name` is an `nn.Module` in the Python module, or a function
            that returns an `nn.Module` and takes no arguments.

    Raises:
        UsageError: If the import fails, or the result is no `nn.Module` with trainable params.
    """
    with theirs(f"the model {name} to be an nn.Module, or to make one without arguments"):
        made = _attribute(name, name.partition(":")[2])
        if not isinstance(made, nn.Module):
            made = _without_memory(made)
    if not isinstance(made, nn.Module):
        raise UsageError(f"expected {name} to be an nn.Module or to return one, got {made!r}.")
    sizes = sizes_of(made)
    if not sizes:
        raise UsageError(f"expected {name} to have trainable params, got none.")
    # A placeholder model, because closed forms take only `sizes`, and case_of() replaces it.
    scenario = Scenario(schema=1, name=name, model=ModelSpec(name="mlp"))
    return Model(sizes=sizes, scenario=scenario, imported=True)


@contextmanager
def case_of(model: Model) -> Iterator[Scenario]:
    """Yield a scenario that trains a model on all world ranks, valid within the context.

    Raises:
        UsageError: If the user's module comes without `batch` or `loss`.
        ScenarioError: If the scenario is not valid, or too large.
    """
    scenario, models = model.scenario, {}
    own = _own_model(model)
    if own is not None:
        models = {_MEASURED: own}
        dtypes = {size.dtype for size in model.sizes}
        # With several dtypes use fp32, which casts no param.
        dtype = _DTYPES.get(dtypes.pop(), "fp32") if len(dtypes) == 1 else "fp32"
        scenario = replace(scenario, model=ModelSpec(name=_MEASURED, dtype=dtype))
    # `model` counts a single dp-cp group, but the world contains all of them.
    parts = scenario.topology.tp * scenario.topology.pp
    scenario = replace(scenario, world=replace(scenario.world, size=scenario.world.size * parts))
    # The name is only known in this context, so that no fuzzer draws it afterwards.
    with known_while(models):
        problems = check_scenario(scenario)
        if problems:
            raise ScenarioError(scenario.name, problems)
        yield scenario


def _own_model(model: Model) -> OwnModel | None:
    """Return the workload for a counted or imported model; None for a scenario's model."""
    if model.counted:
        elems = [size.elems for size in model.laid_out()]
        return OwnModel(build=partial(_chain, elems), batch=_zeros, loss=_mean)
    if not model.imported:
        return None
    name = model.scenario.name
    functions: dict[str, Any] = {}
    for each, form in _FUNCTIONS.items():
        try:
            functions[each] = _attribute(name, each)
        except UsageError:
            # Only --measure requires these functions, because closed forms do not need them.
            module = name.partition(":")[0]
            raise UsageError(
                f"expected functions {' and '.join(_FUNCTIONS.values())} in module {module!r} "
                f"with --measure, got no {each}. Write {form} beside {name.partition(':')[2]!r}."
            ) from None
    return OwnModel(build=partial(_fresh, name), **functions)


def _attribute(name: str, attribute: str) -> Any:
    described = f"the model {name}"
    return attribute_of(
        import_module(name, described=described, form=_NAME), attribute, described=described
    )


def _fresh(name: str) -> nn.Module:
    # Copy an existing module, because each rank trains its own.
    made = _attribute(name, name.partition(":")[2])
    return copy.deepcopy(made) if isinstance(made, nn.Module) else made()


class _Link(nn.Module):
    """A module with one param, in a chain."""

    # A sum, because its derivative needs no tensor, so autograd saves no activations.
    def __init__(self, elems: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elems))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, [rows], plus the param's sum."""
        return x + self.weight.sum()


def _chain(elems: list[int]) -> nn.Module:
    return nn.Sequential(*map(_Link, elems))


# Zeros, because memory and calls do not depend on values.
def _zeros(generator: torch.Generator, rows: int) -> Tensor:
    return torch.zeros(rows)


def _mean(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).mean()


def _without_memory(make: Callable[[], object]) -> object:
    # On the meta device, because closed forms only need sizes, and the model may not fit.
    with torch.device("meta"):
        return make()
