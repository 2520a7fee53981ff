"""Coverage of a campaign: features and pairs of features in its cases, and an outlook.

[Note: not yet covered]
Each case is a sample of feature pairs. All cases have the same distribution, so the last case is as
likely as any other to have a pair that no other case has. So the share of cases with such a pair
estimates the probability that the next case has a new pair. This is the leave-one-out form of Good
and Turing's estimator (Good, The population frequencies of species and the estimation of population
parameters, Biometrika 40, 1953). The expected number of new pairs in the next case is the number of
pairs met once, divided by the number of cases. The lower bound for possible pairs not yet met is
Chao's, in the form for Q2 = 0 (Chao, Estimating the population size for capture-recapture data with
unequal catchability, Biometrics 43, 1987; Chao and Colwell call it Chao2).

[Note: covering subset]
The choice is greedy: take the case with the most features and pairs that no chosen case has; if
several are equal, take the first. A greedy cover is larger than the smallest cover by a factor of
at most ln(items) + 1 (Chvatal, A greedy heuristic for the set-covering problem, Mathematics of
Operations Research 4, 1979).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from zero_sim.fuzz.features import features_of, is_feature, may_meet
from zero_sim.scenario.spec import Scenario

Pair = tuple[str, str]
"""Two features in alphabetical order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Estimates for further cases of a campaign; see [Note: not yet covered]."""

    new_share: float
    """Probability that the next case has a new pair."""
    new_pairs: float
    """Expected number of new pairs in the next case."""
    pairs_left_min: int
    """Lower bound for the number of possible pairs not yet met."""


@dataclass(kw_only=True, slots=True)
class Coverage:
    """Numbers of cases by feature and by feature pair."""

    cases: int = 0
    """Number of cases."""
    features: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    _alone: dict[Pair, int] = field(default_factory=dict)
    """Case number by pair, for pairs met exactly once."""

    def take(self, cases_with: Mapping[str, int], *, cases: int) -> None:
        """Add the cases of a batch. Batches may come in any order.

        Args:
            cases_with: Cases by feature, as bit masks; see `note_features`. Features that only
                other versions know are ignored.
            cases: Number of cases.
        """
        names = sorted(filter(is_feature, cases_with))
        if not names:
            return
        for name in names:
            self.features[name] += cases_with[name].bit_count()
        for pair in combinations(names, 2):
            # Bit mask of cases with both features.
            both = cases_with[pair[0]] & cases_with[pair[1]]
            if both and may_meet(*pair):
                self._meet(pair, both)
        self.cases += cases

    def _meet(self, pair: Pair, both: int) -> None:
        self.pairs[pair] += both.bit_count()
        if self.pairs[pair] == 1:
            # The case's number in the campaign: cases before this batch plus the bit's number.
            self._alone[pair] = self.cases + both.bit_length()
        else:
            self._alone.pop(pair, None)  # Met more than once.

    def never(self, names: Collection[str]) -> list[str]:
        """Return the features that no case had.

        Args:
            names: Possible features.
        """
        return [name for name in names if not self.features[name]]

    def pairs_never(self, names: Collection[str]) -> list[tuple[Pair, float]]:
        """Return the pairs that no case had, each with its expected number of cases.

        The expected number assumes independent features. Pairs with the highest number come first:
        either they are impossible, or the generator has a gap.

        Args:
            names: Possible features.
        """
        met = [name for name in sorted(names) if self.features[name]]
        found = [
            (pair, self._expected(pair))
            for pair in combinations(met, 2)
            if pair not in self.pairs and may_meet(*pair)
        ]
        return sorted(found, key=lambda one: (-one[1], one[0]))

    def _expected(self, pair: Pair) -> float:
        return self.features[pair[0]] * self.features[pair[1]] / self.cases

    @property
    def outlook(self) -> Outlook | None:
        """Estimates for further cases; None before the first case."""
        if not self.cases:
            return None
        # Chao2 with bias correction: (m - 1) / m * Q1 * (Q1 - 1) / (2 * (Q2 + 1)).
        once, twice = len(self._alone), sum(count == 2 for count in self.pairs.values())
        unmet = (self.cases - 1) / self.cases * once * (once - 1) / (2 * (twice + 1))
        return Outlook(
            new_share=len(set(self._alone.values())) / self.cases,
            new_pairs=once / self.cases,
            pairs_left_min=round(unmet),
        )

    def as_dict(self) -> dict[str, object]:
        """Return the main counts for JSON."""
        outlook = self.outlook
        return {
            "cases": self.cases,
            "features": dict(sorted(self.features.items())),
            "pairs_met": len(self.pairs),
            "pairs_met_once": len(self._alone),
            "new_pair_share": outlook and outlook.new_share,
            "new_pairs_a_case": outlook and outlook.new_pairs,
            "pairs_left_min": outlook and outlook.pairs_left_min,
        }


def note_features(cases_with: dict[str, int], features: Collection[str], *, case: int) -> None:
    """Record a case's features in bit masks, where bit i stands for case i.

    Args:
        cases_with: Bit masks by feature; changed in place.
        features: Features from `features_of`.
        case: Index of the case in the batch.
    """
    # A batch's bit masks take a few kilobytes, and `&` gives the cases with two features.
    for name in features:
        cases_with[name] = cases_with.get(name, 0) | 1 << case


def pairs_of(features: Collection[str]) -> Iterator[Pair]:
    """Return the feature pairs of a case."""
    return (pair for pair in combinations(sorted(features), 2) if may_meet(*pair))


def covering(cases: Sequence[Scenario], *, labels: Sequence[str]) -> list[int]:
    """Choose a small subset of cases with every feature, pair, fault, expected finding and label.

    Args:
        cases: Valid cases.
        labels: Label per case, such as its file. Each label keeps at least one case.

    Returns:
        Ascending indices of the chosen cases; see [Note: covering subset].
    """
    items = [_items(case, label) for case, label in zip(cases, labels, strict=True)]
    missing = set().union(*items)
    # Gains only decrease as cases are chosen, so the top entry is the best if its gain is current.
    gains = [(-len(each), index) for index, each in enumerate(items)]
    heapq.heapify(gains)
    chosen = []
    while missing:
        gain, index = heapq.heappop(gains)
        new = items[index] & missing
        if -gain == len(new):
            chosen.append(index)
            missing -= new
        else:
            heapq.heappush(gains, (-len(new), index))
    return sorted(chosen)


def _items(case: Scenario, label: str) -> set[tuple[str, ...]]:
    """Return a case's items to cover: features, pairs, label, target, faults, finding."""
    features = sorted(features_of(case))
    items: set[tuple[str, ...]] = {(name,) for name in features}
    items |= {pair for pair in combinations(features, 2) if may_meet(*pair)}
    items |= {("fault", fault.kind) for fault in case.faults}
    finding = case.expect.finding or "none"
    return items | {("label", label), ("target", case.system.target), ("finding", finding)}
