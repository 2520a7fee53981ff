"""The registry of workloads, by the name of a model in a scenario."""

from __future__ import annotations

from typing import assert_never

from zero_sim.scenario.spec import Scenario
from zero_sim.workloads.digits import DigitsWorkload
from zero_sim.workloads.fp8 import Fp8Workload
from zero_sim.workloads.lattice import BitHashWorkload, LatticeWorkload
from zero_sim.workloads.mlp import MlpWorkload
from zero_sim.workloads.moe import MoeWorkload
from zero_sim.workloads.params import ParamsWorkload
from zero_sim.workloads.protocol import Workload
from zero_sim.workloads.ternary import TernaryWorkload
from zero_sim.workloads.tp_block import TpBlockWorkload
from zero_sim.workloads.transformer import TransformerWorkload
from zero_sim.workloads.unusual import UnusualWorkload


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
        case "lattice":
            return LatticeWorkload(scenario)
        case "bit-hash":
            return BitHashWorkload(scenario)
        case "ternary":
            return TernaryWorkload(scenario)
        case "tp-block":
            return TpBlockWorkload(scenario)
        case unknown:
            assert_never(unknown)
