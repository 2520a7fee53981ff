"""Digests of what ranks showed where no reference knows the sums; compared once all are there.

Where each rank is judged in a process of its own, this is what judges have to tell each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zero_sim.findings.records import Finding
from zero_sim.judge.copies import Copy, compare_copies
from zero_sim.judge.grad_stats import PartStats, ReportedStats, check_measures


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDigests:
    """What some ranks showed, of all steps."""

    copies: tuple[Copy, ...] = ()
    """What they hold that others, judged elsewhere, hold too."""
    part_stats: tuple[PartStats, ...] = ()
    """What the parts that they own add to the measure of the gradient."""
    reported: tuple[ReportedStats, ...] = ()
    """What they say of that measure."""

    def check(self) -> Iterator[Finding]:
        """Give a finding for each thing that does not agree; ranks are the world's."""
        yield from compare_copies(self.copies)
        yield from check_measures(self.part_stats, self.reported)

    @classmethod
    def together(cls, parts: Sequence[RankDigests]) -> RankDigests:
        """What several judges were shown."""
        return cls(
            copies=tuple(dict.fromkeys(copy for part in parts for copy in part.copies)),
            part_stats=tuple(stats for part in parts for stats in part.part_stats),
            reported=tuple(dict.fromkeys(claimed for part in parts for claimed in part.reported)),
        )
