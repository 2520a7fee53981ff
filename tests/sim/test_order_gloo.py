"""The `gloo` order gives the same bits as real gloo processes that run the same program."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from zero_sim.sim import World

RANK_COUNT = 5
SCRIPT = pathlib.Path(__file__).with_name("reducing.py")
KINDS = (
    "all_reduce RedOpType.SUM",
    "all_reduce RedOpType.AVG",
    "reduce_scatter RedOpType.SUM",
    "reduce_scatter RedOpType.AVG",
    "reduce_scatter_list RedOpType.SUM",
    "reduce_scatter_list RedOpType.AVG",
    "reduce to 0",
    "coalesced all_reduce",
    "coalesced reduce_scatter",
)


@pytest.fixture(scope="module")
def reducing():
    spec = importlib.util.spec_from_file_location("reducing", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Results of every rank on real gloo, by name of the call."""
    folder = tmp_path_factory.mktemp("gloo")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(RANK_COUNT), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANK_COUNT)]


@pytest.fixture(scope="module")
def simulated(reducing):
    """Results of every simulated rank under each order."""
    with World(RANK_COUNT) as world:
        runs = {}
        for order in ("gloo", "nccl-ring"):
            world.configure(order=order)
            runs[order] = world.run(reducing.program)
        yield runs


def differing(real, simulated, kind):
    assert [run.keys() for run in real] == [run.keys() for run in simulated]
    names = [name for name in real[0] | real[1] | real[4] if name.startswith(kind)]
    assert names
    return [
        (rank, name)
        for rank in range(RANK_COUNT)
        for name in names
        if name in real[rank] and real[rank][name] != simulated[rank][name]
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_model_gives_the_bits_of_real_gloo(real, simulated, kind):
    assert differing(real, simulated["gloo"], kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_data_distinguishes_orders(real, simulated, kind):
    assert len(differing(real, simulated["nccl-ring"], kind)) > 10


def test_probe_agrees_with_real_gloo(real):
    verdicts = [
        verdict for run in real for name, verdict in run.items() if name.startswith("probe ")
    ]
    # Four probes in each of two groups, reported by each member.
    assert len(verdicts) == 4 * (5 + 3)
    assert set(verdicts) == {"agrees with gloo"}


@pytest.mark.parametrize("order", ["gloo", "nccl-ring"])
def test_probe_recognizes_another_simulated_backend(simulated, order):
    name = "probe reduce_scatter torch.bfloat16 on (0, 1, 2, 3, 4)"
    assert (simulated[order][0][name] == "agrees with gloo") == (order == "gloo")
