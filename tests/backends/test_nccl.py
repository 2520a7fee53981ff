"""NCCL's decisions before any call of CUDA, on a machine described by the test."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.backends import standin_nccl
from tests.backends.standin_nccl import StandIn
from zero_sim.backends import transports
from zero_sim.backends.folding import _barrier, _Carrier, _DoneWork
from zero_sim.backends.nccl import Nccl, check_alike
from zero_sim.backends.nccl_settings import PINS, TORCH_PINS, contradictions, pin, shown
from zero_sim.backends.real import RealRank
from zero_sim.backends.transports import find_transport
from zero_sim.errors import EnvironmentProblem
from zero_sim.sim.call import Call
from zero_sim.sim.failures import ContractViolation
from zero_sim.sim.order import Linear

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"


@pytest.fixture(autouse=True)
def no_sharing(monkeypatch):
    monkeypatch.delenv(SHARING, raising=False)


def nccl_with(monkeypatch, count):
    monkeypatch.setenv("ZERO_SIM_TEST_GPUS", str(count))
    return Nccl(StandIn())


def test_unset_variables_are_pinned():
    environment = {"NCCL_ALGO": "ring", "TORCH_NCCL_NAN_CHECK": "1"}
    pin(environment)
    assert environment["TORCH_NCCL_NAN_CHECK"] == "0"
    assert environment["NCCL_ALGO"] == "ring"
    assert {name: environment[name] for name in PINS if name != "NCCL_ALGO"} == {
        name: value for name, value in PINS.items() if name != "NCCL_ALGO"
    }
    assert environment.keys() >= TORCH_PINS.keys() | {"TORCH_FR_BUFFER_SIZE"}


def test_equivalent_values_are_no_contradiction():
    environment = {"NCCL_PROTO": "SIMPLE", "NCCL_MAX_CTAS": "0x1", "NCCL_NVLS_ENABLE": "0"}
    assert contradictions(environment | {"NCCL_MAX_NCHANNELS": "1"}) == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NCCL_ALGO", "Tree", "Ring"),
        ("NCCL_PROTO", "LL128", "Simple"),
        ("NCCL_MIN_CTAS", "16", "1"),
        ("NCCL_BUFFSIZE", "8388608", "4194304"),
        ("NCCL_TUNER_PLUGIN", "libnccl-tuner.so", "none"),
        ("NCCL_NVLS_ENABLE", "1", "0"),
        ("NCCL_MIN_NCHANNELS", "4", "1"),
        ("NCCL_MAX_NRINGS", "2", "1"),
    ],
)
def test_contradicting_cluster_setting_is_an_error(name, value, expected):
    environment = {name: value}
    with pytest.raises(EnvironmentProblem) as raised:
        pin(environment)
    assert f"{name}={value!r}, expected {expected!r}" in str(raised.value)
    assert f"Try `env -u {name}`" in str(raised.value)
    assert environment == {name: value}


def test_all_contradictions_are_reported_together():
    with pytest.raises(EnvironmentProblem) as raised:
        pin({"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL"})
    assert "env -u NCCL_ALGO -u NCCL_PROTO" in str(raised.value)


def test_files_and_other_settings_are_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    tmp_path.joinpath(".nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    environment = {"NCCL_GRAPH_FILE": "/graph.xml", "NCCL_DEBUG": "INFO", "TORCH_NCCL_X": "1"}
    pin(environment)
    lines = list(shown(environment))
    assert lines[0].startswith("pinned: NCCL_ALGO=Ring NCCL_PROTO=Simple ")
    assert "NCCL_DEBUG=INFO" in lines[1]
    assert "TORCH_NCCL_X=1" in lines[1]
    assert "NCCL_GRAPH_FILE=/graph.xml" in lines[2]
    assert str(tmp_path / ".nccl.conf") in lines[2]


def test_torch_without_nccl_is_refused(monkeypatch):
    monkeypatch.setattr(StandIn, "is_built", lambda self: False)
    with pytest.raises(EnvironmentProblem, match="expected a torch with NCCL"):
        nccl_with(monkeypatch, 1).check()


def test_machine_without_gpus_is_refused(monkeypatch):
    with pytest.raises(EnvironmentProblem, match="expected a GPU that torch"):
        nccl_with(monkeypatch, 0).take_device(0)


@pytest.mark.parametrize(("count", "local_rank", "index"), [(4, 3, 3), (1, 5, 0)])
def test_local_rank_selects_its_gpu(monkeypatch, count, local_rank, index):
    """If each process sees only one GPU, it uses that one."""
    nccl = nccl_with(monkeypatch, count)
    nccl.take_device(local_rank)
    assert nccl.device == torch.device("cpu", index)
    assert nccl.processes_max == count


def test_more_ranks_than_gpus_need_the_sharing_switch(monkeypatch):
    with pytest.raises(EnvironmentProblem) as raised:
        nccl_with(monkeypatch, 2).take_device(2)
    assert "expected a GPU for local rank 2, but this machine has 2" in str(raised.value)
    monkeypatch.setenv(SHARING, "1")
    nccl = nccl_with(monkeypatch, 2)
    nccl.take_device(2)
    assert (nccl.device, nccl.processes_max) == (torch.device("cpu", 0), None)


def identities(*changes):
    first = {"torch": "2.13", "CUDA": "13.0", "NCCL": "2.30.7", "GPU": "A", "only": "node GPU 0"}
    return [first | {"only": f"node GPU {i}"} | change for i, change in enumerate(changes)]


@pytest.mark.parametrize(("what", "other"), [("GPU", "B"), ("NCCL", "2.29"), ("torch", "2.12")])
def test_differing_nodes_are_named(what, other):
    with pytest.raises(EnvironmentProblem) as raised:
        check_alike(identities({}, {}, {what: other}))
    assert f"expected the same {what} for all ranks" in str(raised.value)
    assert f"{other!r} for rank 2" in str(raised.value)


def test_two_ranks_on_one_gpu_need_the_sharing_switch(monkeypatch):
    both = identities({}, {"only": "node GPU 0"})
    with pytest.raises(EnvironmentProblem, match="got ranks 0 and 1 on node GPU 0"):
        check_alike(both)
    monkeypatch.setenv(SHARING, "1")
    check_alike(both)


@pytest.fixture
def installed(monkeypatch):
    """Install the stand-in as this process's NCCL."""
    monkeypatch.setattr(transports, "_MAKERS", dict(transports._MAKERS))
    monkeypatch.setattr(transports, "_MADE", {})
    for name in (*PINS, *TORCH_PINS, "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    standin_nccl.install()


@pytest.mark.parametrize("order", [None, "linear"])
def test_single_rank_runs_in_this_process(installed, order):
    rank = RealRank(backend="nccl", rank=0, store=dist.HashStore())
    rank.transport.prepare({})
    rank.transport.take_device(0)
    rank.begin(0)
    with rank.world(1, order=order):
        assert not rank.is_setting_up
        x = torch.ones(3)
        dist.all_reduce(x, async_op=True).get_future().wait()
        dist.barrier()
        assert dist.new_group([0]).size() == 1
        assert x.tolist() == [1.0] * 3
    assert not rank.is_spoilt
    rank.begin(1)
    with pytest.raises(ValueError, match="enough"), rank.world(1, order=order):
        raise ValueError("enough")
    assert rank.is_spoilt
    assert not dist.is_initialized()


def test_notes_report_versions_and_pins(installed, monkeypatch):
    transport = find_transport("nccl")
    pinned = {}
    transport.prepare(pinned)
    for name, value in pinned.items():
        monkeypatch.setenv(name, value)
    transport.take_device(1)
    notes = transport.notes(4)
    assert notes[0] == "NCCL 2.30.7, CUDA none on stand-in, 4 processes"
    assert notes[1].startswith("pinned: NCCL_ALGO=Ring ")
    assert "TORCH_NCCL_NAN_CHECK=0" in notes[2]


def test_ranks_without_gpu_identity_are_accepted():
    check_alike([{"torch": "2.13"}] * 3)


def test_folding_refuses_tensors_of_another_device():
    carrier = _Carrier(None, Linear(), rank=3, device=torch.device("cpu", 0))
    call = Call(kind="all_reduce", inputs=[torch.ones(2, device="meta")], outputs=[])
    with pytest.raises(ContractViolation) as raised:
        carrier.issue(None, 0, call, asynchronous=False)
    assert "expected all_reduce with tensors on cpu, got a tensor of shape (2,) on meta" in str(
        raised.value
    )
    assert raised.value.aspect == "device"


def test_a_barrier_names_the_device():
    asked = []

    class Inner:
        def barrier(self, options):
            asked.append((options.device_ids, options.device))
            return _DoneWork([])

    _barrier(Inner(), torch.device("cpu", 3))
    assert asked == [([3], torch.device("cpu", 3))]


def test_futures_carry_devices(monkeypatch):
    made = []
    monkeypatch.setattr(
        torch.futures, "Future", lambda *, devices: made.append(devices) or FakeFuture()
    )

    class FakeFuture:
        def set_result(self, result):
            pass

    _DoneWork([torch.ones(1), torch.ones(1, device="meta")]).get_future()
    _DoneWork([torch.ones(1)]).get_future()
    assert made == [[torch.device("meta")], None]
