"""Verdicts on gloo processes equal those of the simulated world, even if a worker fails."""

from dataclasses import replace

import pytest

from tests.run.real.conftest import case
from zero_sim.findings.records import taken_notes
from zero_sim.run import setup as setups
from zero_sim.run.setup import Setup
from zero_sim.scenario.spec import (
    DataSpec,
    FaultSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    PairSpec,
    ReloadSpec,
    RunSpec,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.targets import with_options

CLIPPED = OptimizerSpec(clip_norm=0.1)
REPLICAS = SystemSpec(redundancy=2, overlap_grads=True, overlap_params=True, bucket_elems=40)
RELOADS = {
    "fewer ranks": {"world": WorldSpec(size=4), "reload": ReloadSpec(step=1, world_size=3)},
    "more ranks": {"world": WorldSpec(size=2), "reload": ReloadSpec(step=1, world_size=3)},
}
KINDS = {
    "as it is": {},
    "one rank": {"world": WorldSpec(size=1)},
    "gloo's own order": {"world": WorldSpec(size=3, order="gloo")},
    "a folded order": {"world": WorldSpec(size=3, order="random-tree")},
    "replicas and overlap": {"world": WorldSpec(size=4, order="gloo"), "system": REPLICAS},
    "cells": {"world": WorldSpec(size=4), "topology": TopologySpec(tp=2), "optimizer": CLIPPED},
    "experts": {"model": ModelSpec(name="moe", experts=6), "topology": TopologySpec(ep=3)},
    "an overflow": {
        "data": DataSpec(nan=NanSpec(step=1, rank=1, value="inf")),
        "optimizer": OptimizerSpec(loss_scale=LossScaleSpec()),
    },
    "a checkpoint while training goes on": {"reload": ReloadSpec(step=1, async_steps=2)},
    **RELOADS,
}


@pytest.mark.parametrize("kind", KINDS)
def test_right_system_passes_and_compares_as_many_elements(on_gloo, judged, kind):
    real = on_gloo(**KINDS[kind])
    assert (real.verdict, real.findings, real.error) == ("pass", (), "")
    simulated = judged(**{"run": RunSpec(steps=3), **KINDS[kind]})
    assert real.compared_elems == simulated.compared_elems
    assert real.guarantees == simulated.guarantees


@pytest.mark.parametrize("parts", [{}, *RELOADS.values()], ids=["plain", *RELOADS])
def test_wrong_element_has_the_findings_of_the_simulated_world(on_gloo, judged, targets, parts):
    parts = {"run": RunSpec(steps=4), **parts}
    real, simulated = on_gloo("flips", **parts), judged(targets.flips, **parts)
    assert real.verdict == "fail"
    # Only the simulated world has a log, and so positions of calls.
    assert real.findings == tuple(
        replace(finding, call_start=None, call_stop=None) for finding in simulated.findings
    )


def test_finding_on_one_rank_keeps_gathers_of_all_judges(on_gloo, judged, targets):
    # Rank 0's judge finds nothing and continues to gather params, which needs rank 1.
    parts = {"run": RunSpec(steps=4), "system": SystemSpec(stage=3)}
    real, simulated = on_gloo("misreads", **parts), judged(targets.misreads, **parts)
    assert real.verdict == "fail"
    assert real.findings == tuple(
        replace(finding, call_start=None, call_stop=None) for finding in simulated.findings
    )


def test_same_data_passes_and_planted_nan_is_an_error(on_gloo):
    data = DataSpec(ranks="same")
    result = on_gloo(data=replace(data, rows=2), model=ModelSpec(name="params", shapes=((3,),)))
    assert result.verdict == "pass"
    result = on_gloo(run=RunSpec(steps=1), data=DataSpec(nan=NanSpec(step=0, rank=1)))
    assert (result.verdict, result.findings) == ("error", ())
    assert "of step 0 on rank 1. data.nan plants it" in result.error


def test_step_that_the_reference_cannot_take_is_an_error(on_gloo, judged):
    """torch's optimizer raises in the system first."""
    parts = {"optimizer": OptimizerSpec(lr=3e38), "run": RunSpec(steps=4)}
    real, simulated = on_gloo(**parts), judged(**parts)
    assert (real.verdict, real.findings) == ("error", ())
    assert real.error == simulated.error
    assert "Try a smaller optimizer.lr" in real.error


@pytest.mark.parametrize("order", ["gloo", "linear"])
def test_error_of_a_rank_comes_before_its_consequences(on_gloo, order):
    # Waiting for the stall limit would never end here.
    run = RunSpec(steps=3, stall_seconds=3600.0)
    result = on_gloo("raises", world=WorldSpec(size=3, order=order), run=run)
    assert result.verdict == "fail"
    first = result.findings[0]
    assert (first.check, first.rank) == ("world.rank-failed", 1)
    assert first.message == "rank 1 raised ValueError: rank 1 has had enough"
    assert "go_wrong" in first.detail
    assert on_gloo().verdict == "pass"


def test_refusal_on_one_rank_is_an_error(on_gloo):
    result = on_gloo("refuses")
    assert (result.verdict, result.error) == ("error", "expected another scenario")


def test_case_outside_the_capabilities_is_refused(on_gloo):
    plain = SystemSpec(target="torch-ddp", stage=0)
    result = on_gloo(system=plain, world=WorldSpec(size=2, order="gloo"))
    assert (result.verdict, result.findings) == ("error", ())
    assert "world.order: this target supports 'linear'" in result.error


def test_engine_without_required_positions_is_refused(on_gloo):
    result = on_gloo("hides", world=WorldSpec(size=3, order="gloo"))
    assert (result.verdict, result.findings) == ("error", ())
    assert "to report the positions of its gradients in the calls" in result.error
    assert on_gloo().verdict == "pass"


def test_dead_worker_costs_one_case(on_gloo):
    verdicts = [on_gloo(target).verdict for target in ("", "dies", "")]
    assert verdicts == ["pass", "fail", "pass"]
    finding = on_gloo("dies").findings[0]
    assert (finding.check, finding.rank) == ("world.rank-died", 1)
    assert finding.message == "rank 1: its process ended with exit status 3"


def test_hang_reports_the_position_of_every_rank(on_gloo, with_enough_time):
    result = with_enough_time(
        lambda seconds: on_gloo("hangs", run=RunSpec(steps=3, stall_seconds=seconds)),
        seconds=1.5,
        fits=lambda result: (
            "time.sleep(600)" in result.findings[0].detail
            and all(f"rank {rank} was at:" in result.findings[0].detail for rank in range(3))
        ),
    )
    finding = result.findings[0]
    assert (result.verdict, finding.check) == ("fail", "world.hung")
    assert "time.sleep(600)" in finding.detail
    assert all(f"rank {rank} was at:" in finding.detail for rank in range(3))
    assert on_gloo().verdict == "pass"


def test_case_may_take_longer_than_the_stall_limit(on_gloo, with_enough_time):
    def attempt(seconds):
        run = RunSpec(steps=4, stall_seconds=seconds)
        return seconds, on_gloo("slow", run=run, world=WorldSpec(size=2))

    limit_seconds, result = with_enough_time(
        attempt, seconds=0.75, fits=lambda outcome: outcome[1].verdict == "pass"
    )
    assert result.verdict == "pass"
    assert result.seconds > limit_seconds


@pytest.fixture
def drifted(on_gloo, monkeypatch):
    """Run a small case on gloo, declared with another order than its own."""
    monkeypatch.setitem(setups.OWN_ORDERS, "gloo", "tree")

    def run(target="", **parts):
        return on_gloo(target, **{"world": WorldSpec(size=4, order="tree"), **parts})

    return run


class TestOrderDrift:
    def test_drifted_sums_are_judged_by_bounds(self, drifted):
        result = drifted(model=ModelSpec(name="mlp", dtype="fp32"))
        assert (result.verdict, result.findings) == ("pass", ())
        assert result.guarantees.keys() == {"bound", "order-free"}
        (note,) = (note for note in result.notes if note.startswith("backend.order-drift: "))
        assert "drift: expected ((0+1)+(2+3)) as in tree" in note

    def test_declared_order_would_fail(self, drifted, monkeypatch):
        monkeypatch.setattr(Setup, "relies_on_own", lambda *args: False)
        assert drifted(model=ModelSpec(name="mlp", dtype="fp32")).verdict == "fail"

    def test_wrong_update_is_found(self, drifted):
        result = drifted("flips")
        assert result.verdict == "fail"
        assert result.findings[0].check == "equality.master"
        assert (result.findings[0].step, result.findings[0].rank) == (1, 1)

    def test_stale_params_of_one_rank_are_found(self, drifted):
        result = drifted("stale", optimizer=OptimizerSpec(lr=0.1))
        assert result.verdict == "fail"
        finding = result.findings[0]
        assert (finding.check, finding.step, finding.rank) == ("invariant.replicas", 1, 1)
        assert finding.message == "the working param differs from that of rank 0"

    def test_norm_of_other_gradients_is_found(self, drifted):
        result = drifted("misnames")
        assert [finding.check for finding in result.findings] == ["equality.norm"]
        assert "from that of the reported gradients" in result.findings[0].message

    @pytest.mark.parametrize("stage", [0, 1])
    def test_clipping_and_overlap_pass(self, drifted, stage):
        result = drifted(
            system=SystemSpec(stage=stage, bucket_elems=50), optimizer=OptimizerSpec(clip_norm=0.01)
        )
        assert result.verdict == "pass", result.findings

    def test_drift_without_bounds_is_an_error(self, drifted):
        result = drifted(model=ModelSpec(name="fp8", dtype="bf16"))
        assert result.verdict == "error"
        (finding,) = result.findings
        assert finding.check == "backend.order-drift"
        assert "with experts or fp8 params" in finding.message
        assert "drift: expected ((0+1)+(2+3)) as in tree" in finding.detail


def test_unknown_order_passes(on_gloo):
    result = on_gloo(world=WorldSpec(size=4, order="gloo", order_known=False))
    assert result.verdict == "pass"
    assert "gloo added in its own order, unknown to the judge" in result.notes


@pytest.mark.parametrize("model", ["bit-hash", "ternary"])
def test_exact_models_pass_in_any_assumed_order(on_gloo, model):
    shapes = None if model == "ternary" else ((3, 5), (7,))
    result = on_gloo(
        setup=Setup(backend="gloo", native=True),
        model=ModelSpec(name=model, dtype="bf16", shapes=shapes),
        optimizer=OptimizerSpec(name="sgd", lr=0.0625),
        world=WorldSpec(size=5, order="random-tree"),
    )
    assert result.verdict == "pass"
    assert set(result.guarantees) == {"order-free"}
    assert "gloo added in its own order, the oracle in order random-tree" in result.notes


class TestOmitted:
    def why(self, make_case, **setup):
        return Setup(backend="gloo", **setup).why_left_out(make_case)

    def test_planned_faults_are_omitted(self, make_case):
        fault = FaultSpec(kind="crash", rank=0)
        assert "planned faults" in self.why(make_case(faults=(fault,)))

    def test_too_many_ranks_after_a_reload_are_omitted(self, make_case):
        assert self.why(make_case(**RELOADS["more ranks"]), ranks_max=2) == "more than 2 ranks"
        assert self.why(make_case(**RELOADS["more ranks"]), ranks_max=3) == ""

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"divide_factor": "2.0"}, "gloo by itself has no PREMUL_SUM"),
            ({"divide_factor": "2.0", "force_sum": "true"}, ""),
            ({}, ""),
        ],
    )
    def test_native_case_with_an_unsupported_operation_is_omitted(self, make_case, options, why):
        case = make_case(
            model=ModelSpec(name="bit-hash", shapes=((3, 5),)),
            optimizer=OptimizerSpec(name="sgd", lr=0.0625),
            world=WorldSpec(size=4),
            system=SystemSpec(target="torch-fsdp2", stage=3),
        )
        case = with_options(case, options)
        assert self.why(case, native=True) == why
        assert self.why(case) == ""

    def test_native_case_in_another_order_is_omitted(self, make_case):
        assert "not gloo's own" in self.why(make_case(), native=True)
        assert self.why(make_case(world=WorldSpec(size=3, order="gloo")), native=True) == ""


