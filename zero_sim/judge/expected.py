"""Expected findings: the verdict where a case says that something must be found."""

from __future__ import annotations

from collections.abc import Sequence

from zero_sim.findings.records import Finding, Verdict
from zero_sim.scenario.checks import Check
from zero_sim.sim import FaultRecord


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
