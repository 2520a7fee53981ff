"""One rank of FullyShardedDataParallel (FSDP1) as its options, and what stands for some, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.options import OptionValue
from zero_sim.targets.torch.fsdp1_engine import FSDP1Engine
from zero_sim.targets.torch.wrapping import widen_params

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HYBRID = {2: "_HYBRID_SHARD_ZERO2", 3: "HYBRID_SHARD"}
_PREFETCH = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST"}


class FSDP1KnobsEngine(FSDP1Engine):
    """One rank of FullyShardedDataParallel as options say.

    Args:
        module: The model; params of 16 bits are sharded as fp32 ones and gathered as they are.
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
        options: Mapping[str, OptionValue],
    ) -> None:
        self._options = options
        self._dtype = _DTYPES[scenario.model.dtype]
        self._syncs_every = scenario.system.sync == "every"
        widen_params(module)
        super().__init__(module, scenario=scenario, group=group)

    def _chosen(
        self, scenario: Scenario, *, group: ProcessGroup, device: torch.device
    ) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy

        options: Any = self._options
        reduce = options["reduce_dtype"]
        prefetch = _PREFETCH.get(options["backward_prefetch"])
        chosen = {
            **super()._chosen(scenario, group=group, device=device),
            "mixed_precision": MixedPrecision(
                param_dtype=None if self._dtype is torch.float32 else self._dtype,
                reduce_dtype=_DTYPES.get(reduce),
                # Batches come as the bare model takes them.
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            "backward_prefetch": None if prefetch is None else BackwardPrefetch[prefetch],
            "forward_prefetch": options["forward_prefetch"],
            "limit_all_gathers": options["limit_all_gathers"],
        }
        blocks = scenario.system.redundancy
        if blocks == 1:
            return chosen
        del chosen["process_group"]
        shape, names = (blocks, group.size() // blocks), ("replicate", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        strategy = ShardingStrategy[_HYBRID[scenario.system.stage]]
        return {**chosen, "device_mesh": mesh, "sharding_strategy": strategy}

    def start_micro_batch(self, *, last: bool) -> None:
        """Keep gradients local, but for the last micro-batch, or not."""
        super().start_micro_batch(last=last or self._syncs_every)

    def params(self) -> Mapping[str, Tensor]:
        """Full working params, gathered, in the dtype in which forward has them."""
        return {name: param.to(self._dtype) for name, param in super().params().items()}
