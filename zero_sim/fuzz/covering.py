"""Few cases that have every feature, and every pair of features, of many.

The choice is greedy: the case with the most features and pairs that no chosen case has yet, and of
equal ones the first. Greedy covers exceed the smallest by at most a factor of ln(items) + 1
(Chvatal, A greedy heuristic for the set-covering problem, Mathematics of Operations Research 4,
1979).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations

from zero_sim.fuzz.features import features_of, may_meet
from zero_sim.scenario.spec import Scenario


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
