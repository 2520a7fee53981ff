"""Shares of cases with each feature: they determine how soon a fault that needs it is found."""

from collections import Counter
from itertools import combinations, islice

import pytest

from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.features import LAYOUT, features_of, may_meet
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.targets import Capabilities, Option

COUNT = 6_000


class Declaring:
    """A target that is never built."""

    name = "declaring"

    def __init__(self, capabilities, **options):
        self.capabilities, self.options = capabilities, options

    def build(self, module, *, scenario, group):
        raise NotImplementedError


def drawn(target=None, count=COUNT):
    return list(islice(draws(drawn_cases(target), seed="shares"), count))


def share(cases, has):
    return sum(map(bool, map(has, cases))) / len(cases)


@pytest.fixture(scope="module")
def own():
    return drawn()


SHARDED = Declaring(Capabilities(stages=(2, 3), follows=("system.redundancy",)))


@pytest.fixture(scope="module", params=[None, SHARDED], ids=["our own", "stages 2 and 3"])
def cases(request, own):
    return own if request.param is None else drawn(request.param)


def ranks_of(case):
    return case.world.size // (case.topology.tp * case.topology.pp)


def test_a_quarter_of_cases_is_stage_3(cases):
    assert share(cases, lambda case: case.system.stage == 3) >= 0.25


def test_a_twentieth_of_cases_has_five_to_eight_ranks(cases):
    assert share(cases, lambda case: 5 <= ranks_of(case) <= 8) >= 0.05


def test_a_tenth_of_cases_has_replicas_of_sharded_params(cases):
    def has_replicas(case):
        return case.system.stage > 0 and 1 < case.system.redundancy < ranks_of(case)

    assert share(cases, has_replicas) >= 0.10


def test_minimal_target_gets_five_to_eight_ranks_as_often():
    cases = drawn(Declaring(Capabilities()))
    assert share(cases, lambda case: 5 <= ranks_of(case) <= 8) >= 0.05


def test_no_optimizer_is_rare(own):
    names = Counter(case.optimizer.name for case in own)
    assert min(names.values()) >= len(own) / (2 * len(names))


def test_no_option_value_is_rare():
    options = {
        "few": Option(default=False, values=(True,)),
        "many": Option(default=0, values=(1, 2, 3)),
    }
    said = [
        {option.name: option.value for option in case.system.options}
        for case in drawn(Declaring(Capabilities(), **options), count=2_000)
    ]
    few, many = (Counter(each.get(name) for each in said) for name in options)
    assert min(few.values()) >= len(said) / (2 * 2)
    assert min(many.values()) >= len(said) / (2 * 4)


NEEDS_THREE = ("data.nan.micro_batch", "run.own_micro_batches")
"""A pair that needs three micro-batches: one after that of the NaN, and one that some rank
lacks.
"""
EXPECTED_LEAST = 100
"""Expected count below which counts are too noisy to compare."""


def test_pairs_of_settings_occur_a_quarter_as_often_as_by_chance(own):
    """Pairs that never occur are excluded by the rules of a case."""
    # Models of split layers always share params and have few other settings.
    plain = [case for case in own if case.model.name != "tp-block"]
    said = [{name for name in features_of(case) if not name.startswith(LAYOUT)} for case in plain]
    once = Counter(name for names in said for name in names)
    both = Counter(pair for names in said for pair in combinations(sorted(names), 2))
    rare = {
        pair: met
        for pair, met in both.items()
        if may_meet(*pair)
        and (by_chance := once[pair[0]] * once[pair[1]] / len(plain)) >= EXPECTED_LEAST
        and met < by_chance / 4
    }
    assert rare.keys() <= {NEEDS_THREE}


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_a_hundredth_of_cases_is_stage_3_with_each_recompute_kind(own, recompute):
    def has(case):
        return case.system.stage == 3 and case.model.recompute == recompute

    assert share(own, has) >= 0.01


def test_recompute_kinds_are_within_capabilities():
    only = (("model.recompute", ("none", "non-reentrant")),)
    able = Capabilities(follows=("model.recompute",), only=only)
    kinds = {case.model.recompute for case in drawn(Declaring(able), count=200)}
    assert kinds == {"none", "non-reentrant"}
