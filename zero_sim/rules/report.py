"""Rules that were found of a target, and all that is to be said beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_IF_INTENDED = "If this is intended, declare it; otherwise divide by the number of"


@dataclass(kw_only=True, slots=True)
class FoundRules:
    """What was found of a target."""

    target: str
    numerics: dict[str, Any] = field(default_factory=dict)
    """Fields of `Numerics` that are not as by default."""
    capabilities: dict[str, Any] = field(default_factory=dict)
    """Fields of `Capabilities` that are not as by default."""
    unclear: list[str] = field(default_factory=list)
    """What could not be told, and why."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What it cannot be asked for, and what came of asking."""
    contradicted: list[str] = field(default_factory=list)
    """What it declares otherwise."""
    limits: dict[str, list[str]] = field(default_factory=dict)
    """By a check of its own by which it refuses sizes: names of the cases."""
    alarms: list[str] = field(default_factory=list)
    """What a right system has not: what is found beside it is not to be declared."""
    cases: int = 0

    @property
    def undivided(self) -> dict[str, str]:
        """By field of `numerics`: the missing divisor of the gradient, and the remedy."""
        if self.numerics.get("divide") == "none":
            what = "The sum over the ranks is not divided, so the gradient is N x the mean"
            return {"divide": f"{what}, with N ranks. {_IF_INTENDED} ranks."}
        if self.numerics.get("divide_by") == "ranks" and "scale_loss" not in self.numerics:
            what = (
                "the sum over the micro-batches is not divided, so the gradient is M x their mean"
            )
            more = f"with M micro-batches a rank. {_IF_INTENDED} micro-batches, too."
            return {"divide_by": f"{what}, {more}"}
        return {}

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
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
