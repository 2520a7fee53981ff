"""Workloads by a scenario's model name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module

from zero_sim.scenario.kinds import is_own_model
from zero_sim.scenario.spec import AnyModelName, ModelSpec, RunSpec, Scenario
from zero_sim.workloads.own_model import OwnModel, OwnWorkload, own_model
from zero_sim.workloads.protocol import Workload

# Models whose params are remembered.
_MODELS_KEPT = 512

# Module and class by model name. Imported by name, so that a case only imports its own workload.
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


def build_workload(scenario: Scenario) -> Workload:
    """Build a scenario's workload, and draw its initial weights.

    Raises:
        EnvironmentProblem: The workload needs an optional package that is not installed.
        UsageError: The model is a target's own, but is not registered or not pure.
    """
    model = scenario.model.name
    if is_own_model(model):
        return OwnWorkload(scenario, own_model(model))
    module, name = _WORKLOADS[model]
    workload = getattr(import_module(module), name)(scenario)
    if scenario.model.buffer == "none":
        return workload
    # Imported here, because few cases have such a buffer.
    from zero_sim.workloads.gained import GainedWorkload

    return GainedWorkload(workload, scenario)


def params_of(model: ModelSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return names and shapes of all ranks' params, in registration order."""
    # Bare params have their shapes in the scenario.
    if model.shapes is not None:
        return tuple(
            (f"m{index}.p{index}" if model.nested else f"p{index}", shape)
            for index, shape in enumerate(model.shapes)
        )
    # Freezing and initial bits do not change the params.
    own = own_model(model.name) if is_own_model(model.name) else None
    return _built(replace(model, freeze=()), own)


@lru_cache(maxsize=_MODELS_KEPT)
def _built(model: ModelSpec, own: OwnModel | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return names and shapes. `own` is in the cache key, because names can be registered anew."""
    # A minimal scenario, because params only depend on the model.
    module = build_workload(Scenario(schema=1, model=model, run=RunSpec(steps=1))).build()
    return tuple((name, tuple(param.shape)) for name, param in module.named_parameters())
