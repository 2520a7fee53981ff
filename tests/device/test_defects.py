"""What would be wrong on a GPU shows on the stand-in device: each mistake is made again here.

That a process group is aborted and not waited for after an error is no matter of devices; see
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
from zero_sim.backends import WorldPool
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
    """A small case on the device; keyword arguments replace whole parts of it."""

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
    """A case passes, and does not with the mistake: what is found then."""

    def run(mistake, **parts):
        right = judged(**parts)
        assert (right.verdict, right.findings, right.error) == ("pass", (), "")
        mistake(monkeypatch)
        wrong = judged(**parts)
        assert wrong.verdict in ("fail", "error")
        return " ".join(
            [wrong.error, *(f"{f.check} {f.message} {f.detail}" for f in wrong.findings)]
        )

    return run


class ForgetsDevices:
    """torch, but what it makes by itself is on the CPU."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def arange(self, *args, device=None, **named):
        return torch.arange(*args, **named)


MIXED = "Expected all tensors to be on the same device"
ADAM = OptimizerSpec(name="adam", lr=0.01)
FSDP2 = SystemSpec(target="torch-fsdp2", stage=1)


class TestCertainDefects:
    def test_1_a_norm_on_the_cpu(self, mistaken):
        right = oracle.measure

        def mistake(patch):
            def on_cpu(flat):
                told = right(flat)
                return replace(told, norm=told.norm.cpu())

            patch.setattr(oracle, "measure", on_cpu)

        assert MIXED in mistaken(mistake)

    def test_1_a_scale_on_the_cpu(self, mistaken):
        right = quantization.scale_for

        def mistake(patch):
            patch.setattr(oracle, "scale_for", lambda *a, **k: right(*a, **k).cpu())

        model, reload = ModelSpec(name="fp8", dtype="bf16", hidden=6), ReloadSpec(step=1)
        assert MIXED in mistaken(mistake, model=model, reload=reload)

    @pytest.mark.parametrize("divide", ["pre", "post"])
    def test_2_the_reference_divides_by_a_number(self, mistaken, divide):
        def mistake(patch):
            patch.setattr(reference_division, "quotient", torch.div)

        assert "equality." in mistaken(mistake, system=SystemSpec(divide=divide))

    def test_2_the_judge_divides_by_a_number(self, mistaken):
        def mistake(patch):
            patch.setattr(exact_judge, "quotient", torch.div)

        # In fp32 seven times a number of bf16 is exact, and a seventh of it; its product with 1 / 7
        # is not.
        found = mistaken(
            mistake,
            model=ModelSpec(name="mlp", hidden=6, dtype="bf16"),
            world=WorldSpec(size=7),
            data=DataSpec(ranks="same"),
            system=SystemSpec(grad_dtype="fp32"),
            run=RunSpec(steps=1),
            expect=ExpectSpec(one_device=True),
        )
        assert "invariant.one-device" in found

    def test_2_the_simulated_world_averages_by_a_number(self, mistaken):
        def mistake(patch):
            patch.setattr(collectives, "_quotient", torch.div)

        assert "equality.grad" in mistaken(mistake, system=FSDP2)

    @pytest.mark.parametrize(("name", "module"), [("bit-hash", exact), ("ternary", ternary)])
    def test_3_a_workload_counts_on_the_cpu(self, mistaken, name, module):
        def mistake(patch):
            patch.setattr(module, "torch", ForgetsDevices())

        shapes = ((5, 3), (4,)) if name == "bit-hash" else None
        assert MIXED in mistaken(mistake, model=ModelSpec(name=name, hidden=6, shapes=shapes))

    def test_4_an_order_counts_on_the_cpu(self, mistaken):
        def mistake(patch):
            patch.setattr(order_backends, "torch", ForgetsDevices())

        assert MIXED in mistaken(mistake, world=WorldSpec(size=3, order="nccl-sym"))

    def test_5_the_module_is_copied_after_a_case(self, mistaken):
        def mistake(patch):
            def accuracy(self, module):
                return self._inner.accuracy(copy.deepcopy(module).cpu())

            patch.setattr(placed._Placed, "accuracy", accuracy)

        system = SystemSpec(bucket_elems=20, overlap_params=True, overlap_grads=True)
        assert "cannot pickle" in mistaken(mistake, system=system)

    def test_6_the_mesh_is_of_cpu_ranks(self, mistaken):
        right = DeviceMesh.from_group

        def mistake(patch):
            patch.setattr(DeviceMesh, "from_group", lambda group, device: right(group, "cpu"))

        mistaken(mistake, system=FSDP2)


class TestFoundSince:
    def test_the_reference_steps_by_the_loop_where_the_system_does_by_lists(self, mistaken):
        right = stepping.build_optimizer

        def mistake(patch):
            def by_the_loop(spec, *, masters):
                chosen = OptimizerSpec(name=spec.name, lr=spec.lr, foreach=False)
                return right(chosen, masters=masters)

            patch.setattr(stepping, "build_optimizer", by_the_loop)

        optimizer = OptimizerSpec(name="adam", lr=0.01, foreach=True)
        assert "equality." in mistaken(
            mistake,
            optimizer=optimizer,
            run=RunSpec(steps=8),
            model=ModelSpec(name="mlp", hidden=24),
        )

    def test_step_counts_must_be_on_the_device(self, mistaken):
        right = answers._check_plain

        def mistake(patch):
            def strict(value, **named):
                if value.device.type == "cpu":
                    raise answers.ProtocolError("on the CPU")
                right(value, **named)

            patch.setattr(answers, "_check_plain", strict)

        assert "on the CPU" in mistaken(mistake, optimizer=ADAM)

    def test_no_rank_waits_for_the_stream_of_another(self, mistaken):
        def mistake(patch):
            for module in (late, timing, work, cluster):
                patch.setattr(module, "finish_streams", lambda tensors: None)

        mistaken(mistake, system=FSDP2)

    @pytest.mark.parametrize("module", [program, replay])
    def test_seeds_do_not_reach_the_device(self, mistaken, monkeypatch, module):
        build = MlpWorkload.build
        monkeypatch.setattr(
            MlpWorkload, "build", lambda self: nn.Sequential(build(self), nn.Dropout(0.5))
        )

        def mistake(patch):
            patch.setattr(module, "seed_device", lambda device, seed: None)

        assert "equality.loss" in mistaken(mistake)
