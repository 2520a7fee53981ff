"""Search for rules that make cases pass."""

import pytest

from tests.judge.ruled import Engine
from tests.rules.test_found import ParamsAlone, ParamsOf
from zero_sim.backends.worlds import WorldPool
from zero_sim.rules.search import RuleSearch
from zero_sim.run.small_cases import BASE, changed

LONG = changed(BASE, "two steps", run={"steps": 2})
"""Two steps, because the first shows no difference if only params are reported."""


@pytest.fixture
def search():
    with WorldPool() as pool:
        yield RuleSearch(target=ParamsAlone({"divide": "pre"}), pool=pool)


def test_rules_of_sums_are_tried_if_no_finding_names_one(search):
    assert search.settle(LONG, sums=True) == ""
    assert search.numerics == {"divide": "pre"}


class Counting(ParamsOf):
    """Params-only engine that counts the rows of a step in advance."""

    def __init__(self, engine):
        super().__init__(engine)
        self.start_step = engine.start_step


def test_factor_of_losses_is_found(search):
    def by_tokens(engine, rows):
        return engine.size / engine.step_rows

    search.target = ParamsAlone({"scale": by_tokens})
    search.target.build = lambda module, *, scenario, group: Counting(
        Engine(module, scenario, group, search.target.does)
    )
    case = changed(LONG, "uneven rows", data={"uneven_rows": True, "loss": "sum"})
    assert search.settle(case, changed(case, "micro-batches", run={"micro_batches": 3})) == ""
    assert search.numerics == {"scale_loss": "tokens"}


def test_rules_do_not_change_if_none_fits(search):
    search.numerics = {"divide_by": "micro-batches"}
    assert search.settle(changed(LONG, optimizer={"name": "sgd"})).startswith("equality.params")
    assert search.numerics == {"divide_by": "micro-batches"}
    assert search.passed == []


def test_nearest_rule_is_reported(search):
    search.settle(changed(LONG, optimizer={"name": "sgd"}))
    said = search.nearest.in_words()
    assert said.startswith("the nearest, Numerics(), differs in case 'two steps': equality.params")
    assert ", step 0, rank 0, param '0.up.weight', " in said
