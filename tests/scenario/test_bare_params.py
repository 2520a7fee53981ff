"""Params that a loss reads, and combinations that are refused."""

from dataclasses import replace

import pytest

from zero_sim.scenario.bare_params import fitted_one_rank, unread_by, with_others
from zero_sim.scenario.fitting import without_unused
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    OneRankSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    TopologySpec,
    WorldSpec,
)

SHAPES = ((3,), (2,), (1,))


def case(*, shapes=SHAPES, name="params", size=4, run=None, data=None, **said):
    """Return a case of bare params."""
    model = {key: said.pop(key) for key in ("tied", "unused", "one_rank") if key in said}
    return Scenario(
        schema=1,
        model=ModelSpec(name=name, shapes=shapes, **model),
        world=WorldSpec(size=size),
        run=run or RunSpec(steps=2),
        data=data or DataSpec(),
        **said,
    )


def one(param="p1", rank=0, micro_batch=None):
    return OneRankSpec(param=param, rank=rank, micro_batch=micro_batch)


def problems(scenario):
    return {problem.path: str(problem) for problem in check_scenario(scenario)}


def test_loss_skips_unused_params_and_those_of_other_ranks():
    model = case(unused=("p0",), one_rank=(one("p1", 1), one("p2", 1, 0))).model
    assert unread_by(model, rank=0, micro=0) == {"p0", "p1", "p2"}
    assert unread_by(model, rank=1, micro=0) == {"p0"}
    assert unread_by(model, rank=1, micro=1) == {"p0", "p2"}


@pytest.mark.parametrize(
    "said",
    [
        {"tied": ("p0", "p2")},
        {"unused": ("p1", "p2")},
        {"one_rank": (one("p1", 3), one("p2", 0))},
        # A tied param may be read by one rank only.
        {"tied": ("p1",), "one_rank": (one("p1", 1),)},
        # A loss reads empty params too, and has a backward for them.
        {"shapes": ((0,), (2,), ()), "unused": ("p1", "p2")},
        {"one_rank": (one(micro_batch=1),), "size": 1, "run": RunSpec(micro_batches=2)},
        # After the reload there are other ranks.
        {"one_rank": (one(),), "size": 1, "reload": ReloadSpec(step=1, world_size=2)},
    ],
    ids=str,
)
def test_sound_combination_is_accepted(said):
    assert problems(case(**said)) == {}


@pytest.mark.parametrize(
    ("said", "path", "words"),
    [
        ({"tied": ("p3",)}, "model.tied[0]", "expected the name of a bare param, got 'p3'"),
        ({"unused": ("q",)}, "model.unused[0]", "Try one of p0, p1, p2."),
        ({"one_rank": (one("p9"),)}, "model.one_rank[0].param", "got 'p9'"),
        ({"tied": ("p0", "p0")}, "model.tied[1]", "expected every param once, got 'p0'"),
        ({"one_rank": (one(), one(rank=1))}, "model.one_rank[1].param", "every param once"),
        ({"unused": ("p1",), "tied": ("p1",)}, "model.unused[0]", "is also in model.tied"),
        ({"unused": ("p1",), "one_rank": (one(),)}, "model.unused[0]", "is also in model.one_rank"),
        ({"unused": ("p0", "p1", "p2")}, "model.unused", "a param that every loss reads"),
        (
            {"unused": ("p0", "p2"), "one_rank": (one(),)},
            "model.unused",
            "a param that every loss reads",
        ),
        ({"one_rank": (one(rank=4),)}, "model.one_rank[0].rank", "dp-cp group, 4, got 4"),
        ({"one_rank": (one(rank=-1),)}, "model.one_rank[0].rank", "at least 0"),
        (
            {"one_rank": (one(rank=2),), "topology": TopologySpec(pp=2)},
            "model.one_rank[0].rank",
            "dp-cp group, 2, got 2",
        ),
        (
            {"one_rank": (one(rank=3),), "reload": ReloadSpec(step=1, world_size=3)},
            "model.one_rank[0].rank",
            "before and after the checkpoint, 3, got 3",
        ),
        (
            {"one_rank": (one(micro_batch=2),), "run": RunSpec(micro_batches=2)},
            "model.one_rank[0].micro_batch",
            "less than run.micro_batches = 2, got 2",
        ),
        (
            {"one_rank": (one(micro_batch=0),)},
            "model.one_rank[0].micro_batch",
            "expected several micro-batches",
        ),
        ({"one_rank": (one(),), "size": 1}, "model.one_rank[0]", "expected another rank"),
        (
            {"one_rank": (one(),), "data": DataSpec(ranks="same")},
            "model.one_rank",
            "with data.ranks = 'same'",
        ),
    ],
    ids=str,
)
def test_unsound_combination_is_refused_with_its_reason(said, path, words):
    found = problems(case(**said))
    assert list(found) == [path]
    assert words in found[path]


@pytest.mark.parametrize("said", [{"tied": ("p0",)}, {"unused": ("p1",)}, {"one_rank": (one(),)}])
@pytest.mark.parametrize("name", ["bit-hash", "mlp"])
def test_other_models_do_not_use_these_fields(name, said):
    scenario = case(name=name, shapes=None if name == "mlp" else SHAPES, **said)
    (path,) = (f"model.{field}" for field in said)
    assert list(problems(scenario)) == [path]
    assert "only model 'params' uses it" in problems(scenario)[path]
    assert problems(without_unused(scenario)) == {}


def test_missing_rank_and_micro_batch_become_the_last_ones():
    topology, run = TopologySpec(pp=2), RunSpec(micro_batches=2)
    scenario = case(one_rank=(one(rank=3, micro_batch=5),), topology=topology, run=run)
    assert fitted_one_rank(scenario).model.one_rank == (one(rank=1, micro_batch=1),)
    after = replace(scenario, topology=TopologySpec(), reload=ReloadSpec(step=1, world_size=3))
    assert fitted_one_rank(after).model.one_rank == (one(rank=2, micro_batch=1),)


def test_one_rank_is_adapted_to_a_single_loss():
    scenario = case(one_rank=(one(micro_batch=0),), run=RunSpec(micro_batches=1))
    assert with_others(scenario).model.one_rank == (one(),)
    assert with_others(replace(scenario, world=WorldSpec(size=1))).model.one_rank == ()
    assert problems(without_unused(replace(scenario, world=WorldSpec(size=1)))) == {}
