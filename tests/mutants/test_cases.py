"""Cases of a campaign say nothing of params that their model does not train."""

from __future__ import annotations

from itertools import islice

from zero_sim.fuzz.drawing import draws
from zero_sim.mutants.cases import campaign_cases
from zero_sim.reference.ranks import Ranks
from zero_sim.run.cells import cells_of
from zero_sim.workloads import build_workload


def test_names_are_those_of_params_that_the_reference_trains():
    cases = list(islice(draws(campaign_cases(), seed="names"), 300))
    named = [case for case in cases if case.optimizer.groups or case.topology.shared]
    assert {case.model.name for case in named} >= {"params", "mlp", "moe"}
    for case in named:
        for cell in cells_of(case):
            Ranks(cell.scenario, workload=build_workload(cell.scenario))
