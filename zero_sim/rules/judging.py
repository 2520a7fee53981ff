"""Judging of single cases on simulated ranks, with explanations of differences.

`run` and `judge` import no explanations. They take the name of an explainer, and load it after the
first difference.
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
"""Name of the explainer, to pass on when opening a judge."""


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
    """Judge one case on simulated ranks: compare all state with the reference after every step.

    Args:
        scenario: A validated case.
        pool: Worlds to reuse; None to create a world for this case only.
        target: System under test; None for the registered target that the scenario names.
        turns: Turns of an earlier run to repeat, one sequence per world. If they are not possible,
            the case continues without them and a note reports it.
        keep_logs: True to return the event logs even if the case does not fail.
        device: Device of all ranks and of the reference: any device of torch.
        trajectories: Reference steps of earlier cases of a family. They do not change the result.
        with_digest: True to return the digest of the event logs, which costs a few percent of a
            small case.

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
