"""The mutation score as text: a line per mutant, then totals by class and by flag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.mutants.records import Mutant, Trial
    from zero_sim.mutants.score import KillCount, Score


def render_trial(trial: Trial, mutant: Mutant) -> str:
    """Return a mutant's line, followed by its description if it survived."""
    # Capitals for what needs attention: a check or a case is missing.
    verdict = "killed" if trial.killed else "ERROR" if trial.error else "SURVIVED"
    by = f" by {trial.check}" if trial.killed else ""
    size = "" if trial.size is None else f", shrunk to {trial.size}"
    if trial.minimum is not None and trial.minimum != trial.size:
        size += f" (on record: {trial.minimum})"
    judged = f" ({trial.judged} judged)" if trial.judged != trial.cases else ""
    cost = f"{trial.cases} case{'s' if trial.cases != 1 else ''}{judged}, {trial.seconds:.1f} s"
    head = f"{trial.id:<5} {mutant.kind:<7} {verdict}{by} after {cost}{size}"
    if trial.killed:
        return head
    why = "".join(f"\n      {printable(line)}" for line in trial.error.splitlines())
    # If a mutant's code never ran, the gap is in the cases, not in the checks.
    unarmed = "" if trial.armed else " (its code never ran)"
    return f"{head}{unarmed}\n      {mutant.description} [{mutant.seen_in}]{why}"


def render_score(score: Score) -> str:
    """Return the score, with the total last."""
    return "\n".join(
        [
            "",
            "by class  " + _in_a_row(score.by_class),
            "by flag   " + _in_a_row(score.by_flag),
            f"cases to a kill: median {score.cases_median:g}, most {score.cases_most}",
            f"core set: {score.core} killed" if score.core.of else "core set: not tried",
            f"{score.all} mutants killed in {score.seconds:.1f} s",
        ]
    )


def _in_a_row(kill_counts: Sequence[KillCount]) -> str:
    return "  ".join(f"{kills.name} {kills.killed}/{kills.of}" for kills in kill_counts)
