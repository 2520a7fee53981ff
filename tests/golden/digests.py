"""Digests of all masters after each step of the ternary net under dyadic SGD.

The learning rate is a power of two, so every computed number is exact and the digests hold on
every processor. Run as a script, it prints this machine's digests as JSON.
"""

import hashlib
import json
import sys

from zero_sim.reference import Reference
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.workloads import build_workload

STEPS = 6
CASES = {
    "bf16, 3 ranks, 2 micro-batches": ("bf16", 3, 2),
    "bf16, 8 ranks": ("bf16", 8, 1),
    "fp32, 5 ranks, 2 micro-batches": ("fp32", 5, 2),
}


def digests(dtype, ranks, micros):
    scenario = Scenario(
        schema=1,
        model=ModelSpec(name="ternary", dtype=dtype, hidden=16),
        world=WorldSpec(size=ranks),
        system=SystemSpec(divide="none"),
        optimizer=OptimizerSpec(name="sgd", lr=2.0**-4),
        run=RunSpec(steps=STEPS, micro_batches=micros, seed=1),
    )
    reference = Reference(scenario, workload=build_workload(scenario))
    seen = []
    for _ in range(STEPS):
        taken = reference.step()
        state = hashlib.sha256()
        for name, master in taken.masters.items():
            state.update(name.encode() + master.numpy().tobytes())
        seen.append(state.hexdigest()[:16])
    return seen


def all_digests():
    return {name: digests(*case) for name, case in CASES.items()}


if __name__ == "__main__":
    json.dump(all_digests(), sys.stdout, indent=2)
