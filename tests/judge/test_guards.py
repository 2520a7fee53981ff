"""Guards apply to each cell and each segment separately."""

import pytest

from zero_sim.run import contexts
from zero_sim.scenario.spec import (
    DataSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.workloads import Batch

CELLS = {"world": WorldSpec(size=4), "topology": TopologySpec(tp=2)}
SEGMENTS = {"reload": ReloadSpec(step=1), "run": RunSpec(steps=3)}
PARAMS = ModelSpec(name="params", shapes=((5,), (7,)))


@pytest.fixture
def spoil(monkeypatch):
    """Change the batches of the cells or steps that `picks` selects."""

    def patch(picks, change):
        real = contexts.build_workload

        class Spoilt:
            def __init__(self, scenario):
                self._inner, self._scenario = real(scenario), scenario

            def __getattr__(self, name):
                return getattr(self._inner, name)

            def batch(self, *, step, rank, micro):
                if picks(self._scenario, step):
                    return change(self._inner, step=step, rank=rank, micro=micro)
                return self._inner.batch(step=step, rank=rank, micro=micro)

        monkeypatch.setattr(contexts, "build_workload", Spoilt)

    return patch


def same(workload, *, step, rank, micro):
    return workload.batch(step=step, rank=0, micro=micro)


def faint(workload, *, step, rank, micro):
    batch = workload.batch(step=step, rank=rank, micro=micro)
    return Batch(inputs=batch.inputs * 0, targets=batch.targets)


def in_second_cell(scenario, step):
    return scenario.run.seed != 0


def in_first_segment(scenario, step):
    return step < 1


@pytest.mark.parametrize(
    ("change", "check"), [(same, "guard.same-data"), (faint, "guard.zero-gradients")]
)
def test_each_cell_is_guarded(judged, spoil, change, check):
    spoil(in_second_cell, change)
    result = judged(model=PARAMS, **CELLS)
    assert result.verdict == "inconclusive"
    assert result.findings[0].check == check
    assert "on ranks 1, 3" in result.findings[0].message


@pytest.mark.parametrize(
    ("change", "check"), [(same, "guard.same-data"), (faint, "guard.zero-gradients")]
)
def test_each_segment_is_guarded(judged, spoil, change, check):
    spoil(in_first_segment, change)
    result = judged(model=PARAMS, **SEGMENTS)
    assert result.verdict == "inconclusive"
    assert result.findings[0].check == check
    assert "from step 0 on ranks 0, 1, 2" in result.findings[0].message


def test_segment_without_a_step_is_inconclusive(judged):
    result = judged(
        data=DataSpec(nan=NanSpec(step=0, rank=1)),
        optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0)),
        **SEGMENTS,
    )
    assert [finding.check for finding in result.findings] == ["guard.nothing-stepped"]
    assert "from step 0" in result.findings[0].message


@pytest.mark.parametrize("parts", [CELLS, SEGMENTS], ids=["cells", "segments"])
def test_unchanged_cells_and_segments_pass(judged, parts):
    assert judged(model=PARAMS, **parts).verdict == "pass"
