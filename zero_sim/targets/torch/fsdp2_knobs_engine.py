"""One rank of `fully_shard` as its options, and fields of the scenario that stand for some, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.options import OptionValue
from zero_sim.targets.torch.fsdp2_engine import FSDP2Engine
from zero_sim.targets.torch.wrapping import widen_params

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDP2KnobsEngine(FSDP2Engine):
    """One rank of `fully_shard` as options say.

    Args:
        module: The model; params of 16 bits are sharded as fp32 ones and gathered as they are.
        scenario: The case; `optimizer` and `system` are read.
        group: The data-parallel group.
        options: The value of each option.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        scenario: Scenario,
        group: ProcessGroup,
        options: Mapping[str, OptionValue],
    ) -> None:
        self._scenario, self._options = scenario, options
        self._system, self._root = scenario.system, module
        self._dtype = _DTYPES[scenario.model.dtype]
        widen_params(module)
        super().__init__(module, scenario=scenario, group=group)
        for each in (*self._units, self._sharded):
            self._set(each)
        self._prefetch()

    def _build_mesh(self, group: ProcessGroup, device: str) -> DeviceMesh:
        if self._options["cpu_offload"] and device != "cpu":
            raise UsageError(
                "expected a model on the CPU with option cpu_offload, from where its shards could "
                f"be told, got {device!r}. Try leaving the option out."
            )
        if self._system.redundancy == 1:
            return super()._build_mesh(group, device)
        from torch.distributed.device_mesh import init_device_mesh

        blocks = self._system.redundancy
        shape = (blocks, group.size() // blocks)
        return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> FSDPModule:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options, system = self._options, self._system
        # Between modules outputs go on as they are.
        widens = options["fp32_output"] and module is self._root
        policy = MixedPrecisionPolicy(
            param_dtype=None if self._dtype is torch.float32 else self._dtype,
            reduce_dtype=_DTYPES.get(cast("str", options["reduce_dtype"])),
            output_dtype=torch.float32 if widens else None,
            # Batches come as the bare model takes them.
            cast_forward_inputs=False,
        )
        more: dict[str, Any] = {}
        if options["cpu_offload"]:
            more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        few = cast("int", options["reshard_ranks"])
        reshard = few or system.reshard_after_forward
        return fully_shard(
            module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, **more
        )

    def _set(self, unit: FSDPModule) -> None:
        options = self._options
        factor = cast("float", options["divide_factor"])
        if factor:
            unit.set_gradient_divide_factor(factor)
        unit.set_force_sum_reduction_for_comms(bool(options["force_sum"]))
        unit.set_unshard_in_backward(bool(options["unshard_in_backward"]))

    def _prefetch(self) -> None:
        """Have each unit gather so many further ones, forward those after it, backward before."""
        ahead, units = self._system.prefetch, self._units
        for index, unit in enumerate(units if ahead else ()):
            unit.set_modules_to_forward_prefetch(units[index + 1 :][:ahead])
            unit.set_modules_to_backward_prefetch(units[:index][::-1][:ahead])

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

    def params(self) -> Mapping[str, Tensor]:
        """Full working params, gathered, in the dtype in which forward has them."""
        return {name: param.to(self._dtype) for name, param in super().params().items()}
