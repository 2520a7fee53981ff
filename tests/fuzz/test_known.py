"""Known findings: whether a case shows one of them, or another cause with the same key."""

from dataclasses import replace

import pytest

from zero_sim.fuzz.known import NOTHING, Known, KnownFindings, Needs
from zero_sim.fuzz.records import Found
from zero_sim.scenario.dump import to_toml
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.shrink import Key

KEY = Key("equality.master", "optimizer", "dense", "values")
LARGE = """
schema = 1
[model]
name = "params"
dtype = "bf16"
shapes = [[4], [3]]
[world]
size = 4
[system]
redundancy = 2
[optimizer]
clip_norm = 0.5
[run]
steps = 3
"""
SMALL = """
schema = 1
[model]
name = "params"
shapes = [[1]]
[world]
size = 2
[optimizer]
clip_norm = 0.1
[run]
steps = 2
"""


def case(toml=LARGE):
    (scenario,) = parse_cases(toml, source="x", stem="x")
    return scenario


def found(toml=SMALL, *, key=KEY, complete=True, places=()):
    return Found(
        key=key, message="m", seed=0, case=0, scenario=to_toml(case(toml)), bundle="", text="",
        size="", complete=complete, places=(key.place, *places),
    )  # fmt: skip


def test_difference_in_another_manner_is_another_finding():
    assert not Known.of(found()).explains(KEY._replace(manner="zeros"), case())


def test_difference_in_another_place_is_another_finding():
    last = KEY._replace(place="last bucket")
    assert not Known.of(found()).explains(last, case())
    assert Known.of(found(places=["last bucket"])).explains(last, case())


def test_key_suffices_after_an_incomplete_search():
    assert Known.of(found(LARGE, complete=False)).explains(KEY, case(SMALL))


def test_findings_that_a_case_cannot_show_are_listed():
    """The case must not shrink through cases that can show them."""
    known = KnownFindings()
    known.add(found())
    unclipped = case(LARGE.replace("clip_norm = 0.5", "lr = 0.1"))
    assert known.others(KEY, unclipped) == known.findings
    assert known.others(KEY, case()) == []


def test_further_findings_of_a_frequent_key_count_as_known():
    known = KnownFindings()
    for size in (3, 4, 5, 6):
        assert not known.explain(KEY, case(SMALL))
        known.add(found(SMALL.replace("size = 2", f"size = {size}")))
    assert known.explain(KEY, case(SMALL))
    assert not known.explain(KEY._replace(manner="zeros"), case(SMALL))


SMALLEST = Scenario(
    schema=1,
    model=ModelSpec(name="params", shapes=((2,),)),
    world=WorldSpec(size=2),
    system=SystemSpec(redundancy=2),
    run=RunSpec(steps=2),
)
LARGER = Scenario(
    schema=1,
    model=ModelSpec(name="params", shapes=((4,), (3,)), dtype="bf16"),
    world=WorldSpec(size=4),
    system=SystemSpec(redundancy=4, bucket_elems=3),
    optimizer=OptimizerSpec(lr=0.5),
    run=RunSpec(steps=3),
)


def test_larger_case_with_other_values_meets_the_needs():
    assert Needs.of(SMALLEST).met_by(LARGER)
    assert Needs.of(SMALLEST).met_by(SMALLEST)


@pytest.mark.parametrize(
    "less",
    [
        {"world": WorldSpec(size=1)},
        {"run": RunSpec(steps=1)},
        {"system": SystemSpec(bucket_elems=3)},
        {"model": ModelSpec(name="params", shapes=((1,),))},
    ],
)
def test_case_without_a_needed_setting_does_not_meet_them(less):
    assert not Needs.of(SMALLEST).met_by(replace(LARGER, **less))


def test_model_and_learning_rate_do_not_matter():
    needs = Needs.of(replace(SMALLEST, optimizer=OptimizerSpec(lr=0.1)))
    assert needs.met_by(replace(LARGER, optimizer=OptimizerSpec(), model=ModelSpec(name="mlp")))


def test_no_needs_are_met_by_any_case():
    assert NOTHING.met_by(replace(SMALLEST, model=ModelSpec(name="params", shapes=())))
