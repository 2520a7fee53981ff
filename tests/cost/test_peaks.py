"""Unsharded gradients and params within a step, checked against closed forms of their lifetime."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_sim.scenario.spec import ModelSpec, RunSpec, SystemSpec, WorldSpec

STAGE_2 = SystemSpec(stage=2, bucket_elems=8)
STAGE_3 = SystemSpec(stage=3, bucket_elems=8)
THREE_BLOCKS = ModelSpec(name="mlp", hidden=3, blocks=3)


@pytest.fixture
def peaks(judged):
    """Return a function that runs a case of two ranks and two steps.

    It returns the finding's message, or the verdict.
    """

    def run(system, **parts):
        parts = {"model": THREE_BLOCKS, "run": RunSpec(steps=2), **parts}
        result = judged(system=system, world=WorldSpec(size=2), **parts)
        if not result.findings:
            return result.verdict
        assert {finding.check for finding in result.findings} == {"invariant.memory"}
        return f"{result.findings[0].phase}: {result.findings[0].message}"

    return run


@pytest.mark.parametrize("system", [STAGE_2, STAGE_3], ids=["stage-2", "stage-3"])
@pytest.mark.parametrize("overlap_grads", [True, False])
@pytest.mark.parametrize("sync", ["last", "every"])
def test_correct_system_passes(peaks, system, overlap_grads, sync):
    system = replace(system, overlap_grads=overlap_grads, sync=sync)
    assert peaks(system, run=RunSpec(steps=2, micro_batches=2)) == "pass"


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("model", ["unusual", "moe", "transformer-260"])
def test_models_with_unusual_use_of_params_pass(peaks, model, prefetch):
    assert peaks(replace(STAGE_3, prefetch=prefetch), model=ModelSpec(name=model)) == "pass"


def test_reductions_without_a_wait_are_found(peaks, broken):
    """More than one bucket is in flight."""
    broken("R29")
    said = peaks(STAGE_2)
    assert said.startswith("backward: this rank holds")
    assert "bytes of whole gradients of the bucket of" in said
    assert "as the gradient of" in said


def test_gradients_that_are_not_freed_are_found(peaks, broken):
    broken("R06")
    assert "whole gradients" in peaks(STAGE_2)


def test_params_not_freed_after_forward_are_found(peaks, broken):
    """A single bucket stays; there would also be too few calls."""
    broken("W54")
    said = peaks(STAGE_3)
    assert said.startswith("forward: ")
    assert "whole params of the bucket of 0.up.weight" in said


def test_params_gathered_too_early_are_found(peaks, broken):
    """One more bucket is gathered ahead, with as many calls as before."""
    broken("W55")
    assert peaks(STAGE_3).startswith("forward: ")


def test_params_not_freed_in_backward_are_found(peaks, broken):
    """Gradients are freed in time, params are not."""
    broken("W56")
    assert peaks(replace(STAGE_3, prefetch=0)).startswith("backward: ")


def test_placeholders_with_unsharded_memory_are_found(peaks, broken):
    """The storage is freed, the params are not."""
    broken("W53")
    assert "whole params" in peaks(STAGE_3)
