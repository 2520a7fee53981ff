"""Coverage of a campaign: which features its cases had, alone and in pairs, and what is to come.

[Note: what is not yet covered]
A case is a sample of pairs of features. Drawn cases follow from one distribution, so the last of
them is as likely as any other to have a pair that none of the others has: the share of cases that
have such a pair is an estimate of how likely the next one brings a new pair. That is the
estimator of Good and Turing, left one out, for whole cases (Good, The population frequencies of
species and the estimation of population parameters, Biometrika 40, 1953). Beside it stand the
number of new pairs that the next case brings, pairs met once over cases, and the least number of
pairs that are there to be met, Chao's bound in the form that Q2 = 0 does not trouble (Chao,
Estimating the population size for capture-recapture data with unequal catchability, Biometrics
43, 1987; Chao and Colwell call it Chao2).

[Note: few cases that have all]
The choice is greedy: the case with the most features and pairs that no chosen case has yet, and of
equal ones the first. Greedy covers exceed the smallest by at most a factor of ln(items) + 1
(Chvatal, A greedy heuristic for the set-covering problem, Mathematics of Operations Research 4,
1979).
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
"""Two features, in the order of the alphabet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What further cases of a campaign can be expected to bring."""

    new_share: float
    """How likely the next case has a pair that no case has had."""
    new_pairs: float
    """How many such pairs it has, on average."""
    pairs_left_min: int
    """At least about so many pairs can be met and have not been."""


@dataclass(kw_only=True, slots=True)
class Coverage:
    """How many cases had each feature and each pair of them."""

    cases: int = 0
    """Those of which the features are known."""
    features: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    _alone: dict[Pair, int] = field(default_factory=dict)
    """Of each pair that was met once, in which case."""

    def take(self, cases_with: Mapping[str, int], *, cases: int) -> None:
        """Add the cases of a batch; the order of batches does not matter.

        Args:
            cases_with: By feature, which of them have it, as `note_features` writes it down; what
                is no feature, as of a corpus that another version wrote, is left out.
            cases: How many they are.
        """
        names = sorted(filter(is_feature, cases_with))
        if not names:
            return
        for name in names:
            self.features[name] += cases_with[name].bit_count()
        for pair in combinations(names, 2):
            both = cases_with[pair[0]] & cases_with[pair[1]]
            if both and may_meet(*pair):
                self._meet(pair, both)
        self.cases += cases

    def _meet(self, pair: Pair, both: int) -> None:
        self.pairs[pair] += both.bit_count()
        if self.pairs[pair] == 1:
            self._alone[pair] = self.cases + both.bit_length()
        else:
            self._alone.pop(pair, None)

    def never(self, names: Collection[str]) -> list[str]:
        """Those features that no case had.

        Args:
            names: Features that could be.
        """
        return [name for name in names if not self.features[name]]

    def pairs_never(self, names: Collection[str]) -> list[tuple[Pair, float]]:
        """Pairs that no case had, and how many would if each feature were drawn by itself.

        Those that one would expect most often come first: they cannot be, or something is wrong
        with how cases are drawn.

        Args:
            names: Features that could be.
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
        """What further cases can be expected to bring; nothing is known before the first one."""
        if not self.cases:
            return None
        once, twice = len(self._alone), sum(count == 2 for count in self.pairs.values())
        unmet = (self.cases - 1) / self.cases * once * (once - 1) / (2 * (twice + 1))
        return Outlook(
            new_share=len(set(self._alone.values())) / self.cases,
            new_pairs=once / self.cases,
            pairs_left_min=round(unmet),
        )

    def as_dict(self) -> dict[str, object]:
        """The counts in short, ready for JSON."""
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
    """Write down which features a case has: a bit a case, the first case the lowest one.

    So a batch takes a few kilobytes, and what two features have in common is one operation.

    Args:
        cases_with: By feature; changed.
        features: What `features_of` gave for the case.
        case: Its place in the batch.
    """
    for name in features:
        cases_with[name] = cases_with.get(name, 0) | 1 << case


def pairs_of(features: Collection[str]) -> Iterator[Pair]:
    """The pairs that the features of one case make."""
    return (pair for pair in combinations(sorted(features), 2) if may_meet(*pair))


def covering(cases: Sequence[Scenario], *, labels: Sequence[str]) -> list[int]:
    """Choose few cases that have every feature, pair of features, fault, expectation and label.

    Args:
        cases: Valid cases.
        labels: One of each case, such as its file. Each label keeps a case.

    Returns:
        Indices of the chosen cases, in order.
    """
    items = [_items(case, label) for case, label in zip(cases, labels, strict=True)]
    missing = set().union(*items)
    # Gains only fall while cases are chosen, so an entry whose gain is still right is the best.
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
    """Features and pairs of features; label, target, faults and expected finding one by one."""
    features = sorted(features_of(case))
    items: set[tuple[str, ...]] = {(name,) for name in features}
    items |= {pair for pair in combinations(features, 2) if may_meet(*pair)}
    items |= {("fault", fault.kind) for fault in case.faults}
    finding = case.expect.finding or "none"
    return items | {("label", label), ("target", case.system.target), ("finding", finding)}
