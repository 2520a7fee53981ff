"""Half-open ranges of elements, used for all positions in layouts."""

from __future__ import annotations

from dataclasses import dataclass

from zero_sim.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Span:
    """The elements `start, start + 1, ..., stop - 1`.

    An empty span still has a position, because params without elements have a position too.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        # Check here, so that arithmetic on spans needs no checks.
        if not 0 <= self.start <= self.stop:
            raise LayoutError(
                f"expected a span with 0 <= start <= stop, got [{self.start}, {self.stop})."
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def empty(self) -> bool:
        """True if the span has no elements."""
        return self.start == self.stop

    def contains(self, other: int | Span) -> bool:
        """Return True if an element, or both ends of a span, lie inside this span."""
        if isinstance(other, Span):
            # Both ends must lie inside, even for an empty span.
            return self.start <= other.start and other.stop <= self.stop
        return self.start <= other < self.stop

    def intersect(self, other: Span) -> Span:
        """Return the elements in both spans; an empty span if there are none."""
        start = max(self.start, other.start)
        # For disjoint spans `max` avoids stop < start, which Span refuses.
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> Span:
        """Return the span moved by `offset` elements; `shift(-origin)` makes it relative to origin.

        Raises:
            LayoutError: If the result would begin before element 0.
        """
        return Span(self.start + offset, self.stop + offset)

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"
