"""Working params: frozen ones must not change, and casts must match masters."""

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


def test_frozen_param_that_decays_is_named(judged, broken):
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
def test_differing_rank_and_element_are_named(judged, stage):
    result = judged(WrongAnswers(step=change_on_rank_1), **CASE, system=SystemSpec(stage=stage))
    found = first_finding(result, "equality.params")
    assert (found.rank, found.index, found.differ_count) == (1, (3,), 1)


def move(engine, right, *, lr_factor):
    engine.module.frozen.data = engine.module.frozen.detach().clone()
    return right(lr_factor=lr_factor)


def test_frozen_param_moved_by_a_sharded_system_is_not_observed(judged):
    result = judged(WrongAnswers(step=move), **CASE, system=SystemSpec(stage=3))
    assert result.verdict == "pass"
    assert "params that are never trained" in result.unobserved


def test_right_system_reports_all_frozen_params(judged):
    result = judged(**CASE, system=SystemSpec(stage=3))
    assert result.verdict == "pass"
    assert "params that are never trained" not in result.unobserved


class Silent:
    """zero_sim's own system, with required methods only."""

    name = "silent"
    capabilities = None

    def build(self, module, *, scenario, group):
        engine = ZeroSimTarget().build(module, scenario=scenario, group=group)
        told = ("module", "zero_grad", "backward", "step", "params")
        return SimpleNamespace(**{name: getattr(engine, name) for name in told})


def test_frozen_param_is_checked_without_followed_updates(judged, broken):
    broken("E10")
    result = judged(Silent(), **{**CASE, "world": WorldSpec(size=3, order_known=False)})
    assert first_finding(result, "equality.params").param == "frozen"


def test_cast_is_checked_although_another_param_is_missing():
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
