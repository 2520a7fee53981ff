"""Size of a case."""

from dataclasses import replace

import pytest

from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, WorldSpec
from zero_sim.shrink import Size, size_of
from zero_sim.shrink.size import order_of

LEAST = Scenario(schema=1, model=ModelSpec(name="params", shapes=((2,),)), run=RunSpec(steps=1))


def case(toml):
    (scenario,) = parse_cases(f"schema = 1\n{toml}", source="x", stem="x")
    return scenario


def test_size_of_a_case_without_features():
    assert size_of(LEAST) == Size(ranks=2, params=1, elements=2, steps=1, features=0)


def test_ranks_outweigh_everything_else():
    one = Size(ranks=1, params=9, elements=9, steps=9, features=9)
    assert one < Size(ranks=2, params=1, elements=1, steps=1, features=0)


def test_params_of_a_network_count():
    size = size_of(case('[model]\nname = "mlp"\nhidden = 1\nblocks = 1'))
    assert (size.params, size.elements) == (4, 13)


def test_larger_world_counts():
    size = size_of(case('[model]\nname = "mlp"\n[reload]\nstep = 1\nworld_size = 5'))
    assert size.ranks == 5


@pytest.mark.parametrize(
    ("toml", "features"),
    [
        ("[system]\nbucket_elems = 3", 1),
        ("[run]\nmicro_batches = 3", 2),
        ("[run]\nseed = 7", 0),
        ("[optimizer.loss_scale]", 1),
        ("[data.nan]\nstep = 0\nrank = 0", 1),
        ('[data.nan]\nstep = 0\nrank = 0\nvalue = "inf"', 2),
        ('[optimizer]\ngroups = [{match = "0", lr = 0.1}, {match = "1"}]', 3),
        ('[topology]\ntp = 2\nshared = ["0"]', 2),
    ],
)
def test_number_of_features(toml, features):
    assert size_of(case(f'[model]\nname = "params"\nshapes = [[2]]\n{toml}')).features == features


def test_model_other_than_bare_params_is_a_feature():
    assert size_of(case('[model]\nname = "unusual"')).features == 1


def test_smaller_numbers_order_cases_of_one_size():
    def with_buckets(elems):
        return replace(LEAST, system=replace(LEAST.system, bucket_elems=elems))

    assert order_of(with_buckets(1)) < order_of(with_buckets(2))
    assert size_of(with_buckets(1)) == size_of(with_buckets(2))


def test_seed_counts_last_and_name_never():
    seeded = replace(LEAST, run=replace(LEAST.run, seed=1))
    assert order_of(LEAST) < order_of(seeded) < order_of(replace(LEAST, world=WorldSpec(size=3)))
    assert order_of(replace(LEAST, name="other")) == order_of(LEAST)


def test_size_is_described_in_words():
    words = "2 ranks, 1 param, 2 elements, 1 step, 0 features"
    assert str(size_of(LEAST)) == words
