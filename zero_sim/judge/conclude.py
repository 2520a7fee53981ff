"""From what was seen, on whatever backend, to the result of a case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zero_sim.findings.dataflow import of_first_step, sort_and_merge
from zero_sim.findings.records import CaseResult, Finding, Strip
from zero_sim.judge import guards
from zero_sim.judge.expected import settle
from zero_sim.judge.guarantee import Row, Width, in_words, width_in_words
from zero_sim.judge.rules import rules_together, with_rules
from zero_sim.judge.seen import Seen
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import FaultRecord
from zero_sim.workloads import EXACT_MODELS


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Everything that is known of a case that ran."""

    seen: Sequence[Seen]
    """What the judges saw, of each group and segment."""
    failures: Sequence[Finding] = ()
    """What else went wrong, the first cause first."""
    faults: Sequence[FaultRecord] = ()
    """What came of the planned ones."""
    accuracy: float | None = None
    """On held-out data, after the last step."""
    said: Sequence[str] = ()
    """What the system has to say of the run."""
    notes: Sequence[str] = ()
    """What the backend has to say of it."""
    strips: Sequence[Strip | None] = ()
    """Of each judge, the buffer of its first finding."""
    collectives: int = 0
    log_digest: str = ""

    def findings(self) -> tuple[Finding, ...]:
        """Everything that is wrong, the earliest first."""
        # Groups of ranks that share a norm see each other's mistakes, and some a step later.
        judged = of_first_step([finding for seen in self.seen for finding in seen.findings])
        bad = min((seen.bad_step for seen in self.seen if seen.bad_step is not None), default=None)
        rules = rules_together([seen.rules for seen in self.seen if seen.bad_step == bad])
        return (*with_rules(sort_and_merge(judged), rules), *self.failures)

    def strip(self) -> Strip | None:
        """The buffer of the first finding, or of another one where that lies in none."""
        found, drawn = self.findings(), [strip for strip in self.strips if strip is not None]
        for seen, strip in zip(self.seen, self.strips, strict=False):
            identities = [finding.identity for finding in seen.findings]
            if strip is not None and found and found[0].identity in identities:
                return strip
        return next(iter(drawn), None)


def conclude(scenario: Scenario, account: Account) -> CaseResult:
    """Judge a case; the result says nothing of its time.

    Args:
        scenario: The case.
        account: What came of it.
    """
    found = account.findings()
    if not found:
        found = tuple(_check_accuracy(scenario, account.accuracy))
    # A run that went wrong has said nothing yet about how much a pass would have meant.
    doubts = () if found else _doubts(scenario, account)
    verdict, findings, reached = settle(
        scenario.expect.finding, found=found, doubts=doubts, faults=account.faults
    )
    owed = sum((seen.owed for seen in account.seen), start=Counter[Row]())
    notes = [*reached, *_notes(account, agreed=not found), *account.notes]
    if scenario.model.name in EXACT_MODELS or not scenario.world.order_known:
        notes.append(in_words(owed))
    width = sum((seen.width for seen in account.seen), start=Width())
    notes.extend(filter(None, [width_in_words(owed, width)]))
    return CaseResult(
        id=scenario.name,
        verdict=verdict,
        seconds=0.0,
        findings=findings,
        notes=tuple(notes),
        owed={str(row): count for row, count in sorted(owed.items())},
        compared_elems=sum(seen.compared_elems for seen in account.seen),
        unobserved=_unobserved(account),
        collectives=account.collectives,
        log_digest=account.log_digest,
        strip=account.strip() if findings else None,
    )


def _notes(account: Account, *, agreed: bool) -> Iterator[str]:
    if account.accuracy is not None:
        yield f"held-out accuracy {account.accuracy:.4f}"
    yield from account.said
    if unobserved := _unobserved(account):
        yield f"not observed, since the target does not tell it: {', '.join(unobserved)}"
    for record in account.faults:
        # Where all agreed, each of the others is a finding of its own.
        if not agreed or (record.fired and record.kind == "slow"):
            yield f"planned fault{'' if record.fired else ' that never happened'}: {record}"


def _unobserved(account: Account) -> tuple[str, ...]:
    return tuple(sorted(frozenset[str]().union(*(seen.unobserved for seen in account.seen))))


def _check_accuracy(scenario: Scenario, reached: float | None) -> list[Finding]:
    wanted = scenario.expect.accuracy_min
    if wanted is None or (reached is not None and reached >= wanted):
        return []
    return [
        Finding(
            check=Check.EXPECT_ACCURACY,
            message=f"held-out accuracy after the last step: expected at least {wanted}, "
            f"got {reached}",
            step=scenario.run.steps - 1,
        )
    ]


def _doubts(scenario: Scenario, account: Account) -> tuple[Finding, ...]:
    """Why equality would mean little, though nothing is wrong."""
    return (
        *guards.check_meaning(scenario, account.seen),
        *guards.check_faults(account.faults),
    )
