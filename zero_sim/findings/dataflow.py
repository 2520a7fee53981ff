"""The way of an error through a step, and findings put in that order.

What is wrong first makes wrong what is computed from it: a gradient its norm, the norm what is
clipped by it, the state of the optimizer a master, a master the working param. Look at the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum

from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check


class Phase(StrEnum):
    """A phase of a step. What goes wrong in one makes wrong what the later ones compute."""

    LOAD = "load"
    """Before the first step, of a case that is reloaded."""
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    NORM = "norm"
    OPTIMIZER = "optimizer"
    WRITE_BACK = "write-back"
    GATHER = "gather"


_FLOW: tuple[tuple[Phase, tuple[Check, ...]], ...] = (
    (Phase.LOAD, (Check.EQUALITY_LOAD,)),
    (
        Phase.FORWARD,
        (
            Check.INVARIANT_OWNERSHIP,
            Check.INVARIANT_START,
            Check.INVARIANT_ZERO_GRADIENTS,
            Check.EQUALITY_PARAMS,
            Check.EQUALITY_LOSS,
        ),
    ),
    (Phase.BACKWARD, ()),
    (Phase.REDUCE, (Check.EQUALITY_GRAD, Check.INVARIANT_REPLICAS, Check.INVARIANT_PADDING)),
    (
        Phase.NORM,
        (
            Check.EQUALITY_NORM,
            Check.INVARIANT_REPLICAS,
            Check.EQUALITY_ZEROS,
            Check.EQUALITY_SKIPPED,
            Check.EQUALITY_LOSS_SCALE,
        ),
    ),
    (Phase.OPTIMIZER, (Check.EQUALITY_LAYOUT, Check.EQUALITY_STATE, Check.EQUALITY_MASTER)),
    (Phase.WRITE_BACK, (Check.EQUALITY_SCALE, Check.INVARIANT_CAST)),
    (
        Phase.GATHER,
        (
            Check.EQUALITY_LAYOUT,
            Check.EQUALITY_PARAMS,
            Check.INVARIANT_REPLICAS,
            Check.INVARIANT_PADDING,
        ),
    ),
)
"""The phases of a step, and within each what is checked, in the order of computation."""

_PHASES: dict[str, int] = {phase: place for place, (phase, _) in enumerate(_FLOW)}
_CHECKS: dict[tuple[str, str], int] = {
    (phase, check): place for phase, checks in _FLOW for place, check in enumerate(checks)
}
_UNKNOWN_CHECK = len(_CHECKS)
_DETAIL_LINES = 12
_KEYED = (Check.EQUALITY_STATE, Check.EQUALITY_LAYOUT, Check.EQUALITY_LOAD)
"""Checks of several things of one param; which of them, the message says."""


def earliest_first(found: Iterable[Finding]) -> list[Finding]:
    """Findings in the order in which an error travels: step, phase, what is checked, rank."""

    def place(finding: Finding) -> tuple[int, int, int, int]:
        phase = finding.phase or ""
        return (
            finding.step or 0,
            _PHASES.get(phase, -1),
            _CHECKS.get((phase, finding.check), _UNKNOWN_CHECK),
            -1 if finding.rank is None else finding.rank,
        )

    return sorted(found, key=place)


def sort_and_merge(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Keep the first finding of each check, in the order in which an error travels.

    The others of the same check are summed up in its `detail`: how much differs on which rank.
    """
    merged: dict[str, list[Finding]] = {}
    for finding in earliest_first(found):
        merged.setdefault(finding.check, []).append(finding)
    return tuple(replace(group[0], detail=_summary(group)) for group in merged.values())


def of_first_step(found: Sequence[Finding]) -> list[Finding]:
    """Findings of the first step in which anything is wrong; what has no step stays."""
    first = min((finding.step for finding in found if finding.step is not None), default=None)
    return [finding for finding in found if finding.step in (None, first)]


def _summary(group: Sequence[Finding]) -> str:
    if len(group) == 1:
        return group[0].detail
    lines = [f"{len(group)} such differences in this step:"]
    for finding in group[:_DETAIL_LINES]:
        places = [] if finding.rank is None else [f"rank {finding.rank}"]
        places += [f"param {finding.param!r}"] if finding.param else []
        count = (
            f": {finding.differ_count} of {finding.compared_count} elements"
            if finding.differ_count
            else ""
        )
        # What differs, without what is known of how.
        what = finding.message.partition(": ")[0]
        key = f" ({what})" if finding.check in _KEYED else ""
        line = f"  {' '.join(places)}{count}{key}"
        # Stretches of one param look alike.
        lines += [line] if places and line not in lines else []
    if len(group) > _DETAIL_LINES:
        lines.append(f"  and {len(group) - _DETAIL_LINES} more")
    if group[0].detail:
        lines.append(group[0].detail)
    return "\n".join(lines)
