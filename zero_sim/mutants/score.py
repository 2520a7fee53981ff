"""The score of a campaign: how many mutants it found, by class, by flag, and of the core set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from zero_sim.mutants.records import CLASSES, FLAGS, Mutant, Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class KillCount:
    """Mutants found, of how many."""

    name: str
    killed: int
    of: int

    def __str__(self) -> str:
        return f"{self.killed} of {self.of}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What a campaign came to."""

    core: KillCount
    all: KillCount
    by_class: tuple[KillCount, ...]
    """Of classes with mutants in the campaign."""
    by_flag: tuple[KillCount, ...]
    cases_median: float
    """Cases to the kill, over those found; 0 where none was."""
    cases_most: int
    seconds: float
    """Of the whole campaign, as a clock shows them."""
    trials: tuple[Trial, ...]

    @property
    def exit_status(self) -> int:
        """0 where every mutant was found, else 1."""
        return int(self.all.killed < self.all.of)

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return {**dataclasses.asdict(self), "exit_status": self.exit_status}


def score_of(trials: Iterable[Trial], mutants: Sequence[Mutant], *, seconds: float) -> Score:
    """Sum up a campaign.

    Args:
        trials: What became of each mutant.
        mutants: Those that were hunted.
        seconds: How long it took.
    """
    by_id = {trial.id: trial for trial in trials}
    ordered = tuple(by_id[mutant.id] for mutant in mutants if mutant.id in by_id)

    def count(name: str, members: Iterable[Mutant]) -> KillCount:
        found = [by_id[one.id].killed for one in members if one.id in by_id]
        return KillCount(name=name, killed=sum(found), of=len(found))

    by_class = (count(kind, (m for m in mutants if m.kind == kind)) for kind in CLASSES)
    by_flag = (count(flag, (m for m in mutants if flag in m.flags)) for flag in FLAGS)
    cases = [trial.cases for trial in ordered if trial.killed]
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
