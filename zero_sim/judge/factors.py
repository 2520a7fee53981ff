"""Causes of gradients that differ from the expected values by a factor n or 1/n.

A missing or repeated division changes a sum by one of the case's counts: the number of ranks,
micro-batches or replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from zero_sim.findings.ratio import Ratio
from zero_sim.reference import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorCauses:
    """Counts of a step that may occur as a wrong divisor."""

    counts: Mapping[str, int]
    """Counts greater than 1 by description, such as `3 ranks`."""
    divisor: float
    """Divisor of the mean; 1 if the sum is not divided."""
    is_mean: bool
    """True if the mean is expected, False if the sum is."""
    noun: str = "the {}"
    """Phrase for the expected value; `{}` becomes `mean` or `sum`."""

    @classmethod
    def of(
        cls,
        losses: Collection[tuple[int, int]],
        *,
        divisor: float,
        replicas: int = 1,
        is_mean: bool = True,
        noun: str = "the {}",
    ) -> FactorCauses:
        """Collect the counts of a step.

        Args:
            losses: Rank and micro-batch of each loss.
            divisor: As the field.
            replicas: Number of replicas.
            is_mean: As the field.
            noun: As the field.
        """
        # Only ranks with data have a loss.
        ranks = {rank for rank, _ in losses}
        micros = {sum(each == rank for each, _ in losses) for rank in ranks}
        # Ranks may have different numbers of micro-batches.
        most = max(micros, default=0)
        each = f"{most} micro-batches"
        counts = {f"{len(ranks)} ranks": len(ranks), each: most}
        if len(ranks) > 1:
            all_of_them = f"{len(losses)} micro-batches of all ranks"
            counts |= {all_of_them: len(losses), f"{replicas} replicas": replicas}
            counts |= {f"{len(ranks) // replicas} ranks of a replica": len(ranks) // replicas}
        known: dict[int, str] = {}
        # Equal counts cannot be distinguished, so they share a description.
        for name, count in counts.items():
            # Add only micro-batches per rank. If each rank has one, for example, the number of all
            # micro-batches just repeats the number of ranks.
            if count > 1 and (count not in known or name == each):
                known[count] = f"{known[count]} or {name}" if count in known else name
        return cls(
            counts={name: count for count, name in known.items()},
            divisor=divisor,
            is_mean=is_mean,
            noun=noun,
        )

    def explain(self, ratio: Ratio | None) -> str:
        """Describe a factor and its likeliest cause, as `3 x the mean: ...`.

        Args:
            ratio: Factor from the expected to the observed value.

        Returns:
            Empty if the cause is unknown.
        """
        name = next((n for n, c in self.counts.items() if ratio and c == ratio.number), None)
        if ratio is None or name is None:
            return ""
        expected = self.noun.format("mean" if self.is_mean else "sum")
        rounded = ", up to rounding" if ratio.is_rounded else ""
        times = "x" if ratio.is_multiple else "of"
        return f"{ratio} {times} {expected}{rounded}: {self._cause(name, ratio)}"

    def explain_within(self, bound: Interval, got: Tensor, *, divisor: float) -> str:
        """Do the same for a bounded sum. The result is empty unless exactly one factor fits.

        Args:
            bound: Bound of the sum. # 1D
            got: Reported gradient. # 1D
            divisor: Divisor between the sum and the report; 1 for none.
        """
        if not bool(got.any()):
            # Zeros fit an interval around zero with any factor.
            return ""
        # A missing division multiplies by a count, a repeated division divides by it.
        factors = [(count, is_multiple) for count in self.counts.values() for is_multiple in (1, 0)]
        fitting = [
            Ratio(number=count, is_multiple=bool(is_multiple), is_rounded=False)
            for count, is_multiple in factors
            if _holds(bound, got, divisor=divisor / count if is_multiple else divisor * count)
        ]
        # If bounds are wide, several factors may fit. Then none is evidence.
        return self.explain(fitting[0]) if len(fitting) == 1 else ""

    def _cause(self, name: str, ratio: Ratio) -> str:
        is_divisor = ratio.number == self.divisor
        # Too small: divided once more than expected.
        if not ratio.is_multiple:
            if not self.is_mean:
                return f"it was divided by the {name} already"
            too_much = "once too often" if is_divisor else "as well"
            return f"it was divided by the {name} {too_much}"
        # Too large: added once more, or not divided. A plain sum has no division to lack.
        if not self.is_mean:
            return f"it was summed over the {name} twice"
        if is_divisor:
            return f"the sum over {name} was not divided"
        if self.divisor % ratio.number == 0:
            return f"the sum was divided by {self.divisor / ratio.number:g}, but not by the {name}"
        return f"it was summed over the {name} twice, or not divided by them"


def _holds(bound: Interval, got: Tensor, *, divisor: float) -> bool:
    quotients = bound.divided_by(divisor)
    # Rounding is monotonic, so rounded ends bound rounded values.
    low, high = (end.to(got.dtype).double() for end in (quotients.low, quotients.high))
    return bool(replace(quotients, low=low, high=high).holds(got).all())
