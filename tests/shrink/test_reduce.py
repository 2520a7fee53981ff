"""The search for a smaller case, with predicates that need no world."""

import math
from dataclasses import replace

import pytest

from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import OptimizerSpec
from zero_sim.shrink import Limits, Size, shrink, size_of
from zero_sim.shrink.candidates import PASSES
from zero_sim.shrink.size import order_of

LARGE = """
schema = 1
[model]
name = "params"
dtype = "bf16"
shapes = [[3, 4], [0], [5], [7], [2]]
freeze = [{ param = "p2", start = 0, stop = 1 }]
[world]
size = 6
timing = "hostile"
schedule = "random"
[topology]
tp = 2
shared = ["3"]
[data]
uneven_rows = true
[data.nan]
step = 3
rank = 3
[system]
bucket_elems = 9
redundancy = 3
divide_by = "tokens"
[optimizer]
name = "rmsprop"
momentum = 0.9
groups = [{ match = "p1", lr = 0.1 }, { match = "3", lr = 0.2 }]
[optimizer.loss_scale]
initial = 64.0
[run]
steps = 4
micro_batches = 3
seed = 17
[reload]
step = 2
world_size = 4
redundancy = 2
"""
MOE = """
schema = 1
[model]
name = "moe"
hidden = 3
experts = 4
[world]
size = 8
[topology]
ep = 4
[system]
redundancy = 2
"""


def case(toml=LARGE):
    (scenario,) = parse_cases(toml, source="x", stem="x")
    return scenario


def elems_of(scenario):
    return [math.prod(shape) for shape in scenario.model.shapes or ()]


def is_cut(scenario):
    return scenario.world.size >= 2 and any(elems >= 2 for elems in elems_of(scenario))


def test_what_any_case_has_shrinks_to_the_least_case():
    small = shrink(case(), fails=lambda scenario: True)
    assert small.complete
    assert (small.size.ranks, small.size.params, small.size.steps, small.size.features) == (
        1, 1, 1, 0,
    )  # fmt: skip


def test_a_case_without_elements_is_not_tried():
    """Nothing would be computed in it, and so nothing could be wrong."""
    tried = []

    def fails(scenario):
        tried.append(sum(elems_of(scenario)))
        return True

    assert shrink(case(), fails=fails).size.elements == min(tried) == 1


def test_a_cut_param_needs_two_ranks_and_one_param_of_two_elements():
    small = shrink(case(), fails=is_cut)
    assert small.size == Size(ranks=2, params=1, elements=2, steps=1, features=0)
    assert small.scenario.run.seed == 0


def test_two_features_that_need_each_other_stay():
    def fails(scenario):
        return scenario.reload is not None and scenario.system.bucket_elems is not None

    small = shrink(case(), fails=fails)
    assert small.size == Size(ranks=1, params=1, elements=1, steps=2, features=2)
    assert small.scenario.system.bucket_elems == 1


def test_a_pair_of_numbers_goes_by_itself():
    """Betas are a value like any other, though a tuple holds them."""
    spec = OptimizerSpec(clip_norm=0.5, betas=(0.5, 0.75))
    small = shrink(
        replace(case(), optimizer=spec), fails=lambda each: each.optimizer.clip_norm is not None
    )
    assert small.scenario.optimizer.betas == (0.9, 0.999)


def test_a_group_follows_its_param():
    def fails(scenario):
        named = {f"p{index}": n for index, n in enumerate(elems_of(scenario))}
        return any(
            elems >= 5 and any(name.endswith(group.match) for group in scenario.optimizer.groups)
            for name, elems in named.items()
        )

    small = shrink(case(), fails=fails)
    assert (small.scenario.model.shapes, len(small.scenario.optimizer.groups)) == (((5,),), 1)


def test_experts_stay_where_they_matter():
    small = shrink(case(MOE), fails=lambda scenario: scenario.topology.ep > 1)
    assert (small.scenario.topology.ep, small.scenario.world.size) == (2, 2)
    assert (small.scenario.model.hidden, small.scenario.model.experts) == (1, 2)


@pytest.mark.parametrize("name", ["unusual", "mlp"])
def test_ranks_that_begin_apart_do_so_with_a_plainer_model(name):
    model = f'{{ name = "{name}", distinct_start = true }}'
    (start,) = parse_cases(f"schema = 1\nmodel = {model}", source="x", stem="x")
    small = shrink(start, fails=lambda case: case.model.distinct_start).scenario
    assert (small.model.name, small.model.shapes) == ("params", ((1,),))


def test_two_cells_of_one_rank_are_traded_for_a_network():
    """What needs two parts of a model needs no model that has them by itself."""
    small = shrink(
        case(MOE),
        fails=lambda case: case.topology.ep > 1 or case.topology.pp * case.topology.tp > 1,
    )
    assert small.size == Size(ranks=2, params=1, elements=1, steps=1, features=1)


def test_a_watch_with_something_in_flight_is_traded_for_all_other_features():
    def fails(scenario):
        watched = scenario.world.races and scenario.system.bucket_elems is not None
        return watched or (scenario.optimizer.name == "rmsprop" and scenario.run.micro_batches == 3)

    small = shrink(case(), fails=fails)
    assert (small.scenario.world.races, small.scenario.system.bucket_elems) == (True, 1)
    assert small.size.features == 2


