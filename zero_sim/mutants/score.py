"""Score of a campaign: mutants found in total, by class, by flag, and among core mutants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from zero_sim.mutants.records import CLASSES, FLAGS, HuntResult, Mutant


@dataclass(frozen=True, kw_only=True, slots=True)
class KillCount:
    """Number of mutants found, out of a total."""

    name: str
    killed: int
    of: int

    def __str__(self) -> str:
        return f"{self.killed} of {self.of}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Result of a campaign."""

    core: KillCount
    all: KillCount
    by_class: tuple[KillCount, ...]
    """Counts by class, for classes in the campaign."""
    by_flag: tuple[KillCount, ...]
    cases_median: float
    """Median number of cases until a mutant was found; 0 if no mutant was found."""
    cases_most: int
    seconds: float
    """Wall-clock time of the campaign."""
    trials: tuple[HuntResult, ...]

    @property
    def exit_status(self) -> int:
        """0 if every mutant was found, else 1."""
        return int(self.all.killed < self.all.of)

    def as_dict(self) -> dict[str, object]:
        """Return all fields for JSON."""
        return {**dataclasses.asdict(self), "exit_status": self.exit_status}


def score_of(trials: Iterable[HuntResult], mutants: Sequence[Mutant], *, seconds: float) -> Score:
    """Compute the score of a campaign.

    Args:
        trials: Results of the hunts.
        mutants: Hunted mutants.
        seconds: Wall-clock time of the campaign.
    """
    by_id = {result.id: result for result in trials}
    # In catalogue order, because parallel trials end in any order.
    ordered = tuple(by_id[mutant.id] for mutant in mutants if mutant.id in by_id)

    def count(name: str, members: Iterable[Mutant]) -> KillCount:
        found = [by_id[one.id].killed for one in members if one.id in by_id]
        return KillCount(name=name, killed=sum(found), of=len(found))

    by_class = (count(kind, (m for m in mutants if m.kind == kind)) for kind in CLASSES)
    by_flag = (count(flag, (m for m in mutants if flag in m.flags)) for flag in FLAGS)
    cases = [result.cases for result in ordered if result.killed]
    return Score(
        core=count("core", (mutant for mutant in mutants if mutant.core)),
        all=count("all", mutants),
        by_class=tuple(each for each in by_class if each.of),
        by_flag=tuple(each for each in by_flag if each.of),
        cases_median=median(cases) if cases else 0,
        cases_most=max(cases, default=0),
        seconds=seconds,
        trials=ordered,
    )
