"""Search for a smaller case, with predicates that need no world."""

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


def test_predicate_true_for_all_shrinks_to_the_least_case():
    small = shrink(case(), fails=lambda scenario: True)
    assert small.complete
    assert (small.size.ranks, small.size.params, small.size.steps, small.size.features) == (
        1, 1, 1, 0,
    )  # fmt: skip


def test_case_without_elements_is_not_tried():
    """It computes nothing, so nothing could be wrong."""
    tried = []

    def fails(scenario):
        tried.append(sum(elems_of(scenario)))
        return True

    assert shrink(case(), fails=fails).size.elements == min(tried) == 1


def test_sharded_param_needs_two_ranks_and_two_elements():
    small = shrink(case(), fails=is_cut)
    assert small.size == Size(ranks=2, params=1, elements=2, steps=1, features=0)
    assert small.scenario.run.seed == 0


def test_two_features_that_need_each_other_stay():
    def fails(scenario):
        return scenario.reload is not None and scenario.system.bucket_elems is not None

    small = shrink(case(), fails=fails)
    assert small.size == Size(ranks=1, params=1, elements=1, steps=2, features=2)
    assert small.scenario.system.bucket_elems == 1


def test_pair_of_numbers_is_removed_as_one_value():
    """For example betas, although they are a tuple."""
    spec = OptimizerSpec(clip_norm=0.5, betas=(0.5, 0.75))
    small = shrink(
        replace(case(), optimizer=spec), fails=lambda each: each.optimizer.clip_norm is not None
    )
    assert small.scenario.optimizer.betas == (0.9, 0.999)


def test_group_follows_its_param():
    def fails(scenario):
        named = {f"p{index}": n for index, n in enumerate(elems_of(scenario))}
        return any(
            elems >= 5 and any(name.endswith(group.match) for group in scenario.optimizer.groups)
            for name, elems in named.items()
        )

    small = shrink(case(), fails=fails)
    assert (small.scenario.model.shapes, len(small.scenario.optimizer.groups)) == (((5,),), 1)


def test_experts_stay_if_needed():
    small = shrink(case(MOE), fails=lambda scenario: scenario.topology.ep > 1)
    assert (small.scenario.topology.ep, small.scenario.world.size) == (2, 2)
    assert (small.scenario.model.hidden, small.scenario.model.experts) == (1, 2)


@pytest.mark.parametrize("name", ["unusual", "mlp"])
def test_distinct_start_shrinks_to_bare_params(name):
    model = f'{{ name = "{name}", distinct_start = true }}'
    (start,) = parse_cases(f"schema = 1\nmodel = {model}", source="x", stem="x")
    small = shrink(start, fails=lambda case: case.model.distinct_start).scenario
    assert (small.model.name, small.model.shapes) == ("params", ((1,),))


def test_experts_are_traded_for_two_bare_parts():
    """Two parts of a model do not need a model with experts."""
    small = shrink(
        case(MOE),
        fails=lambda case: case.topology.ep > 1 or case.topology.pp * case.topology.tp > 1,
    )
    assert small.size == Size(ranks=2, params=1, elements=1, steps=1, features=1)


def test_races_with_buckets_are_traded_for_all_other_features():
    def fails(scenario):
        watched = scenario.world.races and scenario.system.bucket_elems is not None
        return watched or (scenario.optimizer.name == "rmsprop" and scenario.run.micro_batches == 3)

    small = shrink(case(), fails=fails)
    assert (small.scenario.world.races, small.scenario.system.bucket_elems) == (True, 1)
    assert small.size.features == 2


def test_feature_may_be_removed_with_another_seed():
    """The feature only changed the rounding, as another seed does."""

    def fails(scenario):
        grouped, seed = bool(scenario.optimizer.groups), scenario.run.seed
        return scenario.model.dtype == "bf16" and (seed == 17 if grouped else seed == 21)

    small = shrink(case(), fails=fails)
    assert (small.scenario.optimizer.groups, small.scenario.run.seed) == ((), 21)


def test_rounding_is_searched_in_one_element():
    def fails(scenario):
        elems = sum(elems_of(scenario))
        rounds = elems and scenario.optimizer.lr == 0.1 and scenario.run.seed == 19
        return scenario.world.size > 2 and (elems > 20 or rounds)

    small = shrink(case(), fails=fails)
    assert (small.size.ranks, small.size.params, small.size.elements) == (3, 1, 1)


def test_world_after_a_reload_becomes_the_only_one():
    def fails(scenario):
        after = scenario.reload
        size = scenario.world.size if after is None else after.world_size or scenario.world.size
        return size in (2, 4)

    small = shrink(case(), fails=fails)
    assert small.scenario.reload is None
    assert small.scenario.world.size == 2


def test_only_valid_smaller_cases_are_tried_once_each():
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


def test_no_smaller_candidate_fails():
    small = shrink(case(), fails=is_cut)
    assert not any(
        is_cut(candidate)
        for candidates in PASSES
        for candidate in candidates(small.scenario)
        if order_of(candidate) < order_of(small.scenario) and not check_scenario(candidate)
    )


def test_search_is_deterministic():
    assert shrink(case(), fails=is_cut).scenario == shrink(case(), fails=is_cut).scenario


def test_shrunk_case_does_not_shrink_again():
    small = shrink(case(), fails=is_cut)
    assert shrink(small.scenario, fails=is_cut).scenario == small.scenario


def test_case_that_cannot_shrink_is_unchanged():
    start = case()
    small = shrink(start, fails=lambda scenario: False)
    assert (small.scenario, small.size) == (start, size_of(start))


@pytest.mark.parametrize(
    ("limits", "stopped"), [(Limits(cases=3), "cases"), (Limits(seconds=0.0), "seconds")]
)
def test_limit_stops_the_search_and_is_reported(limits, stopped):
    small = shrink(case(), fails=lambda scenario: False, limits=limits)
    assert (small.complete, small.stopped) == (False, stopped)
    assert small.cases <= 3


def test_caller_can_stop_the_search():
    small = shrink(case(), fails=lambda scenario: True, is_over=lambda: True)
    assert (small.scenario, small.stopped, small.cases) == (case(), "interrupt", 0)


def test_case_that_may_not_run_is_not_counted():
    small = shrink(case(), fails=lambda scenario: True, may_run=lambda scenario: False)
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


def test_tied_param_shrinks_to_one_element():
    small = shrink(case(READERS), fails=lambda scenario: bool(scenario.model.tied))
    assert (small.scenario.model.tied, small.scenario.model.shapes) == (("p0",), ((1,),))
    assert small.size == Size(ranks=1, params=1, elements=1, steps=1, features=1)


def test_unused_param_shrinks_to_two_params():
    small = shrink(case(READERS), fails=lambda scenario: bool(scenario.model.unused))
    assert len(small.scenario.model.unused) == 1
    assert small.size == Size(ranks=1, params=2, elements=1, steps=1, features=1)


def test_param_of_one_rank_shrinks_to_two_ranks_or_micro_batches():
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
def test_unusual_model_shrinks_to_bare_params(field):
    (start,) = parse_cases('schema = 1\nmodel = { name = "unusual" }', source="x", stem="x")

    def fails(scenario):
        is_there = scenario.model.name == "unusual" or bool(getattr(scenario.model, field))
        # A single rank has no other that skips the param.
        return is_there and scenario.world.size > 1

    small = shrink(start, fails=fails).scenario
    assert small.model.name == "params"
    assert len(getattr(small.model, field)) == 1