def test_a_feature_may_go_with_another_draw_of_the_data():
    """Here it was there for its rounding alone, which another seed has too."""

    def fails(scenario):
        grouped, seed = bool(scenario.optimizer.groups), scenario.run.seed
        return scenario.model.dtype == "bf16" and (seed == 17 if grouped else seed == 21)

    small = shrink(case(), fails=fails)
    assert (small.scenario.optimizer.groups, small.scenario.run.seed) == ((), 21)


def test_what_rounds_in_some_draws_is_looked_for_in_one_element():
    def fails(scenario):
        elems = sum(elems_of(scenario))
        rounds = elems and scenario.optimizer.lr == 0.1 and scenario.run.seed == 19
        return scenario.world.size > 2 and (elems > 20 or rounds)

    small = shrink(case(), fails=fails)
    assert (small.size.ranks, small.size.params, small.size.elements) == (3, 1, 1)


def test_a_world_that_only_a_reload_has_becomes_the_only_one():
    def fails(scenario):
        after = scenario.reload
        size = scenario.world.size if after is None else after.world_size or scenario.world.size
        return size in (2, 4)

    small = shrink(case(), fails=fails)
    assert small.scenario.reload is None
    assert small.scenario.world.size == 2


def test_only_valid_and_smaller_cases_are_tried_and_each_once():
    tried = []

    def fails(scenario):
        assert not check_scenario(scenario)
        tried.append(scenario)
        return is_cut(scenario)

    start = case()
    small = shrink(start, fails=fails)
    assert small.cases == len(tried) == len(set(tried))
    assert start not in tried
    assert all(order_of(scenario) < order_of(start) for scenario in tried)


def test_nothing_smaller_that_would_be_tried_fails():
    small = shrink(case(), fails=is_cut)
    assert not any(
        is_cut(candidate)
        for candidates in PASSES
        for candidate in candidates(small.scenario)
        if order_of(candidate) < order_of(small.scenario) and not check_scenario(candidate)
    )


def test_two_searches_are_one():
    assert shrink(case(), fails=is_cut).scenario == shrink(case(), fails=is_cut).scenario


def test_one_that_shrank_does_not_shrink_again():
    small = shrink(case(), fails=is_cut)
    assert shrink(small.scenario, fails=is_cut).scenario == small.scenario


def test_a_case_that_cannot_be_smaller_is_what_it_was():
    start = case()
    small = shrink(start, fails=lambda scenario: False)
    assert (small.scenario, small.size) == (start, size_of(start))


@pytest.mark.parametrize(
    ("limits", "stopped"), [(Limits(cases=3), "cases"), (Limits(seconds=0.0), "seconds")]
)
def test_a_limit_ends_it_and_says_so(limits, stopped):
    small = shrink(case(), fails=lambda scenario: False, limits=limits)
    assert (small.complete, small.stopped) == (False, stopped)
    assert small.cases <= 3


def test_whoever_asked_can_end_it():
    small = shrink(case(), fails=lambda scenario: True, is_over=lambda: True)
    assert (small.scenario, small.stopped, small.cases) == (case(), "asked", 0)


def test_a_case_that_may_not_be_run_counts_for_nothing():
    small = shrink(case(), fails=lambda scenario: True, may_ask=lambda scenario: False)
    assert (small.scenario, small.complete, small.cases) == (case(), True, 0)


READERS = """
schema = 1
world = { size = 4 }
run = { micro_batches = 3 }

[model]
name = "params"
shapes = [[5], [2, 2], [], [7], [1]]
tied = ["p4", "p1"]
unused = ["p3"]
one_rank = [{ param = "p2", rank = 3, micro_batch = 2 }]
"""


def test_a_tied_param_shrinks_to_one_of_one_element():
    small = shrink(case(READERS), fails=lambda scenario: bool(scenario.model.tied))
    assert (small.scenario.model.tied, small.scenario.model.shapes) == (("p0",), ((1,),))
    assert small.size == Size(ranks=1, params=1, elements=1, steps=1, features=1)


def test_an_unused_param_shrinks_to_one_beside_one_that_is_read():
    small = shrink(case(READERS), fails=lambda scenario: bool(scenario.model.unused))
    assert len(small.scenario.model.unused) == 1
    assert small.size == Size(ranks=1, params=2, elements=1, steps=1, features=1)


def test_a_param_of_one_rank_shrinks_to_two_ranks_or_two_micro_batches():
    small = shrink(case(READERS), fails=lambda scenario: bool(scenario.model.one_rank))
    (one,) = small.scenario.model.one_rank
    assert (small.size.ranks, small.size.params, one.rank) == (1, 2, 0)
    assert one.micro_batch is not None
    small = shrink(
        case(READERS), fails=lambda scenario: scenario.model.one_rank and scenario.world.size > 1
    )
    (one,) = small.scenario.model.one_rank
    assert (small.size.ranks, small.size.params) == (2, 2)
    assert (one.rank, one.micro_batch) == (0, None)


@pytest.mark.parametrize("field", ["tied", "unused", "one_rank"])
def test_a_network_of_awkward_params_becomes_bare_ones(field):
    (start,) = parse_cases('schema = 1\nmodel = { name = "unusual" }', source="x", stem="x")

    def fails(scenario):
        is_there = scenario.model.name == "unusual" or bool(getattr(scenario.model, field))
        # On one rank nobody else reads what one reads.
        return is_there and scenario.world.size > 1

    small = shrink(start, fails=fails).scenario
    assert small.model.name == "params"
    assert len(getattr(small.model, field)) == 1
