"""Ledger of a rank: what it had in memory at every moment of a step, and where it was fullest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero_sim.calculators.footprint import Footprint

BETWEEN = "between steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What one rank had at one moment."""

    phase: str
    """`forward`, `backward`, `step`, or between steps."""
    where: str
    """What had just happened, such as `0.up began`."""
    bytes: Mapping[str, int]
    """By category, each memory once; those of which there is nothing are left out."""

    @property
    def total(self) -> int:
        """Of all categories."""
        return sum(self.bytes.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLedger:
    """One rank's samples of one step, the last of them between it and the next."""

    rank: int
    samples: Sequence[Sample]
    unreported: tuple[str, ...] = ()
    """Categories that the system does not tell apart."""

    @property
    def between(self) -> Mapping[str, int]:
        """What it held when the step was over."""
        return self.samples[-1].bytes

    @property
    def peak(self) -> Sample:
        """The fullest moment, the first of several."""
        return max(self.samples, key=lambda sample: sample.total)

    def peak_of(self, category: str) -> Sample:
        """The moment with most of a category."""
        return max(self.samples, key=lambda sample: sample.bytes.get(category, 0))

    @property
    def categories(self) -> tuple[str, ...]:
        """All that any moment had, in order of their first moment."""
        return tuple(dict.fromkeys(name for sample in self.samples for name in sample.bytes))


def differences(ledger: RankLedger, footprint: Footprint) -> Iterator[str]:
    """What a closed form of memory between steps says otherwise than a ledger, in words.

    Args:
        ledger: Of a rank.
        footprint: Of the same rank.
    """
    for name, owed in footprint.held.items():
        got = ledger.between.get(name, 0)
        if got != owed:
            yield (
                f"expected {owed} bytes of {name} between steps by closed form, got {got} on rank "
                f"{ledger.rank}"
            )
    for name in ("gathered", "whole_gradients"):
        got = ledger.between.get(name, 0)
        if got:
            yield f"expected no {name} between steps, got {got} bytes on rank {ledger.rank}"
