"""One rank of torch's FullyShardedDataParallel (FSDP1) and a plain optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import Scenario, SystemSpec
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.optim import LearningRates, flat_state, grads_to_tell, plain_optimizer
from zero_sim.targets.torch.wrapping import called_children, widen_params

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STRATEGIES = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
_HYBRID = {2: "_HYBRID_SHARD_ZERO2", 3: "HYBRID_SHARD"}
_PREFETCH = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST"}


class FSDP1Engine:
    """One rank of FullyShardedDataParallel, around every child with params and what is left.

    Args:
        module: The model; its params become parts of flat ones. Those of 16 bits are sharded as
            fp32 ones and gathered as they are.
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
        from torch.distributed.fsdp import FullyShardedDataParallel

        self._fsdp_type = FullyShardedDataParallel
        self._dtype = _DTYPES[scenario.model.dtype]
        self._syncs_every = scenario.system.sync == "every"
        widen_params(module)
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        chosen = {
            **self._settings(options),
            **_sharding(scenario.system, group=group, device=device),
        }
        self._shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        with warnings.catch_warnings():
            # That NO_SHARD is to become DDP, and is what one rank gets.
            warnings.simplefilter("ignore")
            for name, child in called_children(module):
                setattr(module, name, FullyShardedDataParallel(child, **chosen))
            self._fsdp: FullyShardedDataParallel = FullyShardedDataParallel(module, **chosen)
        self.module: nn.Module = self._fsdp
        self._params = {name: param for name, param in self._named() if name in self._shapes}
        self._optimizer = plain_optimizer(scenario.optimizer, self._params)
        self._rates = LearningRates(self._optimizer)
        self._unsynced = ExitStack()
        self._spec = scenario.optimizer
        self._reduced: dict[str, Tensor] = {}

    def _settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what every wrapper is set to, besides how it shards."""
        from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision

        prefetch = _PREFETCH.get(options["backward_prefetch"])
        return {
            "use_orig_params": True,
            "mixed_precision": MixedPrecision(
                param_dtype=None if self._dtype is torch.float32 else self._dtype,
                reduce_dtype=_DTYPES.get(options["reduce_dtype"]),
                # Batches come as the bare model takes them.
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            "backward_prefetch": None if prefetch is None else BackwardPrefetch[prefetch],
            "forward_prefetch": options["forward_prefetch"],
            "limit_all_gathers": options["limit_all_gathers"],
        }

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in self._fsdp.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), param

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Keep gradients whole and local, but for the last micro-batch or where each is reduced."""
        if not (last or self._syncs_every):
            self._unsynced.enter_context(self._fsdp.no_sync())

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, under which gradients are reduced."""
        with self._unsynced:
            loss.backward()

    def step(self, *, lr_factor: float) -> StepResult:
        """Clip, if that is asked for, and update the shards."""
        grads = {name: param.grad for name, param in self._params.items()}
        known = {name: grad for name, grad in grads.items() if grad is not None}
        self._reduced = grads_to_tell(self._spec, known)
        norm = None
        if self._spec.clip_norm is not None:
            norm = self._fsdp.clip_grad_norm_(self._spec.clip_norm)
        self._rates.scale(lr_factor)
        self._optimizer.step()
        return StepResult(norm=norm)

    def params(self) -> Mapping[str, Tensor]:
        """Full working params, gathered, in the dtype in which forward has them."""
        with self._fsdp_type.summon_full_params(self._fsdp, writeback=False):
            return {
                name: param.detach().to(self._dtype, copy=True)
                for name, param in self._named()
                if name in self._shapes
            }

    def parts(self) -> Iterator[OwnedPart]:
        """What this rank's even parts of flat params have of every param."""
        held = {}
        for unit in self._fsdp_type.fsdp_modules(self._fsdp):
            flat: Any = unit._handle.flat_param if unit._handle is not None else None
            if flat is not None:
                held |= dict(zip(map(id, flat._params), flat._shard_param_infos, strict=True))
        for name, param in self._params.items():
            info = held[id(param)]
            if not info.in_shard:
                continue
            start, stop = info.intra_param_start_idx, info.intra_param_end_idx + 1
            local = param.detach().reshape(-1)
            grad = self._reduced.get(name)
            yield OwnedPart(
                place=Place(param=name, start=start, stop=stop),
                grad=torch.zeros_like(local) if grad is None else grad.detach().reshape(-1),
                master=local,
                state=flat_state(self._optimizer.state.get(param, {})),
            )


def _sharding(system: SystemSpec, *, group: ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Return the device, the ranks, and the strategy by which these shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import ShardingStrategy

    blocks = system.redundancy
    if blocks == 1:
        strategy = ShardingStrategy[_STRATEGIES[system.stage]]
        return {"device_id": device, "process_group": group, "sharding_strategy": strategy}
    shape, names = (blocks, group.size() // blocks), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    strategy = ShardingStrategy[_HYBRID[system.stage]]
    return {"device_id": device, "device_mesh": mesh, "sharding_strategy": strategy}
