"""torch's `fully_shard` (FSDP2) under a plain optimizer of torch, on a mesh where the params are.

[Note: what FSDP2 computes]
Each module that is sharded reduces the gradients of all its params in one reduce-scatter with AVG,
in fp32: a sum, then a division, `post` of the reference; but on NCCL a product with the reciprocal
before the sum, `premul`. What the sharded params hold in `.grad` is divided already. A param is
cut along its first dimension into chunks of equally many rows, the last ones shorter or empty.
Between micro-batches gradients accumulate locally, whole.

[Note: clipping by norm]
Of sharded gradients torch takes the norm of each rank's rows, and one all-reduce adds the squares
of all of these over the ranks: `of-rows` of the reference.

[Note: params that some rank does not use]
Each rank leaves the params that its own losses do not reach out of the reduce-scatter. Where ranks
differ in that, they bring tensors of other params to one call: it fails where the sizes differ, and
where they are equal, gradients of different params are added without an error (torch 2.13, without
`reduce_scatter_unused_params`). So only models are declared of which every micro-batch uses all; a
test shows what comes of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities, Numerics
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.ddp import flat_state, plain_optimizer
from zero_sim.targets.torch.optim import OPTIMIZERS, LearningRates

if TYPE_CHECKING:
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
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        self._spec, self._rank, self._size = scenario.optimizer, group.rank(), group.size()
        # Where its params are: to a mesh of another device torch would move them.
        device = next((param.device.type for param in module.parameters()), "cpu")
        mesh = DeviceMesh.from_group(group, device)
        for child in module.children():
            # What is no more than a container has no forward to gather before.
            is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
            if is_called and any(param.requires_grad for param in child.parameters()):
                fully_shard(child, mesh=mesh)
        self._sharded: FSDPModule = fully_shard(module, mesh=mesh)
        self.module = module
        self._params = {
            name: cast("DTensor", param)
            for name, param in module.named_parameters()
            if param.requires_grad
        }
        self._optimizer = plain_optimizer(self._spec, dict(module.named_parameters()))
        self._rates = LearningRates(self._optimizer)
        self._reduced: dict[str, Tensor] = {}

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
        self._reduced = self._gradients()
        norm = self._clip()
        self._rates.scale(lr_factor)
        self._optimizer.step()
        return StepResult(norm=norm)

    def _clip(self) -> Tensor | None:
        """Clip as it is asked for; the norm before, where one was taken."""
        spec, norm = self._spec, None
        if spec.clip_norm is not None or spec.clip_value is not None:
            self._reduced = {name: grad.clone() for name, grad in self._reduced.items()}
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


_ROWS_ALONE = "its step looks at whole params, of which fully_shard gives it a rank's rows"


class TorchFSDP2:
    """`fully_shard` on fp32 params; params, gradients and state are sharded."""

    name = "torch-fsdp2"
    capabilities = Capabilities(
        stages=(1,),
        # A scalar has no rows to deal out, and backward fails where a param has no elements.
        scalar_params=False,
        empty_params=False,
        optimizers=tuple(
            name for name in OPTIMIZERS if name not in ("rprop", *WHOLE_PARAM_OPTIMIZERS)
        ),
        why_no_optimizer=(
            ("rprop", "torch's in-place masks have no rule for sharded tensors, and raise"),
            *((name, _ROWS_ALONE) for name in WHOLE_PARAM_OPTIMIZERS),
        ),
        follows=(
            *OPTIMIZER_SETTINGS,
            "optimizer.clip_norm",
            "optimizer.clip_value",
            "run.micro_batches",
        ),
    )
    numerics = Numerics(
        divide="avg",
        divide_by="ranks",
        sync="last",
        grad_dtype="param",
        grads_told="after-division",
        norm="of-rows",
        clip="fp32-reciprocal",
    )

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> FSDP2Engine:
        """Shard the module for training on this rank."""
        return FSDP2Engine(module, scenario=scenario, group=group)
