"""The way in to judge a case on simulated ranks, with explanations of what differs.

Rooms of the road import no explanations. They take the name of an explainer, which is loaded once
something differs.
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
"""Name of the explainer, for whatever opens a judge."""


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
        pool: Worlds to reuse; without one, a world is made for this case and closed after it.
        target: The system under test; without one, the registered target that the scenario names.
        turns: The turns of an earlier run to repeat, one sequence a world; where they cannot be
            taken, the case goes on without them and a note says so.
        keep_logs: Whether the result carries its event logs even if the case does not fail.
        device: Where all ranks and the reference compute: any device that torch knows.
        trajectories: What references of cases before it took, where it is one of a family; what is
            found does not depend on them.
        with_digest: Whether the result carries the digest of the event logs, which takes a few
            percent of a small case.

    Returns:
        The verdict with its findings; what each means is as for `zero_sim.run.runner.judge_case`.

    Raises:
        EnvironmentProblem: This machine lacks something that the case needs.
    """
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
