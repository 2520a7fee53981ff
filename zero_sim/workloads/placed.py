"""A workload whose module and batches are moved to another device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from zero_sim.host.device import check_device
from zero_sim.workloads.protocol import (
    Batch,
    Workload,
    has_experts,
    is_split,
    loss_terms,
    total_loss,
)


def on_device(workload: Workload, device: str) -> Workload:
    """Return a workload with module and batches on a device. Values are still drawn on the CPU.

    A device name without an index, such as `cuda`, means the process's current device.

    Raises:
        EnvironmentProblem: The device does not exist here.
    """
    placed = check_device(device)
    if placed.type == "cpu":
        return workload
    kind = _PlacedExperts if has_experts(workload) else _Placed
    if is_split(workload):
        kind = _PlacedParts
    return kind(workload, placed)


class _Placed:
    """Moves another workload's modules and batches."""

    def __init__(self, inner: Workload, device: torch.device) -> None:
        self._inner = inner
        self._device = device

    def build(self) -> nn.Module:
        return self._placed(self._inner.build())

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        batch = self._inner.batch(step=step, rank=rank, micro=micro)
        targets = None if batch.targets is None else batch.targets.to(self._device)
        inputs, extra = batch.inputs.to(self._device), batch.extra
        extra = tuple(each.to(self._device) for each in extra)
        return replace(batch, inputs=inputs, targets=targets, extra=extra)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return total_loss(self.terms(module, batch))

    def terms(self, module: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        return loss_terms(self._inner, module, batch)

    def accuracy(self, module: nn.Module) -> float | None:
        # Held-out data stays on the CPU, so move it to the module, and outputs back.
        def call(inputs: Tensor) -> Tensor:
            return module(inputs.to(self._device)).cpu()

        return self._inner.accuracy(call)  # pyrefly: ignore

    def _placed(self, module: nn.Module) -> nn.Module:
        """Move a module; params that share memory still do, on any device."""
        moved: dict[nn.Parameter, nn.Parameter] = {}
        for part in module.modules():
            # Module entries, because parameters() yields tied params only once.
            for name, param in part._parameters.items():
                if param is not None:
                    if param not in moved:
                        moved[param] = _copy_of(param, self._device)
                    setattr(part, name, moved[param])
        # Buffers, which the loop above does not move.
        return module.to(self._device)


def _copy_of(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a param on a device, with its attributes."""
    # `module.to` moves params in place only to CUDA. Elsewhere it makes a new param for each name,
    # and loses the gradient dtype.
    copy = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
    copy.__dict__.update(param.__dict__)
    copy.grad_dtype = param.grad_dtype
    return copy


class _PlacedExperts(_Placed):
    """`_Placed` for a workload whose module differs between ranks."""

    def build_share(self, expert_index: int) -> nn.Module:
        assert has_experts(self._inner)
        return self._placed(self._inner.build_share(expert_index))


class _PlacedParts(_Placed):
    """`_Placed` for a workload whose module is split over tensor-parallel ranks."""

    def build_part(self, tp_index: int) -> nn.Module:
        assert is_split(self._inner)
        return self._placed(self._inner.build_part(tp_index))
