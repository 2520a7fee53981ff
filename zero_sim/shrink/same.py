"""What makes the findings of two cases one, so that what is shrunk does not become another bug."""

from __future__ import annotations

from collections.abc import Callable

from zero_sim.scenario.spec import Scenario
from zero_sim.shrink.reduce import Limits, Reduced, shrink
from zero_sim.verify.records import CaseResult

Key = tuple[str, str, str]
"""What makes two findings one: the check, the phase of the step, the kind of param."""


def key_of(result: CaseResult) -> Key | None:
    """What a result found, as far as it tells findings apart; None where nothing is wrong.

    The message does not count, nor where it is: step, rank, offset, values and the param's name
    differ from case to case.
    """
    if result.verdict in ("pass", "inconclusive"):
        return None
    if not result.findings:
        return "internal.refused", "", ""
    first = result.findings[0]
    return first.check, first.phase or "", _kind(first.param)


def may_shrink(key: Key) -> bool:
    """Whether smaller cases can have the same finding for the same reason.

    What a case expects beyond equality, such as a degree of overlap, it expects at its own size:
    smaller ones would miss it for being smaller.
    """
    return not key[0].startswith("expect.")


def shrink_finding(
    scenario: Scenario,
    result: CaseResult,
    *,
    judge: Callable[[Scenario], CaseResult],
    may_ask: Callable[[Scenario], bool],
    limits: Limits,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Reduced, CaseResult]:
    """Make a case smaller as long as it has the same finding.

    Args:
        scenario: A case in which something is wrong that smaller cases can have; see `may_shrink`.
        result: Of it.
        judge: Judges a case.
        may_ask: Whether the target is there for a case.
        limits: As for `shrink`.
        is_over: As for `shrink`.

    Returns:
        What the search came to, and the result of its case.
    """
    key, best = key_of(result), result

    def has_it(other: Scenario) -> bool:
        nonlocal best
        judged = judge(other)
        if key_of(judged) != key:
            return False
        # Logs are large, and only those of the smallest case are told of.
        best = judged
        return True

    reduced = shrink(scenario, fails=has_it, may_ask=may_ask, limits=limits, is_over=is_over)
    return reduced, best


def _kind(param: str | None) -> str:
    if param is None:
        return ""
    return "expert" if "experts" in param.split(".") else "dense"
