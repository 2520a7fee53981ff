"""The verdict: from the reports of all judges, on whatever backend, to the result of a case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zero_sim.findings.dataflow import of_first_step, sort_and_merge
from zero_sim.findings.records import UNOBSERVED, BufferMap, CaseResult, Finding, Scope, Verdict
from zero_sim.judge.guarantee import Guarantee, Width, in_words, width_in_words
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.rules_tried import UPDATED, rules_together, with_rules
from zero_sim.reference import settings_in_words
from zero_sim.scenario.checks import Check
from zero_sim.scenario.pair import layouts_in_words
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import FaultRecord
from zero_sim.targets.adapt import DIVISION, GRADIENTS, PARTS
from zero_sim.workloads import EXACT_MODELS


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """Everything that is known of a case that ran."""

    judged: Sequence[JudgeReport]
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
    buffer_maps: Sequence[BufferMap | None] = ()
    """Of each judge, the buffer of its first finding."""
    collectives: int = 0
    log_digest: str = ""

    def findings(self) -> tuple[Finding, ...]:
        """Everything that is wrong, the earliest first."""
        # Groups of ranks that share a norm see each other's mistakes, and some a step later.
        found = of_first_step([finding for judged in self.judged for finding in judged.findings])
        bad = min(
            (judged.bad_step for judged in self.judged if judged.bad_step is not None), default=None
        )
        rules = rules_together([judged.rules for judged in self.judged if judged.bad_step == bad])
        return (*with_rules(sort_and_merge(found), rules), *self.failures)

    def buffer_map(self) -> BufferMap | None:
        """The buffer of the first finding that lies in one."""
        drawn = [
            (judged, buffer_map)
            for judged, buffer_map in zip(self.judged, self.buffer_maps, strict=False)
            if buffer_map is not None
        ]
        for finding in self.findings():
            for judged, buffer_map in drawn:
                identities = [each.identity for each in judged.findings]
                # Another group has another buffer, though the same check finds something there.
                if buffer_map.check == finding.check and finding.identity in identities:
                    return buffer_map
        return None


def reach_verdict(scenario: Scenario, observations: Observations) -> CaseResult:
    """Judge a case; the result says nothing of its time.

    Args:
        scenario: The case that is judged.
        observations: What came of it.
    """
    found = _with_settings(observations.findings(), scenario)
    if not found:
        found = tuple(_check_accuracy(scenario, observations.accuracy))
    # A run that went wrong has said nothing yet about how much a pass would have meant.
    doubts = () if found else _doubts(scenario, observations)
    verdict, findings, reached = settle(
        scenario.expect.finding, found=found, doubts=doubts, faults=observations.faults
    )
    unobserved = _unobserved(observations)
    owed = sum((judged.owed for judged in observations.judged), start=Counter[Guarantee]())
    notes = [*reached, *_notes(observations, agreed=not found), *observations.notes]
    if scenario.model.name in EXACT_MODELS or not scenario.world.order_known:
        notes.append(in_words(owed))
    width = sum((judged.width for judged in observations.judged), start=Width())
    notes.extend(filter(None, [width_in_words(owed, width)]))
    return CaseResult(
        id=scenario.name,
        verdict=verdict,
        seconds=0.0,
        findings=findings,
        notes=tuple(notes),
        owed={str(row): count for row, count in sorted(owed.items())},
        compared_elems=sum(judged.compared_elems for judged in observations.judged),
        unobserved=unobserved,
        scope=_scope(unobserved),
        collectives=observations.collectives,
        log_digest=observations.log_digest,
        strip=observations.buffer_map() if findings else None,
    )


def _with_settings(found: Sequence[Finding], scenario: Scenario) -> tuple[Finding, ...]:
    """Findings, the first one of an update with what the reference stepped with."""
    if any(each.check == Check.EQUALITY_LAYOUT for each in found):
        # The settings are those of both layouts.
        return tuple(_with_layouts(each, scenario) for each in found)
    first = next((finding for finding in found if finding.check in UPDATED), None)
    if first is None or first.step is None:
        return tuple(found)
    spec = scenario.optimizer
    settings = settings_in_words(spec, step=first.step, param=first.param)
    detail = "\n".join(filter(None, [f"reference: {settings}", first.detail]))
    return tuple(replace(each, detail=detail) if each is first else each for each in found)


def _with_layouts(finding: Finding, scenario: Scenario) -> Finding:
    """Return a finding, with both layouts if it is on these."""
    if finding.check != Check.EQUALITY_LAYOUT:
        return finding
    detail = "\n".join(filter(None, [layouts_in_words(scenario), finding.detail]))
    return replace(finding, detail=detail)


def _notes(observations: Observations, *, agreed: bool) -> Iterator[str]:
    if observations.accuracy is not None:
        yield f"held-out accuracy {observations.accuracy:.4f}"
    yield from observations.said
    if unobserved := _unobserved(observations):
        yield f"{UNOBSERVED}{', '.join(unobserved)}"
    for record in observations.faults:
        # Where all agreed, each of the others is a finding of its own.
        if not agreed or (record.fired and record.kind == "slow"):
            yield f"planned fault{'' if record.fired else ' that never happened'}: {record}"


def _unobserved(observations: Observations) -> tuple[str, ...]:
    return tuple(
        sorted(frozenset[str]().union(*(judged.unobserved for judged in observations.judged)))
    )


def _scope(unobserved: Collection[str]) -> Scope:
    is_hidden = PARTS in unobserved and not {GRADIENTS, DIVISION}.isdisjoint(unobserved)
    return "params-only" if is_hidden else "full"


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


def _doubts(scenario: Scenario, observations: Observations) -> tuple[Finding, ...]:
    """Why equality would mean little, though nothing is wrong."""
    return (
        *check_meaning(scenario, observations.judged),
        *check_faults(observations.faults),
    )


def settle(
    wanted: str | None,
    *,
    found: Sequence[Finding],
    doubts: Sequence[Finding],
    faults: Sequence[FaultRecord],
) -> tuple[Verdict, tuple[Finding, ...], tuple[str, ...]]:
    """Settle a case.

    Args:
        wanted: The check, or the area of checks, that must find something; None for none.
        found: What is wrong, of the first bad step.
        doubts: Where nothing is wrong, why that means little.
        faults: What came of the planned faults.

    Returns:
        The verdict, the findings to show and the notes to add.
    """
    if wanted is None:
        verdict: Verdict = "fail" if found else "inconclusive" if doubts else "pass"
        return verdict, (*found, *doubts), ()
    # What is found before any planned fault happens is not that fault's doing.
    explained = not faults or any(record.fired for record in faults)
    matching = [
        finding
        for finding in (*(found if explained else ()), *doubts)
        if finding.check == wanted or finding.check.startswith(f"{wanted}.")
    ]
    if matching:
        return "pass", (), tuple(f"found, as expected: {_in_a_line(f)}" for f in matching)
    missing = Finding(
        check=Check.EXPECT_FINDING,
        message=f"expected {wanted} to find something, got {_summary(found, doubts)}"
        + ("" if explained else ", before any planned fault happened"),
    )
    return "fail", (missing, *found, *doubts), ()


def _summary(found: Sequence[Finding], doubts: Sequence[Finding]) -> str:
    checks = list(dict.fromkeys(finding.check for finding in (*found, *doubts)))
    return f"{', '.join(checks)} only" if checks else "nothing"


def _in_a_line(finding: Finding) -> str:
    parts = [
        f"{word} {value}"
        for word, value in (("step", finding.step), ("rank", finding.rank))
        if value is not None
    ]
    if finding.param is not None:
        index = "" if finding.index is None else f"[{', '.join(map(str, finding.index))}]"
        parts.append(f"param '{finding.param}'{index}")
    where = f" ({', '.join(parts)})" if parts else ""
    return f"{finding.check}: {finding.message}{where}"


def check_meaning(scenario: Scenario, judges: Sequence[JudgeReport]) -> Iterator[Finding]:
    """Yield guards against an empty pass: why equality would mean little, though nothing is wrong.

    Each cell and segment is checked by itself, because one proves nothing about another: so the
    worst counts. Of each kind the first judge's doubt, of gradients the one with the fewest.
    """
    if scenario.data.ranks == "distinct":
        for judge in [judge for judge in judges if judge.same_data][:1]:
            yield Finding(
                check=Check.GUARD_SAME_DATA,
                message=f"all ranks saw the same data in every step{_where(judge, judges)}, which "
                "hides most bugs of a reduction; feed distinct data, or say "
                'data.ranks = "same" if that is the point',
            )
    least = min(judges, key=lambda judge: judge.nonzero_fraction_max)
    is_low = least.nonzero_fraction_max < scenario.expect.nonzero_min
    if is_low and not scenario.world.order_known:
        yield Finding(
            check=Check.GUARD_WIDE_BOUNDS,
            message=f"at most {least.nonzero_fraction_max:.0%} of the gradient elements owe "
            f"anything but zero in any step{_where(least, judges)}, expected at least "
            f"{scenario.expect.nonzero_min:.0%}: what lies within bounds that wide proves nothing",
        )
    elif is_low:
        yield Finding(
            check=Check.GUARD_ZERO_GRADIENTS,
            message=f"at most {least.nonzero_fraction_max:.0%} of the gradient elements were "
            f"nonzero in any step{_where(least, judges)}, expected at least "
            f"{scenario.expect.nonzero_min:.0%}: equal zeros prove nothing",
        )
    for judge in [judge for judge in judges if not judge.has_stepped][:1]:
        yield Finding(
            check=Check.GUARD_NOTHING_STEPPED,
            message="every step was skipped or had gradients that are not finite"
            f"{_where(judge, judges)}, so that no update was compared; take more steps, or plant "
            "the overflow in one of several",
        )
    owed = sum((judge.owed for judge in judges), start=Counter[Guarantee]())
    depending = owed.total() - owed["order-free"]
    if scenario.model.name in EXACT_MODELS and depending:
        yield Finding(
            check=Check.GUARD_NOT_ORDER_FREE,
            message=f"{depending} of {owed.total()} elements of reduced gradients depend on the "
            "order of addition, though this model is there to have none: fewer ranks, rows or "
            "micro-batches, or a division after the sum, keep it within its budget",
        )
    for judge in judges:
        if judge.unfollowed:
            yield Finding(
                check=Check.GUARD_NOT_FOLLOWED,
                step=judge.uncertified_step,
                message=judge.unfollowed,
            )
        elif judge.uncertified_step is not None:
            yield Finding(
                check=Check.GUARD_NORM_NOT_CERTIFIED,
                step=judge.uncertified_step,
                message="the norm lies so close to the middle of two fp32 values that its rounding "
                "depends on the order of the sum; nothing clipped by it is owed. Try another seed",
            )


def check_faults(records: Iterable[FaultRecord]) -> Iterator[Finding]:
    """Give a doubt for each planned fault of a case in which nothing was found.

    A rank that is slow owes nothing but agreement, so that one which was says nothing here.
    """
    for record in records:
        if not record.fired:
            yield Finding(
                check=Check.GUARD_FAULT_NOT_REACHED,
                rank=record.rank,
                message=f"the planned fault never happened: {record}",
            )
        elif record.kind != "slow":
            yield Finding(
                check=Check.GUARD_FAULT_UNNOTICED,
                rank=record.rank,
                message="a planned fault happened and everything agreed bit for bit all the same: "
                f"{record}",
            )


def _where(judge: JudgeReport, judges: Sequence[JudgeReport]) -> str:
    """Which cell and segment a judge saw, where there are several."""
    if len(judges) == 1:
        return ""
    ranks = ", ".join(map(str, judge.world_ranks))
    return f" from step {judge.first_step} on ranks {ranks}"
