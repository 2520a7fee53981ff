"""Device defects that GPUs would show, each planted again and found on the stand-in device.

Aborting a process group after an error does not depend on the device; see
`tests/backends/test_nccl_workers.py`.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.standin import NAME
from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.judge import exact as exact_judge
from zero_sim.reference import division as reference_division
from zero_sim.reference import oracle, quantization, replay, stepping
from zero_sim.run import program
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    ModelSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.sim import order_backends
from zero_sim.sim.comm import collectives
from zero_sim.sim.inflight import late, timing, work
from zero_sim.sim.world import cluster
from zero_sim.targets import answers
from zero_sim.workloads import exact, placed, ternary
from zero_sim.workloads.mlp import MlpWorkload


@pytest.fixture(scope="module")
def worlds():
    with WorldPool() as pool:
        yield pool


@pytest.fixture
def judged(worlds):
    """Run a small case on the device; its tables are replaced by keyword arguments."""

    def run(**parts):
        chosen = {
            "model": ModelSpec(name="mlp", hidden=6),
            "world": WorldSpec(size=3),
            "run": RunSpec(steps=2),
            **parts,
        }
        return run_case(Scenario(schema=1, name="case", **chosen), pool=worlds, device=NAME)

    return run


@pytest.fixture
def mistaken(monkeypatch, judged):
    """Return the findings of a case that passes until a name is replaced."""

    def run(owner, name, mistake, **parts):
        right = judged(**parts)
        assert (right.verdict, right.findings, right.error) == ("pass", (), "")
        for each in owner if isinstance(owner, tuple) else (owner,):
            monkeypatch.setattr(each, name, mistake)
        wrong = judged(**parts)
        assert wrong.verdict in ("fail", "error")
        return " ".join(
            [wrong.error, *(f"{f.check} {f.message} {f.detail}" for f in wrong.findings)]
        )

    return run


class ForgetsDevices:
    """torch with an arange() that ignores the device."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def arange(self, *args, device=None, **named):
        return torch.arange(*args, **named)


MIXED = "Expected all tensors to be on the same device"
ADAM = OptimizerSpec(name="adam", lr=0.01)
FSDP2 = SystemSpec(target="torch-fsdp2", stage=1)


class TestCertainDefects:
    def test_1_norm_on_cpu_is_found(self, mistaken):
        right = oracle.measure

        def on_cpu(flat):
            told = right(flat)
            return replace(told, norm=told.norm.cpu())

        assert MIXED in mistaken(oracle, "measure", on_cpu)

    def test_1_fp8_scale_on_cpu_is_found(self, mistaken):
        right = quantization.scale_for

        def on_cpu(*args, **named):
            return right(*args, **named).cpu()

        model, reload = ModelSpec(name="fp8", dtype="bf16", hidden=6), ReloadSpec(step=1)
        assert MIXED in mistaken(oracle, "scale_for", on_cpu, model=model, reload=reload)

    @pytest.mark.parametrize("divide", ["pre", "post"])
    def test_2_reference_division_by_number_is_found(self, mistaken, divide):
        system = SystemSpec(divide=divide)
        assert "equality." in mistaken(reference_division, "quotient", torch.div, system=system)

    def test_2_judge_division_by_number_is_found(self, mistaken):
        # In fp32 seven times a bf16 value is exact, and so is its division by 7. The product with
        # 1 / 7 is not.
        found = mistaken(
            exact_judge,
            "quotient",
            torch.div,
            model=ModelSpec(name="mlp", hidden=6, dtype="bf16"),
            world=WorldSpec(size=7),
            data=DataSpec(ranks="same"),
            system=SystemSpec(grad_dtype="fp32"),
            run=RunSpec(steps=1),
            expect=ExpectSpec(one_device=True),
        )
        assert "invariant.one-device" in found

    def test_2_simulated_average_by_number_is_found(self, mistaken):
        assert "equality.grad" in mistaken(collectives, "_quotient", torch.div, system=FSDP2)

    @pytest.mark.parametrize(("name", "module"), [("bit-hash", exact), ("ternary", ternary)])
    def test_3_workload_index_on_cpu_is_found(self, mistaken, name, module):
        shapes = ((5, 3), (4,)) if name == "bit-hash" else None
        model = ModelSpec(name=name, hidden=6, shapes=shapes)
        assert MIXED in mistaken(module, "torch", ForgetsDevices(), model=model)

    def test_4_order_index_on_cpu_is_found(self, mistaken):
        world = WorldSpec(size=3, order="nccl-sym")
        assert MIXED in mistaken(order_backends, "torch", ForgetsDevices(), world=world)

    def test_5_module_copy_after_case_is_found(self, mistaken):
        def accuracy(self, module):
            return self._inner.accuracy(copy.deepcopy(module).cpu())

        system = SystemSpec(bucket_elems=20, overlap_params=True, overlap_grads=True)
        found = mistaken(placed._Placed, "accuracy", accuracy, system=system)
        assert "cannot pickle" in found

    def test_6_cpu_device_mesh_is_found(self, mistaken):
        right = DeviceMesh.from_group

        def of_cpu(group, device):
            return right(group, "cpu")

        mistaken(DeviceMesh, "from_group", of_cpu, system=FSDP2)


class TestLaterDefects:
    def test_reference_loop_against_foreach_system_is_found(self, mistaken):
        right = stepping.build_optimizer

        def by_the_loop(spec, *, masters, own):
            chosen = OptimizerSpec(name=spec.name, lr=spec.lr, foreach=False)
            return right(chosen, masters=masters, own=own)

        optimizer = OptimizerSpec(name="adam", lr=0.01, foreach=True)
        assert "equality." in mistaken(
            stepping,
            "build_optimizer",
            by_the_loop,
            optimizer=optimizer,
            run=RunSpec(steps=8),
            model=ModelSpec(name="mlp", hidden=24),
        )

    def test_requiring_device_step_counts_is_found(self, mistaken):
        right = answers._check_plain

        def strict(value, **named):
            if value.device.type == "cpu":
                raise answers.ProtocolError("on the CPU")
            right(value, **named)

        assert "on the CPU" in mistaken(answers, "_check_plain", strict, optimizer=ADAM)

    def test_missing_stream_wait_between_ranks_is_found(self, mistaken):
        modules = late, timing, work, cluster
        mistaken(modules, "finish_streams", lambda tensors: None, system=FSDP2)

    @pytest.mark.parametrize("module", [program, replay])
    def test_missing_device_seed_is_found(self, mistaken, monkeypatch, module):
        build = MlpWorkload.build
        monkeypatch.setattr(
            MlpWorkload, "build", lambda self: nn.Sequential(build(self), nn.Dropout(0.5))
        )
        assert "equality.loss" in mistaken(module, "seed_device", lambda device, seed: None)
