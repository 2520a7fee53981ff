"""Findings of an earlier run, judged again: code that has changed since may have fixed them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from zero_sim.backends import WorldPool
from zero_sim.errors import ZeroSimError
from zero_sim.fuzz.records import Found
from zero_sim.run import run_case
from zero_sim.scenario.checks import Check
from zero_sim.shrink import may_become
from zero_sim.targets import Target, import_target

Outcome = Literal["fixed", "fails", "fails-otherwise", "unknown"]
"""`fixed`: its case passes; `fails`: as it did; `fails-otherwise`: with another finding;
`unknown`: that could not be found out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rechecked:
    """What came of a finding."""

    found: Found
    outcome: Outcome
    said: str = ""
    """What the case comes to now, where that is neither a pass nor the finding."""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return {
            "key": list(self.found.key),
            "bundle": self.found.bundle,
            "outcome": self.outcome,
            "said": self.said,
        }


def recheck(findings: Iterable[Found], *, target: str, device: str = "cpu") -> Iterator[Rechecked]:
    """Judge the shrunk case of each finding again; those without one are passed over.

    Args:
        findings: Of an earlier run.
        target: Name of a registered target, or `module:name`.
        device: Where ranks and reference compute.

    Raises:
        UsageError: There is no such target.
    """
    having = [found for found in findings if found.scenario]
    if not having:
        return
    system = import_target(target)
    with WorldPool() as pool:
        for found in having:
            yield _judge(found, target=system, pool=pool, device=device)


def _judge(found: Found, *, target: Target, pool: WorldPool, device: str) -> Rechecked:
    try:
        result = run_case(found.case_again(), pool=pool, target=target, device=device)
    except ZeroSimError as error:
        return Rechecked(found=found, outcome="unknown", said=str(error))
    # One that nobody foresaw is one way to fail, and was kept as such.
    except Exception as error:  # noqa: BLE001
        same = found.key[:2] == (Check.INTERNAL_ERROR, type(error).__name__)
        said = "" if same else f"{type(error).__name__}: {error}"
        return Rechecked(found=found, outcome="fails" if same else "fails-otherwise", said=said)
    if may_become(found.key, result):
        return Rechecked(found=found, outcome="fails")
    if result.verdict == "pass":
        return Rechecked(found=found, outcome="fixed")
    if result.findings:
        first = result.findings[0]
        said = f"{first.check}: {first.message}"
        return Rechecked(found=found, outcome="fails-otherwise", said=said)
    return Rechecked(found=found, outcome="unknown", said=result.error or result.verdict)
