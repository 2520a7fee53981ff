"""Judging of single cases on simulated ranks, with explained differences.

`run` and `judge` import no explanations. They take an explainer's name, and load it after the first
difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from zero_sim.backends.worlds import WorldPool
from zero_sim.findings.records import CaseResult
from zero_sim.judge.trajectory import Trajectories
from zero_sim.run.runner import judge_simulated
from zero_sim.run.simulated import Simulated
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Target

EXPLAINER = "zero_sim.rules.explainer:Explainer"
"""Name of the explainer, to pass on when a judge is opened."""


def run_case(
    scenario: Scenario,
    *,
    pool: WorldPool | None = None,
    target: Target | None = None,
    turns: Sequence[Sequence[int]] = (),
    keep_logs: bool = False,
    device: str = "cpu",
    trajectories: Trajectories | None = None,
    with_digest: bool = True,
) -> CaseResult:
    """Judge a case on simulated ranks by comparing all state with the reference after every step.

    Args:
        scenario: A validated case.
        pool: Worlds to reuse; None to create a world only for this case.
        target: System under test; None for the registered target that the scenario names.
        turns: Turns to repeat from an earlier run, one sequence per world. If they are not
            possible, the case continues without them and a note reports this.
        keep_logs: True to return the event logs even if the case does not fail.
        device: torch device for all ranks and the reference.
        trajectories: Reference steps from earlier cases in a family. They do not change the result.
        with_digest: True to return a digest of the event logs, which costs a few percent in a small
            case.

    Returns:
        The verdict with its findings, as for `zero_sim.run.runner.judge_case`.

    Raises:
        EnvironmentProblem: The case needs something that this machine lacks.
    """
    # A given pool stays open.
    with WorldPool() if pool is None else nullcontext(pool) as worlds:
        backend = Simulated(
            worlds=worlds,
            target=target,
            turns=turns,
            device=device,
            trajectories=trajectories,
            explainer=EXPLAINER,
        )
        return judge_simulated(scenario, backend, keep_logs=keep_logs, with_digest=with_digest)
