"""A workload on another device: its module and its batches, moved there."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from zero_sim.errors import EnvironmentProblem
from zero_sim.workloads.protocol import Batch, ExpertWorkload, Workload


def on_device(workload: Workload, device: str) -> Workload:
    """A workload whose module and batches are on a device; it draws them on the CPU all the same.

    Args:
        workload: What to move.
        device: `cpu` or `cuda`; for `cuda`, the current device of this process.

    Raises:
        EnvironmentProblem: There is no such device here.
    """
    if device == "cpu":
        return workload
    check_device(device)
    kind = _PlacedExperts if isinstance(workload, ExpertWorkload) else _Placed
    return kind(workload, torch.device(device))


def check_device(device: str) -> None:
    """Check that this process can compute on a device.

    Raises:
        EnvironmentProblem: It cannot.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem(
            f"expected a GPU that torch {torch.__version__} can use, got none. "
            "Try --device cpu, or `zero-sim doctor`."
        )


class _Placed:
    """Moves what another workload makes."""

    def __init__(self, inner: Workload, device: torch.device) -> None:
        self._inner = inner
        self._device = device

    def build(self) -> nn.Module:
        return self._inner.build().to(self._device)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        batch = self._inner.batch(step=step, rank=rank, micro=micro)
        targets = None if batch.targets is None else batch.targets.to(self._device)
        return replace(batch, inputs=batch.inputs.to(self._device), targets=targets)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return self._inner.loss(module, batch)

    def accuracy(self, module: nn.Module) -> float | None:
        # Held-out data stays where it is; the module's own params must not be moved.
        return self._inner.accuracy(copy.deepcopy(module).cpu())


class _PlacedExperts(_Placed):
    """The same for a workload whose module differs from rank to rank."""

    def build_share(self, expert_index: int) -> nn.Module:
        assert isinstance(self._inner, ExpertWorkload)
        return self._inner.build_share(expert_index).to(self._device)
