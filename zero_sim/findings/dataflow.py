"""Sorting of findings along a step's dataflow.

An error propagates from a gradient to the norm, the clipped gradient, optimizer state, the master,
and the working param. So the earliest finding is closest to the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum

from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check


class Phase(StrEnum):
    """A phase of a step. An error in a phase affects all later phases."""

    LOAD = "load"
    """Before the first step after a reload."""
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
            # Before any arithmetic: ownership, start values, cleared gradients.
            Check.INVARIANT_START,
            Check.INVARIANT_ZERO_GRADIENTS,
            Check.EQUALITY_PARAMS,
            Check.EQUALITY_LOSS,
        ),
    ),
    (Phase.BACKWARD, ()),
    # Replicas and padding before the norm, because the norm reads both.
    (Phase.REDUCE, (Check.EQUALITY_GRAD, Check.INVARIANT_REPLICAS, Check.INVARIANT_PADDING)),
    (
        # A check may occur in several phases. The finding's phase selects its position.
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
"""Phases and their checks, in order of computation."""

_PHASES: dict[str, int] = {phase: place for place, (phase, _) in enumerate(_FLOW)}
_CHECKS: dict[tuple[str, str], int] = {
    (phase, check): place for phase, checks in _FLOW for place, check in enumerate(checks)
}
_UNKNOWN_CHECK = len(_CHECKS)
CHECK_ORDER: dict[str, int] = {check: place for place, (_, check) in enumerate(_CHECKS)}
"""Checks of values in order of computation, by their last phase."""
_DETAIL_LINES = 12
_KEYED = (Check.EQUALITY_STATE, Check.EQUALITY_LAYOUT, Check.EQUALITY_LOAD)
"""Checks that compare several tensors per param. Only the message names the tensor."""


def earliest_first(found: Iterable[Finding]) -> list[Finding]:
    """Sort findings by step, phase, check and rank."""

    def place(finding: Finding) -> tuple[int, int, int, int]:
        phase = finding.phase or ""
        # Findings without a phase, such as those about calls, come first.
        return (
            finding.step or 0,
            _PHASES.get(phase, -1),
            _CHECKS.get((phase, finding.check), _UNKNOWN_CHECK),
            -1 if finding.rank is None else finding.rank,
        )

    return sorted(found, key=place)


def sort_and_merge(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Keep the earliest finding of each check, in dataflow order.

    Its `detail` summarises the check's other findings: differing elements by rank.
    """
    merged: dict[str, list[Finding]] = {}
    for finding in earliest_first(found):
        # Dicts keep insertion order, so checks stay in the order of their first findings.
        merged.setdefault(finding.check, []).append(finding)
    return tuple(replace(group[0], detail=_summary(group)) for group in merged.values())


def of_first_step(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings of the first bad step, and those without a step."""
    # Later steps start from wrong state, so their findings are consequences.
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
        # Drop the explanation after the colon.
        what = finding.message.partition(": ")[0]
        key = f" ({what})" if finding.check in _KEYED else ""
        line = f"  {' '.join(places)}{count}{key}"
        # A param with several spans would repeat its line.
        lines += [line] if places and line not in lines else []
    if len(group) > _DETAIL_LINES:
        lines.append(f"  and {len(group) - _DETAIL_LINES} more")
    if group[0].detail:
        lines.append(group[0].detail)
    return "\n".join(lines)
