"""Both layouts of a pair must have the same params and state, bit for bit."""

from dataclasses import replace

import pytest

from tests.targets.momentum8 import Faulty, Fixed, WithoutParts
from zero_sim import run_case
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    ModelSpec,
    OptimizerSpec,
    PairSpec,
    RunSpec,
    Scenario,
    SystemSpec,
)
from zero_sim.targets import Capabilities, refusals
from zero_sim.targets.own import ZeroSimTarget

CASE = Scenario(
    schema=1,
    name="pair",
    model=ModelSpec(name="bit-hash", shapes=((6, 2), (3,))),
    optimizer=OptimizerSpec(name="own", lr=0.1),
    system=SystemSpec(stage=1),
    run=RunSpec(steps=2),
    pair=PairSpec(stage=0),
)
OF_ONE_RANK = replace(CASE, data=DataSpec(ranks="same"), pair=PairSpec(stage=0, world_size=1))


@pytest.mark.parametrize("case", [CASE, OF_ONE_RANK], ids=["stage", "ranks"])
def test_optimizer_of_unsharded_params_passes_without_a_rule(pool, case):
    result = run_case(case, pool=pool, target=Fixed())
    assert (result.verdict, result.scope) == ("pass", "full")


class TestLayoutDependentState:
    def test_first_step_and_key_are_named(self, pool):
        found = run_case(CASE, pool=pool, target=Faulty()).findings[0]
        assert (found.check, found.step, found.param) == ("equality.layout", 0, "p0")
        assert found.message == "optimizer state 'momentum' differs"

    def test_both_values_and_layouts_are_printed(self, pool):
        found = run_case(OF_ONE_RANK, pool=pool, target=Faulty()).findings[0]
        assert found.expected_value != found.got_value
        assert found.detail.startswith(
            "expected: as in the layout world.size = 1, system.stage = 0\n"
            "got: in the layout world.size = 2, system.stage = 1"
        )

    def test_sharded_second_layout_is_compared(self, pool):
        turned = replace(CASE, system=SystemSpec(stage=0), pair=PairSpec(stage=1))
        assert run_case(turned, pool=pool, target=Faulty()).findings[0].check == "equality.layout"

    def test_params_alone_show_the_difference(self, pool):
        found = run_case(CASE, pool=pool, target=WithoutParts()).findings[0]
        assert (found.check, found.param) == ("equality.layout", "p0")

    def test_difference_may_be_expected(self, pool):
        case = replace(CASE, expect=ExpectSpec(finding="equality.layout"))
        assert run_case(case, pool=pool, target=Faulty()).verdict == "pass"


class Twice(Fixed):
    """Sums gradients twice."""

    sums = 2


@pytest.mark.parametrize("stages", [(1, 0), (0, 1)])
def test_gradient_wrong_in_both_layouts_is_found_by_the_reference(pool, stages):
    case = replace(CASE, system=SystemSpec(stage=stages[0]), pair=PairSpec(stage=stages[1]))
    assert run_case(case, pool=pool, target=Twice()).findings[0].check == "equality.grad"


def test_own_system_is_independent_of_its_layout(pool):
    case = replace(
        CASE,
        system=SystemSpec(stage=3, bucket_elems=4),
        optimizer=OptimizerSpec(clip_norm=0.5),
        data=DataSpec(ranks="same"),
        pair=PairSpec(stage=0, world_size=4),
    )
    assert run_case(case, pool=pool).verdict == "pass"


def test_reference_judges_the_second_layout(pool, monkeypatch):
    case = replace(CASE, optimizer=OptimizerSpec(lr=0.1))
    build = ZeroSimTarget.build

    def build_with_another_rate(self, module, *, scenario, group):
        spec = replace(scenario.optimizer, lr=0.2)
        return build(self, module, scenario=replace(scenario, optimizer=spec), group=group)

    monkeypatch.setattr(ZeroSimTarget, "build", build_with_another_rate)
    found = run_case(case, pool=pool).findings[0]
    assert found.check == "equality.master"
    assert found.detail.startswith("found in the second layout of the pair")


class TestRefusals:
    def test_case_of_one_layout_without_a_rule(self):
        (problem,) = refusals(Fixed(), replace(CASE, pair=None))
        assert problem.path == "pair"

    def test_undeclared_layout(self):
        (problem,) = refusals(Fixed(), replace(CASE, pair=PairSpec(bucket_elems=1)))
        assert problem.path == "pair.bucket_elems"

    def test_second_layout_outside_the_capabilities(self):
        (problem,) = refusals(Fixed(), replace(CASE, pair=PairSpec(stage=3)))
        assert problem.path == "pair.stage"


def test_capabilities_accept_fields_of_a_layout_only():
    with pytest.raises(Exception, match=r"Capabilities.independent_of.*run.steps"):
        Capabilities(independent_of=("run.steps",))
