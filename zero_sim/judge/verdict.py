"""The verdict: merges the reports of all judges into a case result, on any backend."""

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
    """Everything observed while a case ran."""

    judged: Sequence[JudgeReport]
    """A report per group and segment."""
    failures: Sequence[Finding] = ()
    """Other failures, root cause first."""
    faults: Sequence[FaultRecord] = ()
    """Outcomes of planned faults."""
    accuracy: float | None = None
    """Accuracy on held-out data after the last step."""
    system_notes: Sequence[str] = ()
    """The system's notes about the run."""
    notes: Sequence[str] = ()
    """The backend's notes about the run."""
    buffer_maps: Sequence[BufferMap | None] = ()
    """Buffer map of each judge's first finding."""
    collectives: int = 0
    log_digest: str = ""

    def findings(self) -> tuple[Finding, ...]:
        """Return all findings, earliest first."""
        # Groups that share a norm are affected by each other's bugs, sometimes a step later.
        found = of_first_step([finding for judged in self.judged for finding in judged.findings])
        bad = min(
            (judged.bad_step for judged in self.judged if judged.bad_step is not None), default=None
        )
        # Only rules tried on the first bad step explain its findings.
        rules = rules_together([judged.rules for judged in self.judged if judged.bad_step == bad])
        return (*with_rules(sort_and_merge(found), rules), *self.failures)

    def buffer_map(self) -> BufferMap | None:
        """Return the buffer map of the first finding that lies in a flat buffer."""
        drawn = [
            (judged, buffer_map)
            # Not strict, because `buffer_maps` may be empty.
            for judged, buffer_map in zip(self.judged, self.buffer_maps, strict=False)
            if buffer_map is not None
        ]
        for finding in self.findings():
            for judged, buffer_map in drawn:
                identities = [each.identity for each in judged.findings]
                # Each group has its own buffer, so the check alone does not identify the map.
                if buffer_map.check == finding.check and finding.identity in identities:
                    return buffer_map
        return None


def reach_verdict(scenario: Scenario, observations: Observations) -> CaseResult:
    """Return the result of a case, with `seconds` = 0.

    Args:
        scenario: The judged case.
        observations: Observations of its run.
    """
    found = _with_settings(observations.findings(), scenario)
    if not found:
        # Check accuracy only if everything agrees: a finding explains low accuracy.
        found = tuple(_check_accuracy(scenario, observations.accuracy))
    # Doubts only weaken a pass.
    doubts = () if found else _doubts(scenario, observations)
    verdict, findings, reached = settle(
        # With `expect.finding`, a finding can be a pass.
        scenario.expect.finding,
        found=found,
        doubts=doubts,
        faults=observations.faults,
    )
    unobserved = _unobserved(observations)
    guarantees = sum(
        (judged.guarantees for judged in observations.judged), start=Counter[Guarantee]()
    )
    notes = [*reached, *_notes(observations, agreed=not found), *observations.notes]
    if scenario.model.name in EXACT_MODELS or not scenario.world.order_known:
        notes.append(in_words(guarantees))
    width = sum((judged.width for judged in observations.judged), start=Width())
    notes.extend(filter(None, [width_in_words(guarantees, width)]))
    return CaseResult(
        id=scenario.name,
        verdict=verdict,
        seconds=0.0,
        findings=findings,
        notes=tuple(notes),
        guarantees={str(row): count for row, count in sorted(guarantees.items())},
        compared_elems=sum(judged.compared_elems for judged in observations.judged),
        unobserved=unobserved,
        scope=_scope(unobserved),
        collectives=observations.collectives,
        log_digest=observations.log_digest,
        strip=observations.buffer_map() if findings else None,
    )


def _with_settings(found: Sequence[Finding], scenario: Scenario) -> tuple[Finding, ...]:
    """Add the reference's optimizer settings to the first finding about an update."""
    if any(each.check == Check.EQUALITY_LAYOUT for each in found):
        # Both layouts have the same settings, so show the layouts instead.
        return tuple(_with_layouts(each, scenario) for each in found)
    # Only for updates, because settings do not explain a wrong gradient.
    first = next((finding for finding in found if finding.check in UPDATED), None)
    if first is None or first.step is None:
        return tuple(found)
    spec = scenario.optimizer
    settings = settings_in_words(spec, step=first.step, param=first.param)
    detail = "\n".join(filter(None, [f"reference: {settings}", first.detail]))
    return tuple(replace(each, detail=detail) if each is first else each for each in found)


def _with_layouts(finding: Finding, scenario: Scenario) -> Finding:
    """Add both layouts to the detail of a finding that compares layouts."""
    if finding.check != Check.EQUALITY_LAYOUT:
        return finding
    detail = "\n".join(filter(None, [layouts_in_words(scenario), finding.detail]))
    return replace(finding, detail=detail)


