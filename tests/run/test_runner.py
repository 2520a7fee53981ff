"""Verdicts on bad input, empty passes and failing programs."""

import math
import sys
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

from zero_sim import run_case
from zero_sim.errors import EnvironmentProblem
from zero_sim.run import contexts
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    OrderName,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import StepResult
from zero_sim.targets.own import ZeroSimTarget
from zero_sim.workloads import Batch, digits


class ChangedTarget:
    """zero_sim's own system with an engine changed by a function."""

    name = "changed"
    capabilities = None

    def __init__(self, change):
        self._change = change

    def build(self, module, *, scenario, group):
        engine = ZeroSimTarget().build(module, scenario=scenario, group=group)
        self._change(engine, group.rank())
        return engine


@pytest.fixture
def changed_workload(monkeypatch):
    """Override attributes of every workload; the original is `inner`."""
    real = contexts.build_workload

    class Changed:
        def __init__(self, scenario):
            self.inner = real(scenario)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    def change(**attributes):
        for name, value in attributes.items():
            setattr(Changed, name, value)
        monkeypatch.setattr(contexts, "build_workload", Changed)

    return change


def raising(message):
    def fail(*args, **kwargs):
        raise RuntimeError(message)

    return fail


def test_rank_that_raises_is_a_finding_with_its_traceback(judged):
    def change(engine, rank):
        if rank == 2:
            engine.step = raising("out of luck")

    result = judged(target=ChangedTarget(change))
    assert result.verdict == "fail"
    finding = result.findings[0]
    assert (finding.check, finding.rank) == ("world.rank-failed", 2)
    assert "out of luck" in finding.message
    assert "Traceback" in finding.detail


def test_rank_without_any_call_is_a_deadlock(judged):
    def change(engine, rank):
        if rank == 0:
            engine.zero_grad = lambda: None
            engine.step = lambda *, lr_factor: StepResult()
            engine.backward = lambda loss, *, last_micro, rows: None

    result = judged(target=ChangedTarget(change))
    assert result.verdict == "fail"
    assert result.findings[-1].check == "world.deadlock"
    assert "ranks that never came: 0" in result.findings[-1].message


def test_next_case_passes_after_a_broken_one(judged):
    judged(target=ChangedTarget(lambda engine, rank: setattr(engine, "step", raising("x"))))
    assert judged().verdict == "pass"


def test_model_without_params_is_an_error(judged):
    result = judged(model=ModelSpec(name="params", shapes=()))
    assert result.verdict == "error"
    assert "param" in result.error


def test_params_on_two_devices_are_an_error_that_names_both(judged, changed_workload):
    def build(self):
        module = self.inner.build()
        self.built += 1
        if self.built > 1:  # The reference's own copy stays intact.
            module.extra = nn.Parameter(torch.empty(2, device="meta", dtype=torch.bfloat16))
        return module

    changed_workload(build=build, built=0)
    result = judged()
    assert result.verdict == "error"
    assert "extra" in result.error
    assert "meta" in result.error


def test_unskipped_nan_is_traced_to_its_rank_and_param(judged):
    result = judged(data=DataSpec(nan=NanSpec(step=1, rank=2)))
    assert (result.verdict, result.findings) == ("error", ())
    assert "nan in the local gradient of param '0.up.weight', element 0" in result.error
    assert "of micro-batch 0 of step 1 on rank 2. data.nan plants it" in result.error


@pytest.mark.parametrize("lr", [1e30, 1e37, 3e38])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_learning_rate_that_overflows_the_reference_is_an_error(judged, name, lr):
    result = judged(optimizer=OptimizerSpec(name=name, lr=lr), run=RunSpec(steps=4))
    assert (result.verdict, result.findings) == ("error", ())
    assert "Try a smaller optimizer.lr" in result.error


def test_infinity_in_the_system_alone_is_a_finding(judged):
    def change(engine, rank):
        def spoilt(loss, *, last_micro, rows):
            (loss * math.inf).backward()
            engine._ddp.finish_grad_sync()

        engine.backward = spoilt

    result = judged(target=ChangedTarget(change))
    assert result.verdict == "fail"
    assert "equality.grad" in {finding.check for finding in result.findings}


