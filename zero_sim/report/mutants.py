"""The mutation score as text: a line per mutant, then totals by class and by flag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.mutants.records import HuntResult, Mutant
    from zero_sim.mutants.score import KillCount, Score


def render_hunt(result: HuntResult, mutant: Mutant) -> str:
    """Return a mutant's line, followed by its description if it survived."""
    # Capitals for what needs attention: a check or a case is missing.
    verdict = "killed" if result.killed else "ERROR" if result.error else "SURVIVED"
    by = f" by {result.check}" if result.killed else ""
    size = "" if result.size is None else f", shrunk to {result.size}"
    if result.minimum is not None and result.minimum != result.size:
        size += f" (on record: {result.minimum})"
    judged = f" ({result.judged} judged)" if result.judged != result.cases else ""
    cost = f"{result.cases} case{'s' if result.cases != 1 else ''}{judged}, {result.seconds:.1f} s"
    head = f"{result.id:<5} {mutant.kind:<7} {verdict}{by} after {cost}{size}"
    if result.killed:
        return head
    why = "".join(f"\n      {printable(line)}" for line in result.error.splitlines())
    # If a mutant's code never ran, the gap is in the cases, not in the checks.
    unarmed = "" if result.armed else " (its code never ran)"
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
