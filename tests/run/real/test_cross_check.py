"""The simulated world and gloo give the same bits in every step."""

import pytest

from zero_sim.scenario.spec import ModelSpec, RunSpec, SystemSpec, WorldSpec


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_state_of_all_steps_equals_gloo(on_gloo, judged, targets, told, monkeypatch, size, dtype):
    monkeypatch.setenv("ZERO_SIM_TEST_TELLS", str(told))
    parts = {
        "model": ModelSpec(name="mlp", dtype=dtype, hidden=5),
        "world": WorldSpec(size=size, order="gloo"),
        "system": SystemSpec(bucket_elems=60, stage=size % 2),
        "run": RunSpec(steps=3),
    }
    tales = []
    for run in (lambda: on_gloo("tells", **parts), lambda: judged(targets.tells, **parts)):
        assert run().verdict == "pass"
        tales.append({path.name: path.read_text().split() for path in told.iterdir()})
        for path in told.iterdir():
            path.unlink()
    real, simulated = tales
    assert len(real) == size
    assert len(set(real["rank-0"])) == len(real["rank-0"])
    assert real == simulated