def test_step_that_raises_in_the_system_alone_is_a_finding(judged):
    def change(engine, rank):
        def step(*, lr_factor):
            raise RuntimeError("value cannot be converted to type float without overflow")

        engine.step = step

    result = judged(target=ChangedTarget(change))
    assert [finding.check for finding in result.findings] == ["world.rank-failed"]


def test_removed_nan_is_a_finding(judged):
    def change(engine, rank):
        def cleaned(loss, *, last_micro, rows):
            loss.backward()
            for buffer in engine._ddp.buffers:
                buffer.grad_data.nan_to_num_()
            engine._ddp.finish_grad_sync()

        engine.backward = cleaned

    result = judged(
        target=ChangedTarget(change),
        data=DataSpec(nan=NanSpec(step=1, rank=2)),
        optimizer=OptimizerSpec(loss_scale=LossScaleSpec()),
    )
    assert "equality.grad" in {finding.check for finding in result.findings}


def test_unknown_target_is_an_error_that_lists_known_ones(judged):
    result = judged(system=SystemSpec(target="zero"))
    assert result.verdict == "error"
    assert "zero_sim" in result.error


class TestEmptyPasses:
    """Cases that could not have failed are inconclusive."""

    def test_undeclared_same_data_is_inconclusive(self, judged, changed_workload):
        def batch(self, *, step, rank, micro):
            return self.inner.batch(step=step, rank=0, micro=micro)

        changed_workload(batch=batch)
        result = judged()
        assert result.verdict == "inconclusive"
        assert [finding.check for finding in result.findings] == ["guard.same-data"]

    def test_declared_same_data_passes(self, judged):
        assert judged(data=DataSpec(ranks="same"), world=WorldSpec(size=2)).verdict == "pass"

    def test_mostly_zero_gradients_are_inconclusive(self, judged, changed_workload):
        def batch(self, *, step, rank, micro):
            right = self.inner.batch(step=step, rank=rank, micro=micro)
            return Batch(inputs=right.inputs * 0, targets=right.targets)

        changed_workload(batch=batch)
        result = judged(model=ModelSpec(name="params", shapes=((5,), (7,))))
        assert result.verdict == "inconclusive"
        assert [finding.check for finding in result.findings] == ["guard.zero-gradients"]


def test_missed_accuracy_is_a_finding(judged):
    result = judged(
        model=ModelSpec(name="digits", hidden=8),
        data=DataSpec(rows=4),
        optimizer=OptimizerSpec(lr=0.01),
        expect=ExpectSpec(accuracy_min=0.99),
    )
    assert result.verdict == "fail"
    assert [finding.check for finding in result.findings] == ["expect.accuracy"]


def test_missing_extra_is_an_environment_problem(judged, monkeypatch):
    digits.load_split.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(EnvironmentProblem, match="digits"):
        judged(model=ModelSpec(name="digits", hidden=8))


def test_result_without_a_log_digest_is_otherwise_equal(pool):
    scenario = Scenario(schema=1, model=ModelSpec(name="mlp", hidden=4), run=RunSpec(steps=1))
    with_it = run_case(scenario, pool=pool)
    without = run_case(scenario, pool=pool, with_digest=False)
    assert with_it.log_digest
    assert without == replace(with_it, log_digest="", seconds=without.seconds)


def test_ten_runs_have_one_event_log(judged):
    digests = {
        judged(world=WorldSpec(size=4, schedule="random"), run=RunSpec(steps=2, seed=5)).log_digest
        for _ in range(10)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("order", get_args(OrderName))
@pytest.mark.parametrize(("stage", "size"), [(0, 3), (1, 5)])
def test_every_order_passes(judged, order, stage, size):
    result = judged(
        world=WorldSpec(size=size, order=order), system=SystemSpec(stage=stage, bucket_elems=60)
    )
    assert result.verdict == "pass", result.findings


def test_wrong_order_is_a_finding(judged, monkeypatch):
    from zero_sim.sim import order_backends

    monkeypatch.setitem(order_backends.ORDERS, "tree", order_backends.ORDERS["ring"])
    result = judged(world=WorldSpec(size=4, order="tree"))
    assert result.findings[0].check == "equality.grad"


def test_params_in_module_memory_are_not_charged_to_the_system(judged):
    """At stage 0, no buffer of the system contains params."""
    result = judged(system=SystemSpec(stage=0, bucket_elems=40))
    assert (result.verdict, result.findings) == ("pass", ())
