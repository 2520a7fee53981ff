"""One rank of torch's `fully_shard` (FSDP2) and a plain optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.optim import LearningRates, flat_state, grads_to_tell, plain_optimizer
from zero_sim.targets.torch.wrapping import called_children

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class FSDP2Engine:
    """One rank of `fully_shard`, on every child with params and on what is left.

    Args:
        module: The model; its params become sharded ones.
        scenario: The case; `optimizer` is read.
        group: The data-parallel group.
    """

    def __init__(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> None:
        self._spec = scenario.optimizer
        # Where its params are: to a mesh of another device torch would move them.
        device = next((param.device.type for param in module.parameters()), "cpu")
        mesh = self._build_mesh(group, device)
        self._rank, self._size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self._units = [self._shard(child, mesh) for _, child in called_children(module)]
        self._sharded = self._shard(module, mesh)
        self.module = module
        self._params = {
            name: cast("DTensor", param)
            for name, param in module.named_parameters()
            if param.requires_grad
        }
        self._optimizer = plain_optimizer(self._spec, dict(module.named_parameters()))
        self._rates = LearningRates(self._optimizer)
        self._reduced: dict[str, Tensor] = {}

    def _build_mesh(self, group: ProcessGroup, device: str) -> DeviceMesh:
        """The ranks, of which those along the last dimension share what is sharded."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(group, device)

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> FSDPModule:
        """Shard a module, but for what of it is sharded already."""
        from torch.distributed.fsdp import fully_shard

        return fully_shard(module, mesh=mesh)

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Keep gradients whole and local, but for the last micro-batch."""
        self._sharded.set_requires_gradient_sync(last)

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, under which gradients are reduced."""
        loss.backward()

    def step(self, *, lr_factor: float) -> StepResult:
        """Clip, if that is asked for, and update the shards."""
        self._reduced = grads_to_tell(self._spec, self._gradients())
        norm = self._clip()
        self._rates.scale(lr_factor)
        self._optimizer.step()
        return StepResult(norm=norm)

    def _clip(self) -> Tensor | None:
        """Clip as it is asked for; the norm before, where one was taken."""
        spec, norm = self._spec, None
        if spec.clip_value is not None:
            for grad in self._gradients().values():
                grad.clamp_(-spec.clip_value, spec.clip_value)
        if spec.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._params.values(), spec.clip_norm)
            norm = cast("DTensor", norm).full_tensor()
        return norm

    def params(self) -> Mapping[str, Tensor]:
        """Full working params, gathered."""
        return {name: param.full_tensor().detach() for name, param in self._params.items()}

    def parts(self) -> Iterator[OwnedPart]:
        """This rank's rows of every param."""
        for name, param in self._params.items():
            local = param.to_local().detach().reshape(-1)
            grad = self._reduced.get(name)
            state = self._optimizer.state.get(param, {})
            yield OwnedPart(
                place=self._place(name, param.shape),
                grad=torch.zeros_like(local) if grad is None else grad.detach().reshape(-1),
                master=local,
                state=flat_state({key: local_of(value) for key, value in state.items()}),
            )

    def _place(self, name: str, shape: torch.Size) -> Place:
        rows, row_elems = shape[0], prod(shape[1:])
        chunk = -(-rows // self._size)
        start, stop = (min(rows, chunk * rank) for rank in (self._rank, self._rank + 1))
        return Place(param=name, start=start * row_elems, stop=stop * row_elems)

    def _gradients(self) -> dict[str, Tensor]:
        return {
            name: local_of(param.grad)
            for name, param in self._params.items()
            if param.grad is not None
        }

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Which param has a gradient where none must be; padding is not looked at."""
        if padding_only:
            return ""
        return next(
            (f"param {name!r}" for name, grad in self._gradients().items() if grad.any()), ""
        )


def local_of(value: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value
