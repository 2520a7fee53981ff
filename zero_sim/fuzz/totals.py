"""Totals of a campaign for reports and progress lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from zero_sim.errors import ZeroSimError
from zero_sim.fuzz.corpus import Kept
from zero_sim.fuzz.coverage import Coverage
from zero_sim.fuzz.known import Rechecked
from zero_sim.fuzz.records import BatchReport, Counts, Found

# Fields of a finding to report beside its key.
_SHOWN = ("message", "bundle", "seed", "case", "size", "scenario")


@dataclass(kw_only=True, slots=True)
class CampaignTotals:
    """Results of a campaign so far, including earlier runs."""

    counts: Counts = field(default_factory=Counts)
    batches: int = 0
    earlier_cases: int = 0
    """Number of cases judged in earlier runs."""
    found: list[Found] = field(default_factory=list)
    """Distinct findings in order of discovery."""
    coverage: Coverage = field(default_factory=Coverage)
    lost: list[BatchReport] = field(default_factory=list)
    """Reports of batches whose worker died."""
    rechecked: list[Rechecked] = field(default_factory=list)
    """Earlier findings, judged again."""
    interrupted: bool = False
    unkept: ZeroSimError | None = None
    """Error that prevented saving results and ended the campaign; None if there was no error."""
    futile: str = ""
    """Reason why further cases are useless, which ended the campaign; empty otherwise."""

    @property
    def is_empty(self) -> bool:
        """True if this run judged no case."""
        return self.counts.cases == self.earlier_cases and not self.lost

    def take(self, report: BatchReport) -> None:
        """Add a batch's results."""
        self.note(report.found)
        if report.lost:
            self.lost.append(report)
        self.batches += 1
        self.counts.add(report.counts)
        self.coverage.take(report.cases_with, cases=report.counts.cases)
        # The campaign is not futile if any batch has a verdict other than an error.
        is_futile = set(self.counts.verdicts) <= {"error"}
        self.futile = (report.futile or self.futile) if is_futile else ""

    def take_all(self, kept: Kept) -> None:
        """Add the content of a joined corpus."""
        for report, counts in kept.counted():
            if counts or report.lost:
                self.take(report)
        self.note(kept.found.values())

    def cases_with(self, found: Found) -> int:
        """Return the number of cases with a finding. Similar findings may share cases."""
        return sum(count for key, count in self.counts.keys.items() if found.is_met_by(key))

    def note(self, found: Iterable[Found]) -> None:
        """Add findings; merge findings with the same smallest case.

        A shrunk finding replaces unshrunk findings of its kind.
        """
        for one in found:
            # Findings of the same kind: their keys are equal without the place.
            alike = [known for known in self.found if known.key[:-1] == one.key[:-1]]
            # An unshrunk finding adds nothing if there is a finding of its kind.
            if one.as_met and alike:
                continue
            self.found = [known for known in self.found if not (known.as_met and known in alike)]
            # If two cases shrank to the same case, they are one finding with the places of both.
            places = [i for i, known in enumerate(self.found) if known.is_of == one.is_of]
            if places:
                self.found[places[0]] = self.found[places[0]].joined(one)
            else:
                self.found.append(one)

    def progress(self, *, seconds: float) -> str:
        """Return a progress line: speed, findings, coverage.

        Args:
            seconds: Time since the start of this run.
        """
        rate = (self.counts.cases - self.earlier_cases) / seconds if seconds > 0 else 0.0
        outlook = self.coverage.outlook
        new = "" if outlook is None else f", new ones in {outlook.new_share:.0%} of cases"
        return (
            f"{self.counts.cases} cases, {rate:.1f} a second, {len(self.found)} distinct "
            f"finding{'' if len(self.found) == 1 else 's'}, "
            f"{len(self.coverage.features)} features, {len(self.coverage.pairs)} pairs{new}"
        )

    def as_dict(self) -> dict[str, object]:
        """Return all totals for JSON."""
        counts = self.counts
        return {
            "cases": counts.cases,
            "earlier_cases": self.earlier_cases,
            "batches": self.batches,
            "busy_seconds": counts.seconds,
            "verdicts": dict(counts.verdicts),
            "params_only": counts.params_only,
            "failing_cases": dict(counts.keys),
            "inconclusive_cases": dict(counts.unproved),
            "unobserved": dict(counts.unobserved),
            "taken": sorted(counts.taken),
            "findings": [
                found.key._asdict() | {name: getattr(found, name) for name in _SHOWN}
                for found in self.found
            ],
            "coverage": self.coverage.as_dict(),
            "lost": [{"index": one.index, "seed": one.seed, "why": one.lost} for one in self.lost],
            "rechecked": [one.as_dict() for one in self.rechecked],
            "interrupted": self.interrupted,
            "unkept": None if self.unkept is None else str(self.unkept),
            "futile": self.futile,
        }
