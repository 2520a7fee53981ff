"""Cases on a device: placement of params, random numbers, settings, notes, and drawn cases."""

from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.standin import NAME
from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.host.device import computing_on
from zero_sim.reference.placement import MemoryLayout, memory_layout_of, move_params
from zero_sim.scenario.spec import DataSpec, ModelSpec, RunSpec, Scenario, WorldSpec
from zero_sim.sim import World
from zero_sim.targets import find_target
from zero_sim.workloads import build_workload, on_device

BATCH = 25


@pytest.mark.parametrize(
    ("target", "batch"),
    [
        *(("zero_sim", batch) for batch in range(16)),
        ("torch-ddp", 0),
        ("torch-zero-redundancy", 0),
        ("torch-fsdp2", 0),
        ("torch-fsdp2", 1),
    ],
)
def test_drawn_cases_pass_on_device(target, batch):
    """The 500 cases are the same in every run."""
    drawn = draws(drawn_cases(find_target(target)), seed=f"device {target} {batch}")
    with WorldPool() as pool:
        for scenario in islice(drawn, BATCH):
            result = run_case(scenario, pool=pool, target=find_target(target), device=NAME)
            # Inconclusive depends on the case only, not on the device.
            assert result.verdict in ("pass", "inconclusive"), (scenario, result)


@pytest.mark.parametrize("address", [64, 256, 508])
def test_param_moves_to_address_modulo_512(address):
    param = nn.Parameter(torch.arange(15.0, device=NAME).reshape(3, 5))
    wanted = MemoryLayout(address, (5, 1))
    move_params({"w": param}, {"w": wanted})
    assert memory_layout_of(param) == wanted
    assert torch.equal(param.detach().cpu().reshape(-1), torch.arange(15.0))


def workload_of(name, **model):
    spec = ModelSpec(name=name, hidden=6, **model)
    return on_device(build_workload(Scenario(schema=1, name="case", model=spec)), NAME)


def test_tied_params_stay_tied_on_device():
    module = workload_of("unusual").build()
    assert module.head.weight is module.embedding
    assert {param.device.type for param in module.parameters()} == {NAME}


def test_params_keep_their_grad_dtype():
    module = workload_of("fp8", dtype="bf16").build()
    assert {param.grad_dtype for param in module.parameters()} == {torch.bfloat16}


def test_accuracy_on_device_equals_cpu():
    pytest.importorskip("sklearn")
    scenario = Scenario(schema=1, name="case", model=ModelSpec(name="digits", hidden=16))
    workload = build_workload(scenario)
    placed = on_device(workload, NAME)
    module = placed.build()
    accuracy = placed.accuracy(module)
    assert accuracy == workload.accuracy(module.to("cpu"))


def test_each_rank_has_its_own_device_rng_state():
    """Draws of other ranks in between change nothing."""

    def program(rank):
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(2, device=NAME).tolist())
            dist.barrier()
        return drawn

    with World(2, seed=5) as both, World(1, seed=5) as alone:
        first, second = both.run(program)
        (by_itself,) = alone.run(program)
    assert first == by_itself
    assert first != second


def test_determinism_settings_apply_in_ranks_and_are_restored():
    def settings():
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        return (
            torch.are_deterministic_algorithms_enabled(),
            (matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
            (cudnn.benchmark, cudnn.deterministic),
        )

    before, ieee = settings(), ("ieee", "ieee", "ieee")
    with computing_on(NAME, rank_threads=2) as notes, World(2) as world:
        assert world.run(lambda rank: settings()) == [(True, ieee, False, False, (False, True))] * 2
    assert settings() == before
    (note,) = notes
    assert note.startswith("computed on standin (stand-in device): deterministic algorithms")


def test_indexed_device_is_used_by_every_rank():
    scenario = Scenario(
        schema=1,
        name="case",
        model=ModelSpec(name="mlp", hidden=6),
        world=WorldSpec(size=2),
        data=DataSpec(rows=2),
        run=RunSpec(steps=1),
    )
    result = run_case(scenario, device=f"{NAME}:1")
    assert result.verdict == "pass"
    assert any(note.startswith("computed on standin:1 (") for note in result.notes)
