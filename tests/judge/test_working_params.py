"""A param that is never trained has to stay what it was before the engine was built."""

from types import SimpleNamespace

import pytest
import torch

from tests.judge.pointing import WrongAnswers, first_finding
from zero_sim.judge.checks.table import check_scales_and_casts
from zero_sim.judge.judged_group import Comparer
from zero_sim.scenario.spec import ModelSpec, OptimizerSpec, RunSpec, SystemSpec, WorldSpec
from zero_sim.targets import OwnedPart, Place
from zero_sim.targets.own import ZeroSimTarget

CASE = {
    "model": ModelSpec(name="unusual"),
    "optimizer": OptimizerSpec(weight_decay=0.1),
    "world": WorldSpec(size=2),
    "run": RunSpec(steps=1),
}


def test_one_that_decays_is_named_after_the_only_step(judged, broken):
    broken("E10")
    found = first_finding(judged(**CASE), "equality.params")
    assert (found.param, found.index, found.step, found.rank) == ("frozen", (0,), 0, 0)
    assert found.message.startswith("this param is not trained and must not change")


def change_on_rank_1(engine, right, *, lr_factor):
    said = right(lr_factor=lr_factor)
    if torch.distributed.get_rank() == 1:
        engine.module.frozen.data[3] += 1
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_rank_and_element_are_those_that_differ(judged, stage):
    result = judged(WrongAnswers(step=change_on_rank_1), **CASE, system=SystemSpec(stage=stage))
    found = first_finding(result, "equality.params")
    assert (found.rank, found.index, found.differ_count) == (1, (3,), 1)


def move(engine, right, *, lr_factor):
    engine.module.frozen.data = engine.module.frozen.detach().clone()
    return right(lr_factor=lr_factor)


def test_one_that_is_moved_by_a_system_with_sharded_params_is_not_observed(judged):
    result = judged(WrongAnswers(step=move), **CASE, system=SystemSpec(stage=3))
    assert result.verdict == "pass"
    assert "params that are never trained" in result.unobserved


def test_all_that_the_right_system_has_is_observed(judged):
    result = judged(**CASE, system=SystemSpec(stage=3))
    assert result.verdict == "pass"
    assert "params that are never trained" not in result.unobserved


class Silent:
    """The project's own system, which tells no more than it must."""

    name = "silent"
    capabilities = None

    def build(self, module, *, scenario, group):
        engine = ZeroSimTarget().build(module, scenario=scenario, group=group)
        told = ("module", "zero_grad", "backward", "step", "params")
        return SimpleNamespace(**{name: getattr(engine, name) for name in told})


def test_it_is_owed_where_no_update_can_be_followed(judged, broken):
    broken("E10")
    result = judged(Silent(), **{**CASE, "world": WorldSpec(size=3, order_known=False)})
    assert first_finding(result, "equality.params").param == "frozen"


def test_the_cast_of_a_param_is_checked_though_another_is_not_there():
    shown = SimpleNamespace(
        rank=0,
        step=0,
        params={"b": torch.ones(2, dtype=torch.bfloat16)},
        parts=[_part("a"), _part("b")],
        engine=SimpleNamespace(scales=lambda names: {}),
        group=SimpleNamespace(ownership=SimpleNamespace(held={0: {}}), comparer=Comparer()),
        comparison=SimpleNamespace(
            scale_names=lambda step: [], compare_scales=lambda scales, *, rank, step: ()
        ),
    )
    (found,) = check_scales_and_casts(shown)
    assert (found.check, found.param) == ("invariant.cast", "b")


def _part(name):
    place = Place(param=name, start=0, stop=2)
    return OwnedPart(place=place, grad=None, master=torch.tensor([1.0, 2.0]), state={})
