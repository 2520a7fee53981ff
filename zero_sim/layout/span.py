"""Half-open ranges of elements: the one way in which this package says where something lies."""

from __future__ import annotations

from dataclasses import dataclass

from zero_sim.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Span:
    """The elements `start, start + 1, ..., stop - 1`; `start == stop` is an empty span.

    An empty span still has a place: a zero-element param lies *somewhere*.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
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
        """Whether the span holds no element."""
        return self.start == self.stop

    def contains(self, other: int | Span) -> bool:
        """Whether an element, or every element and both ends of a span, lie inside this span."""
        if isinstance(other, Span):
            return self.start <= other.start and other.stop <= self.stop
        return self.start <= other < self.stop

    def intersect(self, other: Span) -> Span:
        """Return the elements in both spans; an empty span where there are none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> Span:
        """Return the span moved by `offset` elements; `shift(-origin)` counts from `origin`.

        Raises:
            LayoutError: If the result would begin before element 0.
        """
        return Span(self.start + offset, self.stop + offset)

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"
