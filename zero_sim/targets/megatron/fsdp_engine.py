"""One rank of Megatron-FSDP and an optimizer of torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.options import OptionValue
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.ddp import flat_state, plain_optimizer
from zero_sim.targets.torch.fsdp2_engine import local_of
from zero_sim.targets.torch.optim import LearningRates
from zero_sim.targets.torch.wrapping import called_children

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REPLICAS, _SHARDS = "replicas", "shards"


class MegatronFSDPEngine:
    """One rank of Megatron-FSDP, whose units are the classes of children with params.

    Args:
        module: The model.
        scenario: The case; `optimizer` and `system` are read.
        options: The value of each option.
    """

    def __init__(
        self, module: nn.Module, *, scenario: Scenario, options: Mapping[str, OptionValue]
    ) -> None:
        self._options, self._system = options, scenario.system
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._fsdp = self._wrap(module)
        self.module: nn.Module = self._fsdp
        self._buffer: Any = self._fsdp.param_and_grad_buffer
        self._params: dict[str, Any] = {
            name: param
            for name, param in self._buffer.optimizer_named_parameters
            if name in self._names
        }
        self._optimizer = plain_optimizer(
            scenario.optimizer, {name: self._params[name] for name in self._names}
        )
        if options["shard_optimizer"]:
            from megatron_fsdp import fully_shard_optimizer  # pyrefly: ignore

            fully_shard_optimizer(self._optimizer)
        self._rates = LearningRates(self._optimizer)
        self._reduced: dict[str, Tensor] = {}

    def _wrap(self, module: nn.Module) -> Any:
        warnings.filterwarnings("ignore", module=r"(torch|megatron_fsdp)\..*")
        logging.getLogger("megatron_fsdp").setLevel(logging.ERROR)
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model  # pyrefly: ignore

        options = self._options
        units = {type(child) for _, child in called_children(module)} or {type(module)}
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        policy = MixedPrecisionPolicy(
            main_params_dtype=_DTYPES.get(str(options["main_params"])),
            main_grads_dtype=_DTYPES.get(str(options["main_grads"])),
            grad_comm_dtype=_DTYPES.get(str(options["communication"])),
        )
        wrapped = fully_shard_model(
            module,
            dp_shard_dim=_SHARDS,
            tp_dim="tp",
            **self._mesh(),
            fsdp_unit_modules=sorted(units, key=lambda each: each.__qualname__),
            zero_dp_strategy=self._system.stage,
            device=device,
            mixed_precision_policy=policy,
            overlap_grad_reduce=bool(options["overlap_grads"]),
            overlap_param_gather=bool(options["overlap_gathers"]),
            average_in_collective=bool(options["average"]),
        )
        # Only NCCL has the sum that multiplies; `fully_shard_model` does not ask for either.
        wrapped.ddp_config.gradient_reduce_div_fusion = False
        return wrapped

    def _mesh(self) -> dict[str, Any]:
        """The ranks, of which those of one row share what is sharded."""
        from torch.distributed.device_mesh import init_device_mesh

        blocks, ranks = self._system.redundancy, torch.distributed.get_world_size()
        if blocks == 1:
            mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=(_SHARDS, "tp"))
            return {"device_mesh": mesh}
        mesh: DeviceMesh = init_device_mesh(
            "cpu", (blocks, ranks // blocks, 1), mesh_dim_names=(_REPLICAS, _SHARDS, "tp")
        )
        everyone = mesh[(_REPLICAS, _SHARDS)]._flatten("everyone").get_group()
        return {"device_mesh": mesh, "dp_outer_dim": _REPLICAS, "hybrid_fsdp_group": everyone}

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._fsdp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Say whether gradients are to be there after backward."""
        if self._options["synced_by_hand"]:
            self._fsdp.set_model_auto_sync(False)
            self._fsdp.is_last_microbatch = last
        else:
            self._fsdp.set_model_auto_sync(last)

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, under which gradients are reduced."""
        loss.backward()
        if last_micro and self._options["synced_by_hand"]:
            self._fsdp.finish_grad_sync()

    def step(self, *, lr_factor: float) -> StepResult:
        """Update the params."""
        grads = {name: param.grad for name, param in self._params.items()}
        self._reduced = {name: local_of(g) for name, g in grads.items() if g is not None}
        self._rates.scale(lr_factor)
        self._optimizer.step()
        if not self._options["shard_optimizer"]:
            self._fsdp.install_optimized_model_weights()
        return StepResult()

    def params(self) -> Mapping[str, Tensor]:
        """Full working params, gathered as the buckets lie."""
        found = {}
        for group in self._buffer.parameter_groups:
            buffer = group.model_weight_buffer
            whole = None if buffer is None else self._whole(buffer)
            for index, param in enumerate(group.params):
                value = param
                if whole is not None:
                    item = buffer.item_index_map[index]
                    start = item.global_data_index
                    value = whole[start : start + item.size].view(item.shape)
                found[self._buffer.param_to_name[param]] = value.detach()
        return {name: found[name] for name in self._names}

    def _whole(self, buffer: Any) -> Tensor:
        shard = buffer.get_shard_from_local_buffer()
        whole = shard.new_empty(buffer.bucket_index.size)
        torch.distributed.all_gather_into_tensor(whole, shard, group=buffer.data_parallel_group)
        return whole

    def parts(self) -> Iterator[OwnedPart]:
        """What this rank steps: whole params, or what its part of each bucket has of them."""
        for group in self._buffer.parameter_groups:
            for index, orig in enumerate(group.params):
                name = self._buffer.param_to_name[orig]
                if name not in self._params:
                    continue
                start, stop = 0, orig.numel()
                if self._system.stage:
                    start, stop = group.main_grad_buffer._get_item_slice_in_shard(index)
                param, grad = self._params[name], self._reduced.get(name)
                state = self._optimizer.state.get(param, {})
                if start < stop:
                    yield OwnedPart(
                        place=Place(param=name, start=start, stop=stop),
                        grad=None if grad is None else grad.detach().reshape(-1),
                        master=local_of(param).detach().reshape(-1),
                        state=flat_state({key: local_of(value) for key, value in state.items()}),
                    )
