"""Rules found for a target, with remarks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Shared ending for remarks on a missing division.
_IF_INTENDED = "If this is intended, declare it; otherwise divide by the number of"


@dataclass(kw_only=True, slots=True)
class FoundRules:
    """A target's rules and capabilities."""

    target: str
    numerics: dict[str, Any] = field(default_factory=dict)
    """`Numerics` fields with non-default values."""
    capabilities: dict[str, Any] = field(default_factory=dict)
    """`Capabilities` fields with non-default values."""
    unclear: list[str] = field(default_factory=list)
    """Open questions, with reasons."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Unsupported settings, each with its case's result."""
    contradicted: list[str] = field(default_factory=list)
    """Declarations contradicted by cases."""
    limits: dict[str, list[str]] = field(default_factory=dict)
    """Names of cases with refused sizes, by the system's own check."""
    alarms: list[str] = field(default_factory=list)
    """Symptoms of a faulty system. If there are any, do not declare the rules found."""
    cases: int = 0

    @property
    def undivided(self) -> dict[str, str]:
        """Missing gradient divisors with their remedy, by `numerics` field."""
        if self.numerics.get("divide") == "none":
            what = "The sum over the ranks is not divided, so the gradient is N x the mean"
            return {"divide": f"{what}, with N ranks. {_IF_INTENDED} ranks."}
        # A loss divided by the micro-batches needs no further division.
        if self.numerics.get("divide_by") == "ranks" and "scale_loss" not in self.numerics:
            what = (
                "the sum over the micro-batches is not divided, so the gradient is M x their mean"
            )
            more = f"with M micro-batches a rank. {_IF_INTENDED} micro-batches, too."
            return {"divide_by": f"{what}, {more}"}
        return {}

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return {
            "target": self.target,
            "numerics": dict(self.numerics),
            "undivided": self.undivided,
            "capabilities": dict(self.capabilities),
            "unclear": list(self.unclear),
            "left_out": dict(self.left_out),
            "contradicted": list(self.contradicted),
            "limits": {why: list(cases) for why, cases in self.limits.items()},
            "alarms": list(self.alarms),
            "cases": self.cases,
        }
