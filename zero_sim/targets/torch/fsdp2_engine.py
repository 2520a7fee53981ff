"""torch's `fully_shard` (FSDP2) and a plain optimizer on a rank."""

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
from zero_sim.targets.torch.optim import LearningRates, flat_state, plain_optimizer, reduced_grads
from zero_sim.targets.torch.wrapping import called_children, widen_params

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDP2Engine:
    """`fully_shard` on a rank, with a unit for each child with params and for the rest.

    16-bit params are sharded in fp32 and gathered in 16 bits.
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
        # Sharded params are the masters, so they must be fp32; `param_dtype` only narrows gathers.
        widen_params(module)
        self.module = module
        # The params' device, because torch moves params to the mesh's device.
        device = next((param.device.type for param in module.parameters()), "cpu")
        # Offloaded shards are on the CPU, but parts must be on the model's device.
        if options["cpu_offload"] and device != "cpu":
            raise UsageError(
                "expected a model on the CPU with option cpu_offload, because its shards are "
                f"reported from there, got {device!r}. Remove the option."
            )
        mesh = _build_mesh(group, blocks=scenario.system.redundancy, device=device)
        # The mesh's last dimension is the shard group.
        self._rank, self._size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        # Children first, because the call for the whole model takes all remaining params.
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
        # After sharding, because `fully_shard` replaces params by DTensors.
        self._optimizer = plain_optimizer(self._spec, dict(module.named_parameters()))
        self._rates = LearningRates(self._optimizer)
        self._reduced: dict[str, Tensor] = {}

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> FSDPModule:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options = self._options
        # Only at the root: outputs between modules keep the dtype of the bare model.
        widens = options["fp32_output"] and module is self.module
        policy = MixedPrecisionPolicy(
            param_dtype=None if self._dtype is torch.float32 else self._dtype,
            reduce_dtype=_DTYPES.get(options["reduce_dtype"]),
            output_dtype=torch.float32 if widens else None,
            # Batches already have the dtypes that the bare model takes.
            cast_forward_inputs=False,
        )
        more: dict[str, Any] = {}
        if options["cpu_offload"]:
            # Pinned memory needs an accelerator, where this option is refused.
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
        # These setters change a single module, without its children.
        if options["divide_factor"]:
            unit.set_gradient_divide_factor(options["divide_factor"])
        unit.set_force_sum_reduction_for_comms(options["force_sum"])
        unit.set_unshard_in_backward(options["unshard_in_backward"])

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Switch off communication that waits for the last micro-batch."""
        options = self._options
        # Keep reduce-scatters on; only the all-reduce over replicas waits.
        if options["all_reduce_last"]:
            self._sharded.set_requires_all_reduce(last)
        elif self._system.sync == "last":
            self._sharded.set_requires_gradient_sync(last)
        if options["kept_after_backward"]:
            self._sharded.set_reshard_after_backward(last)
        if options["waits_at_last"]:
            self._sharded.set_is_last_backward(last)

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, during which gradients are reduced."""
        loss.backward()

    def step(self, *, lr_factor: float) -> StepResult:
        """Clip if the scenario does, and update the shards."""
        # Read gradients before clipping, which writes to them.
        self._reduced = reduced_grads(self._spec, self._gradients())
        norm = self._clip()
        self._rates.scale(lr_factor)
        self._optimizer.step()
        return StepResult(norm=norm)

    def _clip(self) -> Tensor | None:
        """Clip as the scenario does, and return the norm before clipping; None without a bound."""
        spec, norm = self._spec, None
        if spec.clip_value is not None:
            # Elementwise, so each rank clips its own rows.
            for grad in self._gradients().values():
                grad.clamp_(-spec.clip_value, spec.clip_value)
        if spec.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._params.values(), spec.clip_norm)
            # `norm` is a DTensor of each rank's norm; full_tensor adds the squares over ranks.
            norm = cast("DTensor", norm).full_tensor()
        return norm

    def params(self) -> Mapping[str, Tensor]:
        """Return gathered working params, in forward's dtype."""
        return {
            # A collective for each param, in registration order on every rank.
            name: param.full_tensor().detach().to(self._dtype)
            for name, param in self._params.items()
        }

    def parts(self) -> Iterator[OwnedPart]:
        """Yield this rank's rows of every param."""
        for name, param in self._params.items():
            local = param.to_local().detach().reshape(-1)
            grad = self._reduced.get(name)
            state = self._optimizer.state.get(param, {})
            yield OwnedPart(
                place=self._place(name, param.shape),
                grad=torch.zeros_like(local) if grad is None else grad.detach().reshape(-1),
                master=local,
                # Moments are DTensors like their params; the step counter is a plain tensor.
                state=flat_state({key: local_of(value) for key, value in state.items()}),
            )

    def _place(self, name: str, shape: torch.Size) -> Place:
        # As torch.chunk: the number of rows is rounded up, so the last ranks may have fewer rows or
        # none.
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
        """Save shards, the only form of this target."""
        dcp.save(self.module, self._optimizer, path)

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Load shards that any number of ranks saved."""
        dcp.load(self.module, self._optimizer, path)

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Name a param with a nonzero gradient; padding is not observed."""
        if padding_only:
            return ""
        return next(
            (f"param {name!r}" for name, grad in self._gradients().items() if grad.any()), ""
        )


def _build_mesh(group: ProcessGroup, *, blocks: int, device: str) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if blocks == 1:
        return DeviceMesh.from_group(group, device)
    # Mesh rows are shard groups, so each shard group has consecutive ranks.
    shape = (blocks, group.size() // blocks)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def _reshard_after_forward(system: SystemSpec, *, few: int) -> bool | int | None:
    """Return a case's `reshard_after_forward`; None for torch's default."""
    # torch's default keeps the root's params unsharded and reshards all others.
    if system.stage != 3:
        return None
    # 0 stands for the case's setting.
    return few or system.reshard_after_forward


def _prefetch(units: list[FSDPModule], *, ahead: int | None) -> None:
    """Make each unit prefetch `ahead` units: the next in forward, the previous in backward."""
    # Without these calls, torch only prefetches in backward, in reverse order of the forward.
    for index, unit in enumerate(units if ahead else ()):
        unit.set_modules_to_forward_prefetch(units[index + 1 :][:ahead])
        unit.set_modules_to_backward_prefetch(units[:index][::-1][:ahead])


def local_of(value: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; other tensors unchanged."""
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value
