"""The registry of workloads, by the name of a model in a scenario."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import assert_never

from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario
from zero_sim.workloads.bit_hash import BitHashWorkload
from zero_sim.workloads.digits import DigitsWorkload
from zero_sim.workloads.fp8 import Fp8Workload
from zero_sim.workloads.mlp import MlpWorkload
from zero_sim.workloads.moe import MoeWorkload
from zero_sim.workloads.params import ParamsWorkload
from zero_sim.workloads.protocol import Workload
from zero_sim.workloads.ternary import TernaryWorkload
from zero_sim.workloads.tp_block import TpBlockWorkload
from zero_sim.workloads.transformer import TransformerWorkload
from zero_sim.workloads.unusual import UnusualWorkload

_MODELS_KEPT = 512


def build_workload(scenario: Scenario) -> Workload:
    """Build the workload that the scenario names: its initial weights are drawn here, once.

    Args:
        scenario: A scenario that passed its rules.

    Raises:
        EnvironmentProblem: The workload needs an optional package that is not installed.
    """
    match scenario.model.name:
        case "mlp":
            return MlpWorkload(scenario)
        case "params":
            return ParamsWorkload(scenario)
        case "transformer-260":
            return TransformerWorkload(scenario)
        case "digits":
            return DigitsWorkload(scenario)
        case "unusual":
            return UnusualWorkload(scenario)
        case "moe":
            return MoeWorkload(scenario)
        case "fp8":
            return Fp8Workload(scenario)
        case "bit-hash":
            return BitHashWorkload(scenario)
        case "ternary":
            return TernaryWorkload(scenario)
        case "tp-block":
            return TpBlockWorkload(scenario)
        case unknown:
            assert_never(unknown)


def params_of(model: ModelSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of a model's params, those of all ranks, in registration order."""
    if model.shapes is not None:
        return tuple((f"p{index}", shape) for index, shape in enumerate(model.shapes))
    # Neither when it is frozen nor which bits it starts from adds a param.
    return _built(replace(model, freeze=()))


@lru_cache(maxsize=_MODELS_KEPT)
def _built(model: ModelSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    module = build_workload(Scenario(schema=1, model=model, run=RunSpec(steps=1))).build()
    return tuple((name, tuple(param.shape)) for name, param in module.named_parameters())
