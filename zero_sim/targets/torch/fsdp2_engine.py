"""One rank of torch's `fully_shard` (FSDP2) and a plain optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import CheckpointForm, Scenario, SystemSpec
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch import dcp
from zero_sim.targets.torch.optim import LearningRates, flat_state, grads_to_tell, plain_optimizer
from zero_sim.targets.torch.wrapping import called_children, widen_params

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDP2Engine:
    """One rank of `fully_shard`, on every child with params and on what is left.

    Args:
        module: The model; its params become sharded ones. Those of 16 bits are sharded as fp32
            ones and gathered as they are.
        scenario: The case; `model.dtype`, `optimizer` and `system` are read.
        group: The data-parallel group.
        options: The value of each option.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        scenario: Scenario,
        group: ProcessGroup,
        options: Mapping[str, Any],
    ) -> None:
        self._spec, self._system, self._options = scenario.optimizer, scenario.system, options
        self._dtype = _DTYPES[scenario.model.dtype]
        widen_params(module)
        self.module = module
        # Where its params are: to a mesh of another device torch would move them.
        device = next((param.device.type for param in module.parameters()), "cpu")
        if options["cpu_offload"] and device != "cpu":
            raise UsageError(
                "expected a model on the CPU with option cpu_offload, from where its shards could "
                f"be told, got {device!r}. Try leaving the option out."
            )
        mesh = _build_mesh(group, blocks=scenario.system.redundancy, device=device)
        self._rank, self._size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        units = [self._shard(child, mesh) for _, child in called_children(module)]
        self._sharded = self._shard(module, mesh)
        for each in (*units, self._sharded):
            self._set(each)
        _prefetch(units, ahead=scenario.system.prefetch)
        self._params = {
            name: cast("DTensor", param)
            for name, param in module.named_parameters()
            if param.requires_grad
        }
        self._optimizer = plain_optimizer(self._spec, dict(module.named_parameters()))
        self._rates = LearningRates(self._optimizer)
        self._reduced: dict[str, Tensor] = {}

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> FSDPModule:
        """Shard a module, but for what of it is sharded already."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options = self._options
        # Between modules outputs go on as they are.
        widens = options["fp32_output"] and module is self.module
        policy = MixedPrecisionPolicy(
            param_dtype=None if self._dtype is torch.float32 else self._dtype,
            reduce_dtype=_DTYPES.get(options["reduce_dtype"]),
            output_dtype=torch.float32 if widens else None,
            # Batches come as the bare model takes them.
            cast_forward_inputs=False,
        )
        more: dict[str, Any] = {}
        if options["cpu_offload"]:
            more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        return fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=_reshard_after_forward(
                self._system, few=cast("int", options["reshard_ranks"])
            ),
            **more,
        )

    def _set(self, unit: FSDPModule) -> None:
        options = self._options
        if options["divide_factor"]:
            unit.set_gradient_divide_factor(options["divide_factor"])
        unit.set_force_sum_reduction_for_comms(options["force_sum"])
        unit.set_unshard_in_backward(options["unshard_in_backward"])

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Keep local what the case says, but for the last micro-batch."""
        options = self._options
        if options["all_reduce_last"]:
            self._sharded.set_requires_all_reduce(last)
        elif self._system.sync == "last":
            self._sharded.set_requires_gradient_sync(last)
        if options["kept_after_backward"]:
            self._sharded.set_reshard_after_backward(last)
        if options["waits_at_last"]:
            self._sharded.set_is_last_backward(last)

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
        """Full working params, gathered, in the dtype in which forward has them."""
        return {
            name: param.full_tensor().detach().to(self._dtype)
            for name, param in self._params.items()
        }

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

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save shards; there is one form."""
        dcp.save(self.module, self._optimizer, path)

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Load shards, of any number of ranks."""
        dcp.load(self.module, self._optimizer, path)

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Name a param with a gradient where none must be; padding is not looked at."""
        if padding_only:
            return ""
        return next(
            (f"param {name!r}" for name, grad in self._gradients().items() if grad.any()), ""
        )


def _build_mesh(group: ProcessGroup, *, blocks: int, device: str) -> DeviceMesh:
    """The ranks, of which those along the last dimension share what is sharded."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if blocks == 1:
        return DeviceMesh.from_group(group, device)
    shape = (blocks, group.size() // blocks)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def _reshard_after_forward(system: SystemSpec, *, few: int) -> bool | int | None:
    """Return the setting that a case asks for; None for torch's own, which differs by module.

    Args:
        system: Settings of the case.
        few: Number of neighbouring ranks that keep params until backward; 0 for none.
    """
    if system.stage != 3:
        return None
    return few or system.reshard_after_forward


def _prefetch(units: list[FSDPModule], *, ahead: int | None) -> None:
    """Have each unit gather so many further ones, forward those after it, backward before."""
    for index, unit in enumerate(units if ahead else ()):
        unit.set_modules_to_forward_prefetch(units[index + 1 :][:ahead])
        unit.set_modules_to_backward_prefetch(units[:index][::-1][:ahead])


def local_of(value: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value