def _notes(observations: Observations, *, agreed: bool) -> Iterator[str]:
    if observations.accuracy is not None:
        yield f"held-out accuracy {observations.accuracy:.4f}"
    yield from observations.system_notes
    if unobserved := _unobserved(observations):
        yield f"{UNOBSERVED}{', '.join(unobserved)}"
    for record in observations.faults:
        # If everything agreed, other faults than `slow` are doubts, so they need no note.
        if not agreed or (record.fired and record.kind == "slow"):
            yield f"planned fault{'' if record.fired else ' that never happened'}: {record}"


def _unobserved(observations: Observations) -> tuple[str, ...]:
    return tuple(
        sorted(frozenset[str]().union(*(judged.unobserved for judged in observations.judged)))
    )


def _scope(unobserved: Collection[str]) -> Scope:
    # Most optimizers hide a wrong gradient factor from the params.
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
    """Reach the verdict of a case.

    Args:
        wanted: Expected check, such as `equality.grad`, or check area, such as `equality`. None
            if no finding is expected.
        found: Findings of the first bad step.
        doubts: Reasons why a pass would prove little.
        faults: Outcomes of planned faults.

    Returns:
        Verdict, findings to show, and notes to add.
    """
    if wanted is None:
        verdict: Verdict = "fail" if found else "inconclusive" if doubts else "pass"
        return verdict, (*found, *doubts), ()
    # If no planned fault happened, a fault cannot be the cause of a finding.
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
        message=f"expected a finding of {wanted}, got {_summary(found, doubts)}"
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
    """Yield guards against an empty pass: reasons why equality would prove little.

    Args:
        scenario: The judged case.
        judges: A report per group and segment.
    """
    # Each group and segment must be meaningful, because it proves nothing about another. Of each
    # kind of doubt, only report the first, and for zero gradients the worst.
    # Same data may be intended. Then `data.ranks` is "same".
    if scenario.data.ranks == "distinct":
        for judge in [judge for judge in judges if judge.same_data][:1]:
            yield Finding(
                check=Check.GUARD_SAME_DATA,
                message=f"all ranks had the same data in every step{_where(judge, judges)}, which "
                "hides most bugs of a reduction. Use distinct data, or set "
                'data.ranks = "same" if this is intended',
            )
    least = min(judges, key=lambda judge: judge.nonzero_fraction_max)
    is_low = least.nonzero_fraction_max < scenario.expect.nonzero_min
    if is_low and not scenario.world.order_known:
        yield Finding(
            check=Check.GUARD_WIDE_BOUNDS,
            message=f"at most {least.nonzero_fraction_max:.0%} of the gradient elements are "
            f"provably nonzero in any step{_where(least, judges)}, expected at least "
            f"{scenario.expect.nonzero_min:.0%}: values within such wide bounds prove nothing",
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
            f"{_where(judge, judges)}, so no update was compared. Run more steps, or plant "
            "the overflow in a single step",
        )
    guarantees = sum((judge.guarantees for judge in judges), start=Counter[Guarantee]())
    depending = guarantees.total() - guarantees["order-free"]
    # These models have exact sums, unless a case exceeds the exact range of its dtype.
    if scenario.model.name in EXACT_MODELS and depending:
        yield Finding(
            check=Check.GUARD_NOT_ORDER_FREE,
            message=f"{depending} of {guarantees.total()} elements of reduced gradients depend on "
            "the order of addition, but the sums of this model must be exact. Use fewer ranks, "
            "rows or micro-batches, or divide after the sum",
        )
    for judge in judges:
        # A step is uncertified for the stated reason, or else because of its norm.
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
                message="the norm is so close to the middle of two fp32 values that its rounding "
                "depends on the order of addition, so nothing after clipping is judged. Use "
                "another seed",
            )


def check_faults(records: Iterable[FaultRecord]) -> Iterator[Finding]:
    """Yield a doubt for each planned fault, for a case without findings."""
    for record in records:
        if not record.fired:
            yield Finding(
                check=Check.GUARD_FAULT_NOT_REACHED,
                rank=record.rank,
                message=f"the planned fault never happened: {record}",
            )
        # A slow rank must not change results, so it raises no doubt.
        elif record.kind != "slow":
            yield Finding(
                check=Check.GUARD_FAULT_UNNOTICED,
                rank=record.rank,
                message=f"a planned fault happened, but everything agreed bit for bit: {record}",
            )


def _where(judge: JudgeReport, judges: Sequence[JudgeReport]) -> str:
    """Describe the judge's segment and ranks; empty for a single judge."""
    if len(judges) == 1:
        return ""
    ranks = ", ".join(map(str, judge.world_ranks))
    return f" from step {judge.first_step} on ranks {ranks}"
