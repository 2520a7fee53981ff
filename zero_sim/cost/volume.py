"""Volume of communication: closed forms of the textbook's ZeRO against the calls of a step.

A stage that reduces more than it has to, gathers twice or sends elements that belong to nobody has
the right numbers and the wrong cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_sim.cost.calls import calls_of_step
from zero_sim.cost.forms import Call, ParamSize, in_words
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario

if TYPE_CHECKING:
    from zero_sim.sim import CollectiveRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """The stretch of the event log in which one rank took one step."""

    rank: int
    """Rank in its dp-cp group."""
    world_rank: int
    step: int
    start: int
    stop: int
    """Half-open range of `EventLog.collectives`."""
    skipped: bool
    looked: tuple[tuple[int, int], ...] = ()
    """Stretches of it in which the rank only showed the judge what it holds."""

    def records(self, log: Sequence[CollectiveRecord]) -> Iterator[CollectiveRecord]:
        """What the rank called in the step."""
        for index in range(self.start, self.stop):
            record = log[index]
            is_own = record.rank == self.world_rank and record.kind != "barrier"
            if is_own and not any(start <= index < stop for start, stop in self.looked):
                yield record


def check_volume(
    records: Sequence[CollectiveRecord],
    windows: Sequence[StepWindow],
    *,
    sizes: Mapping[int, Sequence[ParamSize]],
    scenario: Scenario,
) -> Iterator[Finding]:
    """Check kind, group size and elements of every call of every step.

    Args:
        records: All calls of the world.
        windows: Where the steps of one dp-cp group lie among them.
        sizes: What each of its ranks trains, by rank.
        scenario: The case as that group sees it.
    """
    forms: dict[tuple[int, bool], Counter[Call]] = {}
    for window in windows:
        key = (window.rank, window.skipped)
        if key not in forms:
            forms[key] = calls_of_step(
                sizes[window.rank], scenario=scenario, rank=window.rank, skipped=window.skipped
            )
        made: Counter[Call] = Counter(
            (record.kind, len(record.group_ranks), record.elems)
            for record in window.records(records)
        )
        if made != forms[key]:
            yield Finding(
                check=Check.INVARIANT_VOLUME,
                step=window.step,
                rank=window.world_rank,
                message="this rank's collectives of the step are not those of the closed form: "
                f"{_difference(made, forms[key])}",
            )
            return


def _difference(made: Counter[Call], owed: Counter[Call]) -> str:
    parts = [f"{_listed(made - owed)} too many" if made - owed else ""]
    parts.append(f"{_listed(owed - made)} missing" if owed - made else "")
    return "; ".join(part for part in parts if part)


def _listed(calls: Counter[Call]) -> str:
    return ", ".join(f"{count} x {in_words(call)}" for call, count in sorted(calls.items()))
