"""Cases judged by steps of another case's reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_sim import run_case
from zero_sim.judge.trajectory import Trajectories, Trajectory
from zero_sim.reference import Reference
from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)

CASE = Scenario(
    schema=1,
    name="first",
    model=ModelSpec(name="mlp", hidden=4),
    data=DataSpec(rows=2),
    run=RunSpec(steps=3),
)
SYSTEMS = [
    SystemSpec(stage=0),
    SystemSpec(stage=1, bucket_elems=7),
    SystemSpec(stage=2, partition="uneven"),
    SystemSpec(stage=3, sum_by="all-reduce"),
]


@pytest.fixture
def taken(monkeypatch):
    """Record the steps that references take."""
    steps = []
    right = Reference.begin

    def begin(self, *args, **named):
        steps.append(self)
        return right(self, *args, **named)

    monkeypatch.setattr(Reference, "begin", begin)
    return steps


def facts(result):
    return result.verdict, result.findings, result.compared_elems, result.guarantees, result.notes


@pytest.mark.parametrize("model", ["mlp", "moe", "bit-hash", "params"])
def test_one_reference_judges_all_systems(pool, taken, model):
    """With the same results as separate references."""
    shapes = ((5,), (3, 2)) if model in ("params", "bit-hash") else None
    first = replace(CASE, model=ModelSpec(name=model, hidden=4, shapes=shapes))
    alone = [facts(run_case(replace(first, system=each), pool=pool)) for each in SYSTEMS]
    taken.clear()
    kept = Trajectories()
    together = [
        facts(run_case(replace(first, system=each), pool=pool, trajectories=kept))
        for each in SYSTEMS
    ]
    assert together == alone
    assert {verdict for verdict, *_ in alone} == {"pass"}
    assert len(taken) < len(SYSTEMS) * CASE.run.steps
    if model == "params":
        assert len(taken) == CASE.run.steps


def test_groups_that_share_a_norm_reuse_steps(pool, taken):
    first = replace(
        CASE,
        world=WorldSpec(size=4),
        topology=TopologySpec(tp=2),
        optimizer=OptimizerSpec(clip_norm=0.1),
    )
    kept = Trajectories()
    for _ in range(2):
        assert run_case(first, pool=pool, trajectories=kept).verdict == "pass"
    assert len(taken) == 2 * CASE.run.steps


@pytest.mark.parametrize("id", ["M01", "M13", "R01", "L02"])
@pytest.mark.parametrize("system", SYSTEMS[1:], ids=lambda system: f"stage-{system.stage}")
def test_findings_equal_those_of_a_separate_case(pool, broken, id, system):
    """Word for word: the case falls back to its own reference, from the first step on."""
    kept = Trajectories()
    assert run_case(CASE, pool=pool, trajectories=kept).verdict == "pass"
    broken(id)
    case = replace(CASE, system=system)
    alone, member = run_case(case, pool=pool), run_case(case, pool=pool, trajectories=kept)
    assert facts(member) == facts(alone)


def test_broken_first_member_keeps_right_steps(pool, broken):
    kept = Trajectories()
    alone = facts(run_case(CASE, pool=pool))
    right = CASE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_sim.zero.optimizer.DistributedOptimizer._step_masters", _forgets)
        assert run_case(right, pool=pool, trajectories=kept).verdict == "fail"
    assert facts(run_case(right, pool=pool, trajectories=kept)) == alone


def _forgets(self, *args, **named):
    """Skip the update."""


@pytest.mark.parametrize(
    "other",
    [
        {"run": RunSpec(steps=3, seed=1)},
        {"data": DataSpec(rows=4)},
        {"optimizer": OptimizerSpec(lr=0.5)},
        {"world": WorldSpec(size=3)},
        {"world": WorldSpec(order="tree")},
        {"model": ModelSpec(name="mlp", hidden=5)},
        *(
            {"system": SystemSpec(**{name: value})}
            for name, value in [
                ("divide", "pre"), ("divide_by", "tokens"), ("sync", "every"),
                ("grad_dtype", "fp32"), ("redundancy", 2),
            ]
        ),
    ],
    ids=str,
)  # fmt: skip
def test_case_with_other_arithmetic_takes_its_own_steps(pool, taken, other):
    first, kept = replace(CASE, run=replace(CASE.run, micro_batches=2)), Trajectories()
    if "run" in other:
        other = {"run": replace(other["run"], micro_batches=2)}
    run_case(first, pool=pool, trajectories=kept)
    taken.clear()
    assert run_case(replace(first, **other), pool=pool, trajectories=kept).verdict == "pass"
    assert len(taken) == CASE.run.steps


@pytest.mark.parametrize(
    "other",
    [
        {"reload": ReloadSpec(step=1)},
        {"world": WorldSpec(order="ring")},
        {"world": WorldSpec(order="ring", order_known=False)},
    ],
    ids=str,
)
def test_case_that_depends_on_more_uses_no_trajectory(pool, monkeypatch, other):
    """A checkpoint continues with its reference; sums in a ring depend on the layout."""
    monkeypatch.setattr(Trajectory, "find", None)
    assert (
        run_case(replace(CASE, **other), pool=pool, trajectories=Trajectories()).verdict == "pass"
    )


def test_number_of_kept_trajectories_is_limited(pool):
    kept = Trajectories()
    all_of = [kept.of(number) for number in range(20)]
    assert kept.of(19) is all_of[19]
    assert kept.of(0) is not all_of[0]


def test_member_that_agrees_builds_no_reference(pool, monkeypatch):
    """A member that differs builds one, as the first member did."""
    built = []
    right = Reference.__init__

    def init(self, scenario, **named):
        built.append(scenario.system.stage)
        right(self, scenario, **named)

    monkeypatch.setattr(Reference, "__init__", init)
    first = replace(CASE, model=ModelSpec(name="params", shapes=((5,), (3, 2))))
    kept = Trajectories()
    for system in SYSTEMS:
        run_case(replace(first, system=system), pool=pool, trajectories=kept)
    assert built == [0]
    monkeypatch.setattr("zero_sim.zero.optimizer.DistributedOptimizer._step_masters", _forgets)
    member = replace(first, system=SYSTEMS[1])
    assert run_case(member, pool=pool, trajectories=kept).verdict == "fail"
    assert built == [0, 1]
