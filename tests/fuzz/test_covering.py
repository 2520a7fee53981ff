"""Few cases keep what many have: features, pairs of them, faults, expected findings, labels."""

from dataclasses import replace
from pathlib import Path

from zero_sim.fuzz.coverage import pairs_of
from zero_sim.fuzz.covering import covering
from zero_sim.fuzz.features import features_of
from zero_sim.scenario.discover import discover
from zero_sim.scenario.spec import ExpectSpec, FaultSpec

ROOT = Path(__file__).parents[2]
FOUND = discover((ROOT / "scenarios" / "features" / "redundancy.toml",)).cases
CASES = [case.scenario for case in FOUND]


def had_by(cases):
    """Features and pairs of some cases."""
    features = [features_of(case) for case in cases]
    return set().union(*features), {pair for each in features for pair in pairs_of(each)}


def test_every_feature_and_pair_stays():
    chosen = covering(CASES, labels=[""] * len(CASES))
    assert len(chosen) < len(CASES) / 2
    assert chosen == sorted(set(chosen))
    assert had_by([CASES[index] for index in chosen]) == had_by(CASES)


def test_every_label_stays():
    assert covering([CASES[0]] * 4, labels=["a", "b", "b", "a"]) == [0, 1]


def test_every_fault_and_expected_finding_stays():
    case = CASES[0]
    faulty = [
        replace(case, faults=(FaultSpec(kind=kind, rank=0),), expect=ExpectSpec(finding=finding))
        for kind, finding in (("crash", "world"), ("slow", None), ("crash", None))
    ]
    assert covering([*faulty, case], labels=[""] * 4) == [0, 1]


def test_nothing_comes_of_nothing():
    assert covering([], labels=[]) == []
