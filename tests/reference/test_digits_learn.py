"""Training on handwritten digits: the reference's sums, division and optimizer learn them."""

from __future__ import annotations

import pytest

from zero_sim.reference import Reference
from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    WorldSpec,
)
from zero_sim.workloads import build_workload


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_four_ranks_exceed_95_percent(dtype):
    """120 steps of AdamW, 4 ranks x 32 rows, 64 hidden units."""
    pytest.importorskip("sklearn")
    scenario = Scenario(
        schema=1,
        model=ModelSpec(name="digits", hidden=64, dtype=dtype),
        data=DataSpec(rows=32),
        world=WorldSpec(size=4),
        optimizer=OptimizerSpec(name="adamw", lr=0.01),
        run=RunSpec(steps=120),
    )
    workload = build_workload(scenario)
    reference = Reference(scenario, workload=workload)
    module = workload.build()
    for _ in range(scenario.run.steps):
        result = reference.step()
    module.load_state_dict(dict(result.params))
    assert workload.accuracy(module) > 0.95
