"""Ownership of elements, as ranks report it one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_sim.judge.facts import Facts
from zero_sim.judge.ownership import Ownership
from zero_sim.reference import MemoryLayout
from zero_sim.scenario.spec import ModelSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.targets import Place

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="mlp"),
    world=WorldSpec(size=2),
    system=SystemSpec(stage=1),
)


def facts(start, stop):
    return Facts(
        places=(Place(param="w", start=start, stop=stop),),
        addresses={"w": MemoryLayout(64, (1,))},
        shapes={"w": (4,)},
    )


def heard(*spans, held=(frozenset("w"),) * 2):
    ownership = Ownership(CASE, held=held)
    for rank, span in enumerate(spans):
        ownership.note_facts(rank, facts(*span))
    return ownership


def checks(ownership):
    return [found.check for found in ownership.check(0, has_parts=True)]


def test_facts_are_complete_when_every_rank_reported():
    assert not heard((0, 2)).are_all_there
    assert heard((0, 2), (2, 4)).are_all_there


def test_elements_owned_once_are_no_finding():
    assert checks(heard((0, 2), (2, 4))) == []


def test_unowned_elements_are_found():
    assert checks(heard((0, 2), (3, 4))) == ["invariant.ownership"]


def replicated(*said, size=2):
    ownership = Ownership(replace(CASE, world=WorldSpec(size=size)), held=(frozenset("w"),) * size)
    for rank, replicas in enumerate(said):
        told = facts(0, 4)
        places = tuple(replace(place, replicas=replicas) for place in told.places)
        ownership.note_facts(rank, replace(told, places=places))
    return ownership


def test_replicated_part_counts_once():
    ownership = replicated(2, 2)
    assert checks(ownership) == []
    assert [len(held) for held in ownership.holdings()] == [1, 0]


@pytest.mark.parametrize(
    ("said", "words"),
    [((2, 2, 2), "ranks 0, 1 and 2, with replicas = 2"), ((2, 3, 3), "with replicas = 2 and 3")],
)
def test_wrong_number_of_replicas_is_found(said, words):
    (found,) = replicated(*said, size=3).check(0, has_parts=True)
    assert words in found.message


def test_wrong_ownership_names_the_declarations():
    (finding,) = heard((0, 4), (0, 4)).check(0, has_parts=True)
    assert "with system.redundancy = 1, all ranks share it" in finding.message
    assert "declares Capabilities(stages=(0,))" in finding.message
    assert "declares follows=('system.redundancy',)" in finding.message


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([(0, 4)] * 3, ["[0, 4) belong to ranks 0, 1 and 2"]),
        ([(0, 3), (2, 4), (4, 4)], ["[2, 3) belong to ranks 0 and 1"]),
        ([(0, 2), (1, 2), (3, 4)], ["[1, 2) belong to ranks 0 and 1", "[2, 3) of 4 belong to no"]),
        ([(0, 3), (3, 4), (4, 6)], ["rank 2 owns elements up to 6 of a param with 4"]),
    ],
)
def test_owners_are_listed_once_per_range(spans, said):
    case = replace(CASE, world=WorldSpec(size=3))
    ownership = Ownership(case, held=(frozenset("w"),) * 3)
    for rank, span in enumerate(spans):
        ownership.note_facts(rank, facts(*span))
    found = list(ownership.check(0, has_parts=True))
    assert len(found) == len(said)
    assert all(words in each.message for words, each in zip(said, found, strict=True))
    assert all("to return each element once" in each.message for each in found)


def test_shard_at_stage_0_names_the_declaration():
    ownership = Ownership(replace(CASE, system=SystemSpec(stage=0)), held=(frozenset("w"),) * 2)
    for rank, span in enumerate([(0, 2), (2, 4)]):
        ownership.note_facts(rank, facts(*span))
    first, _ = ownership.check(0, has_parts=True)
    assert "elements [2, 4) of 4 belong to no rank" in first.message
    assert "every rank keeps all optimizer state" in first.message
    assert "declares Capabilities(stages=(1,))" in first.message


def test_unreported_parts_are_not_checked():
    assert list(heard((0, 2), (3, 4)).check(0, has_parts=False)) == []


def test_ranks_with_the_same_params_share_them():
    held = (frozenset({"w", "a"}), frozenset({"w", "b"}))
    ownership = heard(held=held)
    assert ownership.sharings == [
        ((0,), frozenset("a")),
        ((0, 1), frozenset("w")),
        ((1,), frozenset("b")),
    ]
