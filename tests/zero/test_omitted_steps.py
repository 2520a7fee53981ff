"""Omitted steps of a unit's life: each is found, and the message names params and step."""

import pytest

from zero_sim import run_case
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.zero.unit import Unit

CASE = Scenario(
    schema=1,
    name="life",
    # `embedding` is tied to the head.
    model=ModelSpec(name="unusual"),
    world=WorldSpec(size=3, timing="hostile", races=True),
    system=SystemSpec(stage=3, bucket_elems=8, prefetch=1),
    optimizer=OptimizerSpec(clip_norm=0.5),
    run=RunSpec(steps=4, micro_batches=2),
    reload=ReloadSpec(step=2, stage=1, world_size=2),
)
STEPS = (
    "fill",
    "start_reduce",
    "finish_reduce",
    "reset_grads",
    "start_gather",
    "reshard",
    "_adopt_unsharded",
    "_end_reduce",
    "_free_grads",
)
WAITS = ("finish_gather", "_wait_reduce")


def left_out(step):
    """Omit a step for the unit with `embedding`."""
    right = getattr(Unit, step)

    def wrong(self, *args):
        # Stage 3 only: the run continues at stage 1.
        if not self.frees_params or all(memory.name != "embedding" for memory in self.members):
            right(self, *args)

    return wrong


def told(result):
    """Return the text that a user reads."""
    return result.error + "".join(
        f"{one.check} {one.param} {one.message}\n{one.detail}\n" for one in result.findings
    )


def test_complete_life_passes():
    assert run_case(CASE).verdict == "pass"


@pytest.mark.parametrize("step", STEPS)
def test_omitted_step_is_found_and_the_param_named(monkeypatch, step):
    monkeypatch.setattr(Unit, step, left_out(step))
    result = run_case(CASE)
    assert result.verdict in ("fail", "error")
    assert "embedding" in told(result)


@pytest.mark.parametrize("step", WAITS)
def test_omitted_wait_is_a_race_and_its_line_named(monkeypatch, step):
    monkeypatch.setattr(Unit, step, left_out(step))
    result = run_case(CASE)
    assert result.findings[0].check == "world.race"
    assert "not waited for" in told(result)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("fill", "'fill' is missing"),
        ("start_reduce", "'reduce' is missing"),
        ("_adopt_unsharded", "'finish' is missing"),
        ("_end_reduce", "'finish' is missing"),
    ],
)
def test_unit_reports_the_missing_transition(monkeypatch, step, said):
    monkeypatch.setattr(Unit, step, left_out(step))
    assert said in told(run_case(CASE))
