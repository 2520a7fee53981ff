"""The registry of workloads, by the name of a model in a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module

from zero_sim.scenario.kinds import is_own_model
from zero_sim.scenario.spec import AnyModelName, ModelSpec, RunSpec, Scenario
from zero_sim.workloads.own_model import OwnModel, OwnWorkload, own_model
from zero_sim.workloads.protocol import Workload

_MODELS_KEPT = 512

# Modules by name: a case imports the workload that it names, and no other.
_WORKLOADS: Mapping[AnyModelName, tuple[str, str]] = {
    "mlp": ("zero_sim.workloads.mlp", "MlpWorkload"),
    "params": ("zero_sim.workloads.params", "ParamsWorkload"),
    "transformer-260": ("zero_sim.workloads.transformer", "TransformerWorkload"),
    "digits": ("zero_sim.workloads.digits", "DigitsWorkload"),
    "unusual": ("zero_sim.workloads.unusual", "UnusualWorkload"),
    "moe": ("zero_sim.workloads.moe", "MoeWorkload"),
    "fp8": ("zero_sim.workloads.fp8", "Fp8Workload"),
    "bit-hash": ("zero_sim.workloads.bit_hash", "BitHashWorkload"),
    "ternary": ("zero_sim.workloads.ternary", "TernaryWorkload"),
    "positional": ("zero_sim.workloads.positional", "PositionalWorkload"),
    "gpt": ("zero_sim.workloads.gpt", "GptWorkload"),
    "multi-token": ("zero_sim.workloads.multi_token", "MultiTokenWorkload"),
    "tp-block": ("zero_sim.workloads.tp_block", "TpBlockWorkload"),
}
"""Module and class by the name of a model."""


def build_workload(scenario: Scenario) -> Workload:
    """Build the workload that the scenario names: its initial weights are drawn here, once.

    Args:
        scenario: A scenario that passed its rules.

    Raises:
        EnvironmentProblem: The workload needs an optional package that is not installed.
        UsageError: The model is a target's own, which no target has brought, or is not pure.
    """
    model = scenario.model.name
    if is_own_model(model):
        return OwnWorkload(scenario, own_model(model))
    module, name = _WORKLOADS[model]
    workload = getattr(import_module(module), name)(scenario)
    if scenario.model.buffer == "none":
        return workload
    from zero_sim.workloads.gained import GainedWorkload

    return GainedWorkload(workload, scenario)


def params_of(model: ModelSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of a model's params, those of all ranks, in registration order."""
    if model.shapes is not None:
        return tuple(
            (f"m{index}.p{index}" if model.nested else f"p{index}", shape)
            for index, shape in enumerate(model.shapes)
        )
    # Neither when it is frozen nor which bits it starts from adds a param.
    own = own_model(model.name) if is_own_model(model.name) else None
    return _built(replace(model, freeze=()), own)


@lru_cache(maxsize=_MODELS_KEPT)
def _built(model: ModelSpec, own: OwnModel | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes; another model may come under the name of `own`."""
    module = build_workload(Scenario(schema=1, model=model, run=RunSpec(steps=1))).build()
    return tuple((name, tuple(param.shape)) for name, param in module.named_parameters())
