"""Records of a verdict on two runs of a script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero_sim.against.measure import Measured
from zero_sim.against.points import Point

Outcome = Literal["equal", "different", "script-fails", "inconclusive", "unsupported"]
EXIT_STATUS: dict[Outcome, int] = {
    "equal": 0,
    "different": 1,
    "script-fails": 2,
    "inconclusive": 3,
    "unsupported": 4,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A tensor that differs by more than rounding."""

    point: Point
    measured: Measured
    rounding: float
    """Relative difference caused by rounding alone."""

    @property
    def multiple(self) -> float:
        """Difference as a multiple of rounding."""
        return self.measured.relative / self.rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainstVerdict:
    """Verdict on two runs of a script."""

    outcome: Outcome
    reason: str = ""
    """One sentence; empty for `equal`, and if `differences` has the reason."""
    remedy: str = ""
    expected: str = ""
    """Expected side, such as `1 rank`."""
    got: str = ""
    steps: int = 0
    differences: tuple[Difference, ...] = ()
    """Differing tensors, in the order in which a fault reached them."""
    compared_count: int = 0
    largest_multiple: float = 0.0
    """Largest multiple of rounding among tensors that decide the verdict."""
    unobserved: tuple[str, ...] = ()
    """Tensors whose shards could not be assembled."""
    undecided: tuple[str, ...] = ()
    """Tensors in which rounding changes every digit."""
    notes: tuple[str, ...] = ()
    ending: str = ""
    """Report of a failed run."""

    @property
    def first(self) -> str:
        """Description of the first difference; empty without differences."""
        return self.differences[0].point.text if self.differences else ""


def inconclusive(reason: str, remedy: str) -> AgainstVerdict:
    """Return the verdict on two sides that cannot be compared."""
    return AgainstVerdict(outcome="inconclusive", reason=reason, remedy=remedy)
