"""Checks before a run that a device exists and that its cuBLAS workspaces fit.

`tests/device/` covers settings on a real device.
"""

import pytest
import torch

from zero_sim.errors import EnvironmentProblem
from zero_sim.host import device
from zero_sim.host.device import check_device, computing_on, workspaces_in_words

MIB = 1 << 20


def test_cpu_needs_no_settings():
    deterministic = torch.are_deterministic_algorithms_enabled()
    assert check_device("cpu") == torch.device("cpu")
    with computing_on("cpu", rank_threads=3) as notes:
        assert list(notes) == []
        assert torch.are_deterministic_algorithms_enabled() == deterministic


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuda", r"expected a GPU that torch \S+ can use, got none. Try --device cpu"),
        ("cuda:3", "expected a GPU"),
        ("xpu", "expected a device 'xpu' that torch"),
        ("meta", "expected a device 'meta' that torch"),
        ("gpu", "expected a device that torch .* knows, such as cpu here, got 'gpu'. Try"),
        ("cuda:x", "got 'cuda:x'"),
        ("", "got ''"),
    ],
)
def test_missing_device_is_refused(monkeypatch, name, said):
    monkeypatch.setattr(device, "_accelerator", lambda: None)
    with pytest.raises(EnvironmentProblem, match=said):
        check_device(name)


def test_device_index_out_of_range_is_refused(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(device, "_accelerator", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_device("cuda:1").index == 1
    with pytest.raises(EnvironmentProblem, match="a device from cuda:0 to cuda:1, got 'cuda:2'"):
        check_device("cuda:2")


def test_workspaces_are_counted_per_rank_thread():
    told = workspaces_in_words(":4096:8", rank_threads=8, free_bytes=1000 * MIB)
    assert told == (
        "8 rank threads with a cuBLAS workspace of 32 MiB each (CUBLAS_WORKSPACE_CONFIG=:4096:8): "
        "256 MiB of 1,000 MiB free"
    )


def test_workspaces_that_do_not_fit_are_refused_with_sizes():
    with pytest.raises(EnvironmentProblem, match=r"3,200 MiB of 1,000 MiB free.*CONFIG=:16:8"):
        workspaces_in_words(":4096:8", rank_threads=100, free_bytes=1000 * MIB)
    with pytest.raises(EnvironmentProblem, match="Try fewer ranks"):
        workspaces_in_words(":16:8", rank_threads=100, free_bytes=MIB)
    assert "12 MiB" in workspaces_in_words(":16:8", rank_threads=100, free_bytes=1000 * MIB)


def test_non_deterministic_workspace_is_refused():
    with pytest.raises(EnvironmentProblem, match=r"to be :4096:8 or :16:8, .* got ':0:0'"):
        workspaces_in_words(":0:0", rank_threads=1, free_bytes=MIB)