OF_PARAMS = {"model": ModelSpec(name="mlp", hidden=5), "system": SystemSpec(stage=0)}


@pytest.mark.usefixtures("targets")
def test_undeclared_point_is_inferred_on_the_processes(on_gloo):
    result = on_gloo("shows_means", **OF_PARAMS)
    assert result.verdict == "pass"
    assert "reported_grads = 'after-division'" in taken_notes(result)[0]


@pytest.mark.usefixtures("targets")
def test_params_only_pass_is_judged_with_sgd(on_gloo):
    shapes = ModelSpec(name="params", shapes=((3,), (5,)))
    result = on_gloo("undivided", model=shapes, system=SystemSpec(stage=0))
    assert (result.verdict, result.twin.optimizer.name) == ("fail", "sgd")
    assert "found with SGD in place of AdamW" in result.findings[0].detail


@pytest.mark.usefixtures("targets")
def test_difference_is_explained_on_the_processes(on_gloo):
    """Each rank's process tries rules on its own values; a rule must fit all ranks."""
    first = on_gloo("misdeclares").findings[0]
    assert first.check == "equality.grad"
    assert "with divide = 'premul'" in first.detail
    assert "these are the bits of divide = " in first.detail


def test_second_layout_is_compared(judge_on_gloo, monkeypatch):
    monkeypatch.setattr(judge_on_gloo, "_target", "tests.targets.momentum8:Faulty")
    scenario = case(
        model=ModelSpec(name="bit-hash", shapes=((6, 2),)),
        world=WorldSpec(size=2),
        optimizer=OptimizerSpec(name="own", lr=0.1),
        run=RunSpec(steps=1),
        pair=PairSpec(stage=0),
    )
    found = judge_on_gloo(scenario).findings[0]
    assert (found.check, found.step) == ("equality.layout", 0)
    assert found.message == "optimizer state 'momentum' differs"
