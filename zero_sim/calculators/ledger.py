"""A rank's ledger: memory by category at each moment of a step, and the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero_sim.calculators.footprint import Footprint

BETWEEN = "between steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A rank's memory at a moment."""

    phase: str
    """`forward`, `backward`, `step` or `between steps`."""
    where: str
    """Event that caused the sample, such as `0.up began`."""
    bytes: Mapping[str, int]
    """Bytes by category. Each storage counts once, and empty categories are omitted."""

    @property
    def total(self) -> int:
        """Bytes over all categories."""
        return sum(self.bytes.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLedger:
    """A rank's samples in a step; the last is taken between this step and the next."""

    rank: int
    samples: Sequence[Sample]
    unreported: tuple[str, ...] = ()
    """Categories that the system does not report, so their bytes count under other names."""

    @property
    def between(self) -> Mapping[str, int]:
        """Bytes by category after the step."""
        # `MemoryMeter.end()` takes the last sample.
        return self.samples[-1].bytes

    @property
    def peak(self) -> Sample:
        """Sample with most bytes; the first if several are equal."""
        return max(self.samples, key=lambda sample: sample.total)

    def peak_of(self, category: str) -> Sample:
        """Return the sample with most bytes in a category; the first if several are equal."""
        return max(self.samples, key=lambda sample: sample.bytes.get(category, 0))

    @property
    def categories(self) -> tuple[str, ...]:
        """Categories in all samples, in order of first appearance."""
        return tuple(dict.fromkeys(name for sample in self.samples for name in sample.bytes))


def differences(ledger: RankLedger, footprint: Footprint) -> Iterator[str]:
    """Yield a message for each category whose bytes between steps differ from the closed form.

    Args:
        ledger: A rank's measured memory.
        footprint: The same rank's closed form.
    """
    for name, wanted in footprint.held.items():
        # Samples omit empty categories.
        got = ledger.between.get(name, 0)
        if got != wanted:
            yield (
                f"expected {wanted} bytes of {name} between steps by closed form, got {got} on "
                f"rank {ledger.rank}"
            )
    # Both live only within a step. If they stay, the stage saves nothing.
    for name in ("gathered", "whole_gradients"):
        got = ledger.between.get(name, 0)
        if got:
            yield f"expected no {name} between steps, got {got} bytes on rank {ledger.rank}"
