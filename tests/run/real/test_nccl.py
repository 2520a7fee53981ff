"""Cases on the stand-in for NCCL: probe, rings and judge, as with a GPU per rank."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zero_sim.errors import EnvironmentProblem
from zero_sim.rules.judging import EXPLAINER
from zero_sim.run import real_judge
from zero_sim.run.real_judge import on_workers
from zero_sim.run.setup import Setup, own_setup
from zero_sim.scenario.spec import (
    ModelSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)

RING = WorldSpec(size=4, order="nccl-ring")


@pytest.fixture(scope="module")
def standin():
    """Install the stand-in here and in workers, for a machine with eight devices."""
    folder = Path(__file__).parents[2] / "backends"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(real_judge, "PRELOAD", ("preload_standin", *real_judge.PRELOAD))
        patch.setenv("ZERO_SIM_TEST_RING", "0,2,3,1")
        import standin_nccl

        from zero_sim.backends import transports

        before = dict(transports._MAKERS)
        standin_nccl.install()
        yield
        transports._MAKERS.clear()
        transports._MAKERS.update(before)
        transports._MADE.pop("nccl", None)


@pytest.fixture(scope="module")
def judge_on_nccl(standin):
    with on_workers(own_setup("nccl"), explainer=EXPLAINER) as judge:
        yield judge


@pytest.fixture
def on_nccl(judge_on_nccl):
    """Run a small case; keyword arguments replace parts of it."""

    def run(**parts):
        chosen = {
            "model": ModelSpec(name="mlp", dtype="bf16", hidden=5),
            "world": RING,
            "system": SystemSpec(bucket_elems=60),
            "run": RunSpec(steps=2),
            **parts,
        }
        return judge_on_nccl(Scenario(schema=1, name="case", **chosen))

    return run


def probed(result):
    return [note for note in result.notes if note.startswith("probe: ")]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_probed_ring_is_judged_bit_for_bit(on_nccl, stage):
    result = on_nccl(system=SystemSpec(stage=stage, bucket_elems=60))
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")
    assert probed(result) == ["probe: ranks [0, 1, 2, 3] add as ring 0 2 3 1"]
    assert "modelled-order" in result.guarantees
    assert "bound" not in result.guarantees


def test_judge_without_the_probed_ring_fails(on_nccl, monkeypatch):
    monkeypatch.setattr(Setup, "relies_on_own", lambda *args: False)
    result = on_nccl()
    assert result.verdict == "fail"
    assert result.findings[0].check == "equality.grad"


def test_each_communicator_has_its_own_ring(on_nccl):
    """Shard groups of three and their replica groups have different rings."""
    result = on_nccl(
        world=replace(RING, size=6), system=SystemSpec(redundancy=2, bucket_elems=60, stage=1)
    )
    assert result.verdict == "pass", (result.findings, result.error)
    assert probed(result) == [
        "probe: ranks [0, 1, 2] add as ring 0 2 1",
        "probe: ranks [3, 4, 5] add as ring 0 1 2",
    ]


@pytest.mark.parametrize(
    "parts",
    [
        {"system": SystemSpec(partition="uneven", bucket_elems=60)},
        {"model": ModelSpec(name="moe", experts=4), "topology": TopologySpec(ep=2)},
        {"world": replace(RING, size=6), "topology": TopologySpec(tp=2)},
        {"reload": ReloadSpec(step=1, world_size=3)},
        {"world": replace(RING, order="linear")},
        {"world": replace(RING, order_known=False)},
        {"model": ModelSpec(name="fp8", dtype="bf16")},
    ],
    ids=["uneven", "experts", "cells", "reload", "folded", "unknown", "fp8"],
)
def test_cases_pass(on_nccl, parts):
    result = on_nccl(**parts)
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


FSDP2 = SystemSpec(target="torch-fsdp2")
FP32 = ModelSpec(name="mlp", hidden=16)
UNKNOWN = WorldSpec(size=3, order="nccl-ring", order_known=False)


def test_avg_of_nccl_is_a_product_before_the_sum(on_nccl):
    result = on_nccl(system=FSDP2, model=FP32, world=UNKNOWN)
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def test_avg_is_a_division_if_nccl_only_moves_data(on_nccl):
    result = on_nccl(system=FSDP2, model=FP32, world=WorldSpec(size=3))
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def test_native_avg_uses_the_rounding_of_nccl(standin):
    """With three ranks, NCCL rounds each contribution, so the sum depends on the order."""
    exact = ModelSpec(name="bit-hash", shapes=((5, 3), (4,)))
    setup = replace(own_setup("nccl"), native=True)

    def case(size):
        chosen = {"model": exact, "world": WorldSpec(size=size), "system": FSDP2}
        return Scenario(schema=1, name="case", **chosen, run=RunSpec(steps=2))

    with on_workers(setup, explainer=EXPLAINER) as judge:
        assert judge(case(2)).verdict == "pass"
    assert setup.why_left_out(case(3)).startswith("ranks divide before the sum")
    assert setup.why_left_out(replace(case(3), system=SystemSpec())) == ""


def test_pinned_settings_are_noted(on_nccl):
    notes = "\n".join(on_nccl().notes)
    assert "nccl added in its own order, modelled as nccl-ring" in notes
    assert "NCCL 2.30.7, CUDA none on stand-in, 4 processes" in notes
    assert "pinned: NCCL_ALGO=Ring NCCL_PROTO=Simple " in notes
    assert "TORCH_NCCL_NAN_CHECK=0" in notes


def test_case_with_more_ranks_than_devices_is_omitted(standin, monkeypatch):
    monkeypatch.setenv("ZERO_SIM_TEST_GPUS", "2")
    setup = own_setup("nccl")
    assert setup.ranks_max == 2
    case = Scenario(schema=1, name="case", model=ModelSpec(name="mlp"), world=RING)
    assert setup.why_left_out(case) == "more than 2 ranks"
    with pytest.raises(EnvironmentProblem):
        Setup(backend="nccl", ranks_max=2).check(case)
