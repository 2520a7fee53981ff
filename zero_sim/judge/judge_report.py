"""A judge's report of one run, as plain data: it can be sent, and merged with those of others.

Where each rank is a process of its own, each has a judge of its own, with the same oracle or
digests of it. What they say of the oracle is the same; what they say of the ranks adds up.
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
    """Digests of everything that some ranks showed if no reference knows the sums.

    Judges in processes of their own exchange them; they are compared once all are there.
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeReport:
    """What a judge has to say of one group in one segment."""

    world_ranks: tuple[int, ...]
    """The ranks of the group."""
    first_step: int
    has_started: bool
    """Whether every rank has built its engine."""
    compared_elems: int
    nonzero_fraction_max: float
    """Largest share of gradient elements that were not zero in a step."""
    same_data: bool
    """Whether all ranks saw the same data in every step."""
    has_stepped: bool
    """Whether any step was taken, and on finite gradients."""
    uncertified_step: int | None
    """First step whose norm may round either way, so that nothing after clipping is owed."""
    unobserved: frozenset[str]
    """What the engine could tell and does not."""
    owed: Counter[Guarantee]
    """Elements of the reduced gradients of all steps, by why they are owed."""
    width: Width = field(default_factory=Width)
    """How much the bounds allow of those that stand under one."""
    unfollowed: str = ""
    """Why the run could not be followed from some step on, where the order is not known."""
    digests: RankDigests = field(default_factory=RankDigests)
    """What ranks showed of such a run, to be compared when all of it is there."""
    rules: RulesTried | None = None
    """What came of trying other rules on that step, if any would have given other bits."""
    bad_step: int | None
    """First step at which anything is wrong."""
    findings: tuple[Finding, ...]
    """All that is wrong in that step, one by one."""

    def merged(self) -> tuple[Finding, ...]:
        """One finding for each check, in the order in which an error travels."""
        return with_rules(sort_and_merge(self.findings), self.rules)


def merge_judge_reports(parts: Sequence[JudgeReport]) -> JudgeReport:
    """What the judges of one group say together, each of which was shown other ranks.

    Args:
        parts: Of the same group and segment; at least one.
    """
    bad = min((part.bad_step for part in parts if part.bad_step is not None), default=None)
    # What no single rank is to blame for, every judge has found.
    found = dict.fromkeys(finding for part in parts for finding in part.findings)
    merged = replace(
        # Of one that got furthest, since a rank that failed has seen less of the data.
        max(parts, key=lambda part: part.owed.total()),
        has_started=all(part.has_started for part in parts),
        compared_elems=sum(part.compared_elems for part in parts),
        unobserved=frozenset[str]().union(*(part.unobserved for part in parts)),
        unfollowed=next((part.unfollowed for part in parts if part.unfollowed), ""),
        digests=RankDigests.together([part.digests for part in parts]),
        rules=rules_together([part.rules if part.bad_step == bad else None for part in parts]),
        bad_step=bad,
        findings=tuple(found),
    )
    return with_digests(merged)


def with_digests(judged: JudgeReport) -> JudgeReport:
    """Return what was seen with what the ranks showed compared; of the first bad step alone."""
    compared = tuple(judged.digests.check())
    steps = [judged.bad_step, *(finding.step for finding in compared)]
    bad = min((step for step in steps if step is not None), default=None)
    found = (*judged.findings, *compared)
    return replace(
        judged,
        bad_step=bad,
        findings=tuple(finding for finding in found if finding.step in (None, bad)),
    )
