"""Coverage: counts of features and pairs, and an estimate of the remaining ones."""

from dataclasses import replace
from itertools import combinations, islice
from pathlib import Path
from random import Random

from zero_sim.fuzz.coverage import Coverage, covering, note_features, pairs_of
from zero_sim.fuzz.features import every_feature, features_of
from zero_sim.scenario.discover import discover
from zero_sim.scenario.spec import ExpectSpec, FaultSpec

STAGE, RACES, LAZY = "system.stage=2", "world.races=true", "world.timing=lazy"
APART = [name for name in every_feature() if name.startswith("layout: ")]


def covered(*batches):
    """Return the coverage of batches of cases, each case a list of features."""
    coverage = Coverage()
    for cases in batches:
        cases_with = {}
        for case, features in enumerate(cases):
            note_features(cases_with, features, case=case)
        coverage.take(cases_with, cases=len(cases))
    return coverage


def test_features_and_pairs_are_counted():
    coverage = covered([[STAGE, RACES], [STAGE], [STAGE, LAZY, RACES]])
    assert coverage.cases == 3
    assert coverage.features == {STAGE: 3, RACES: 2, LAZY: 1}
    assert coverage.pairs == {(STAGE, RACES): 2, (STAGE, LAZY): 1, (RACES, LAZY): 1}


def test_batch_counts_equal_counts_case_by_case():
    random = Random(3)
    cases = [random.sample(every_feature(), 20) for _ in range(60)]
    coverage = covered(cases[:50], cases[50:])
    expected = [pair for features in cases for pair in pairs_of(features)]
    assert sum(coverage.pairs.values()) == len(expected)
    assert all(count == expected.count(pair) for pair, count in coverage.pairs.items())


def test_order_of_batches_does_not_matter():
    one, other = [[STAGE, RACES], [STAGE]], [[STAGE, RACES, LAZY]]
    assert covered(one, other).as_dict() == covered(other, one).as_dict()


def test_batch_without_features_counts_nothing():
    coverage = covered([[STAGE]])
    coverage.take({}, cases=50)
    assert coverage.cases == 1


def test_unknown_feature_is_ignored():
    coverage = covered([["\x1b[31m", STAGE]])
    assert coverage.features == {STAGE: 1}


def test_missing_features_and_pairs_are_listed():
    coverage = covered([[STAGE, RACES], [STAGE, LAZY], [STAGE]])
    assert coverage.never([STAGE, RACES, "reload"]) == ["reload"]
    assert coverage.pairs_never([STAGE, RACES, LAZY, "reload"]) == [((RACES, LAZY), 1 / 3)]


def test_missing_pairs_are_ordered_by_expected_count():
    cases = [APART[:1]] * 6 + [APART[1:2]] * 4 + [APART[2:3]] * 2
    never = covered(cases).pairs_never(APART[:3])
    assert [expected for _, expected in never] == [2.0, 1.0, 2 / 3]


class TestOutlook:
    def test_no_outlook_before_the_first_case(self):
        assert Coverage().outlook is None

    def test_new_share_is_one_if_every_case_has_its_own_pair(self):
        cases = [list(pair) for pair in islice(combinations(APART, 2), 8)]
        outlook = covered(cases).outlook
        assert (outlook.new_share, outlook.new_pairs) == (1.0, 1.0)

    def test_new_share_is_zero_if_no_pair_occurs_once(self):
        outlook = covered([[STAGE, RACES]] * 5).outlook
        assert (outlook.new_share, outlook.new_pairs, outlook.pairs_left_min) == (0, 0, 0)

    def test_case_with_several_new_pairs_counts_once(self):
        outlook = covered([[STAGE, RACES, LAZY], [STAGE], [STAGE], [STAGE]]).outlook
        assert (outlook.new_share, outlook.new_pairs) == (0.25, 0.75)

    def test_pair_repeated_in_another_batch_is_not_new(self):
        once = covered([[STAGE, RACES]]).outlook
        again = covered([[STAGE, RACES]], [[STAGE, RACES]]).outlook
        assert (once.new_share, again.new_share) == (1.0, 0.0)

    def test_new_share_equals_leave_one_out(self):
        random = Random(7)
        # Frequent and rare features, as in swarm testing.
        cases = [[n for i, n in enumerate(APART) if random.random() < 0.8**i] for _ in range(40)]
        new = 0
        for place, features in enumerate(cases):
            others = covered(cases[:place] + cases[place + 1 :])
            new += any(pair not in others.pairs for pair in pairs_of(features))
        assert 0 < new < 40
        assert covered(cases[:25], cases[25:]).outlook.new_share == new / 40

    def test_missing_pairs_are_estimated_from_pairs_seen_once_and_twice(self):
        once = [list(pair) for pair in combinations(APART[:4], 2)]
        twice = [APART[4:6], APART[4:6]]
        # Six pairs once and one twice, in eight cases: 7/8 x 6 x 5 / (2 x 2).
        assert covered(once + twice).outlook.pairs_left_min == 7


ROOT = Path(__file__).parents[2]
FOUND = discover((ROOT / "scenarios" / "features" / "redundancy.toml",)).cases
CASES = [case.scenario for case in FOUND]


def had_by(cases):
    """Return features and pairs of some cases."""
    features = [features_of(case) for case in cases]
    return set().union(*features), {pair for each in features for pair in pairs_of(each)}


def test_every_feature_and_pair_is_kept():
    chosen = covering(CASES, labels=[""] * len(CASES))
    assert len(chosen) < len(CASES) / 2
    assert chosen == sorted(set(chosen))
    assert had_by([CASES[index] for index in chosen]) == had_by(CASES)


def test_every_label_is_kept():
    assert covering([CASES[0]] * 4, labels=["a", "b", "b", "a"]) == [0, 1]


def test_every_fault_and_expected_finding_is_kept():
    case = CASES[0]
    faulty = [
        replace(case, faults=(FaultSpec(kind=kind, rank=0),), expect=ExpectSpec(finding=finding))
        for kind, finding in (("crash", "world"), ("slow", None), ("crash", None))
    ]
    assert covering([*faulty, case], labels=[""] * 4) == [0, 1]


def test_no_cases_give_an_empty_choice():
    assert covering([], labels=[]) == []
