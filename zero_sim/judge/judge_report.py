"""A judge's report of one run: plain data, to send between processes and to merge.

If each rank is a process, each has a judge. All judges have the same oracle or digests of its
steps, so their reports agree about the oracle. About the ranks, they add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from zero_sim.findings.dataflow import sort_and_merge
from zero_sim.findings.records import Finding
from zero_sim.judge.copies import Copy, compare_copies
from zero_sim.judge.grad_stats import PartStats, ReportedStats, check_measures
from zero_sim.judge.guarantee import Guarantee, Width
from zero_sim.judge.rules_tried import RulesTried, rules_together, with_rules


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDigests:
    """Digests of ranks' reports, for sums in an unknown order, which no reference can predict.

    Judges in separate processes send these digests. They are compared once all have arrived.
    """

    copies: tuple[Copy, ...] = ()
    """Hashes of tensors that ranks in other processes must have too."""
    part_stats: tuple[PartStats, ...] = ()
    """Contribution of each owned part to norm and zeros."""
    reported: tuple[ReportedStats, ...] = ()

    def check(self) -> Iterator[Finding]:
        """Yield a finding for each disagreement, with world ranks."""
        yield from compare_copies(self.copies)
        yield from check_measures(self.part_stats, self.reported)

    @classmethod
    def together(cls, parts: Sequence[RankDigests]) -> RankDigests:
        """Merge the digests of several judges."""
        return cls(
            copies=tuple(dict.fromkeys(copy for part in parts for copy in part.copies)),
            part_stats=tuple(stats for part in parts for stats in part.part_stats),
            reported=tuple(dict.fromkeys(claimed for part in parts for claimed in part.reported)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeReport:
    """A judge's report on one group in one segment."""

    world_ranks: tuple[int, ...]
    first_step: int
    has_started: bool
    """True if every rank has built its engine."""
    compared_elems: int
    nonzero_fraction_max: float
    """Largest share of nonzero gradient elements in any step."""
    same_data: bool
    """True if all ranks had the same data in every step."""
    has_stepped: bool
    """True if any step updated params on finite gradients."""
    uncertified_step: int | None
    """First step whose update cannot be predicted, for example because its norm may round either
    way. Nothing after it is judged."""
    unobserved: frozenset[str]
    """Items that the engine does not report."""
    guarantees: Counter[Guarantee]
    """Reduced gradient elements over all steps, by guarantee."""
    width: Width = field(default_factory=Width)
    """Width of the bounds, with an unknown order."""
    unfollowed: str = ""
    """Reason for `uncertified_step`; empty if it is the norm."""
    digests: RankDigests = field(default_factory=RankDigests)
    """Digests of ranks' reports, with an unknown order."""
    rules: RulesTried | None = None
    """Result of trying other rules on the bad step; None if no rules were tried."""
    bad_step: int | None
    """First step with a finding."""
    findings: tuple[Finding, ...]
    """All findings of this step, not merged."""

    def merged(self) -> tuple[Finding, ...]:
        """Return one finding per check, in dataflow order."""
        return with_rules(sort_and_merge(self.findings), self.rules)


def merge_judge_reports(parts: Sequence[JudgeReport]) -> JudgeReport:
    """Merge reports of judges that observed different ranks of a group.

    Args:
        parts: At least one report, all on the same group and segment.
    """
    bad = min((part.bad_step for part in parts if part.bad_step is not None), default=None)
    # Findings without a rank are in every report, so remove duplicates.
    found = dict.fromkeys(finding for part in parts for finding in part.findings)
    merged = replace(
        # Start with the judge that got furthest, because a failed rank has observed less.
        max(parts, key=lambda part: part.guarantees.total()),
        has_started=all(part.has_started for part in parts),
        compared_elems=sum(part.compared_elems for part in parts),
        unobserved=frozenset[str]().union(*(part.unobserved for part in parts)),
        unfollowed=next((part.unfollowed for part in parts if part.unfollowed), ""),
        digests=RankDigests.together([part.digests for part in parts]),
        # Rules must fit all ranks, but rules tried on a later step explain nothing.
        rules=rules_together([part.rules if part.bad_step == bad else None for part in parts]),
        bad_step=bad,
        findings=tuple(found),
    )
    return with_digests(merged)


def with_digests(judged: JudgeReport) -> JudgeReport:
    """Compare a report's digests, add the findings, and reduce all to the first bad step."""
    compared = tuple(judged.digests.check())
    steps = [judged.bad_step, *(finding.step for finding in compared)]
    bad = min((step for step in steps if step is not None), default=None)
    found = (*judged.findings, *compared)
    # Later steps start from wrong state, so their findings are consequences.
    return replace(
        judged,
        bad_step=bad,
        findings=tuple(finding for finding in found if finding.step in (None, bad)),
    )
