"""Megatron-FSDP and a torch optimizer on a rank."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_sim.scenario.spec import Scenario, SystemSpec
from zero_sim.targets.options import OptionValue
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.fsdp2_engine import local_of
from zero_sim.targets.torch.optim import LearningRates, flat_state, plain_optimizer, reduced_grads
from zero_sim.targets.torch.wrapping import called_children

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MegatronFSDPEngine:
    """Megatron-FSDP on a rank. Its units are the classes of children with params.

    `as_is` omits workarounds for known divergences, as in scenarios/upstream.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        scenario: Scenario,
        options: Mapping[str, OptionValue],
        as_is: bool = False,
    ) -> None:
        self._spec, self._stage, self._options = scenario.optimizer, scenario.system.stage, options
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._fsdp = wrapped(module, system=scenario.system, options=options, as_is=as_is)
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
        # Without overlap, 0.6.1 does not gather updated params below stage 3: see
        # scenarios/upstream/megatron-fsdp-stale-params.
        overlaps = options["overlap_gathers"] or self._stage == 3
        self._gathers_by_hand = not (overlaps or as_is)
        if options["shard_optimizer"]:
            import_megatron_fsdp().fully_shard_optimizer(self._optimizer)
        self._rates = LearningRates(self._optimizer)
        self._reduced: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self._fsdp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Announce if gradients must be reduced in this micro-batch's backward."""
        # The library documents both ways.
        if self._options["synced_by_hand"]:
            self._fsdp.set_model_auto_sync(False)
            self._fsdp.is_last_microbatch = last
        else:
            self._fsdp.set_model_auto_sync(last)

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, during which gradients are reduced."""
        loss.backward()
        if last_micro and self._options["synced_by_hand"]:
            self._fsdp.finish_grad_sync()

    def step(self, *, lr_factor: float) -> StepResult:
        """Update the params."""
        grads = {name: param.grad for name, param in self._params.items()}
        present = {name: local_of(grad) for name, grad in grads.items() if grad is not None}
        self._reduced = reduced_grads(self._spec, present)
        self._rates.scale(lr_factor)
        self._optimizer.step()
        # With `fully_shard_optimizer`, the optimizer's `step` does this.
        if not self._options["shard_optimizer"]:
            self._fsdp.install_optimized_model_weights()
        if self._gathers_by_hand:
            self._fsdp.start_param_sync()
        return StepResult()

    def params(self) -> Mapping[str, Tensor]:
        """Return whole working params, gathered by bucket."""
        # Read the buckets, because the module's params are sharded at stage 3.
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
        # [bucket elems / ranks] to [bucket elems]
        shard = buffer.get_shard_from_local_buffer()
        whole = shard.new_empty(buffer.bucket_index.size)
        torch.distributed.all_gather_into_tensor(whole, shard, group=buffer.data_parallel_group)
        return whole

    def parts(self) -> Iterator[OwnedPart]:
        """Yield the parts that this rank steps: whole params, or their parts in its shards."""
        for group in self._buffer.parameter_groups:
            for index, orig in enumerate(group.params):
                name = self._buffer.param_to_name[orig]
                if name not in self._params:
                    continue
                start, stop = 0, orig.numel()
                if self._stage:
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


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_REPLICAS, _SHARDS, _TENSOR = "replicas", "shards", "tp"


def wrapped(
    module: nn.Module, *, system: SystemSpec, options: Mapping[str, OptionValue], as_is: bool
) -> Any:
    """Return the sharded module. Its units are the classes of children with params."""
    library = import_megatron_fsdp()
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    # The model's own class if there are no such children.
    units = {type(child) for _, child in called_children(module)} or {type(module)}
    mesh = _mesh(system.redundancy, device.type)
    if options["average"] and not as_is:
        # 0.6.1 fails without this mesh, even if there are no experts: see
        # scenarios/upstream/megatron-fsdp-average.
        mesh["expt_device_mesh"] = mesh["device_mesh"]
    sharded = library.fully_shard_model(
        module,
        dp_shard_dim=_SHARDS,
        tp_dim=_TENSOR,
        **mesh,
        fsdp_unit_modules=sorted(units, key=lambda each: each.__qualname__),
        zero_dp_strategy=system.stage,
        device=device,
        mixed_precision_policy=library.MixedPrecisionPolicy(
            main_params_dtype=_DTYPES.get(str(options["main_params"])),
            main_grads_dtype=_DTYPES.get(str(options["main_grads"])),
            grad_comm_dtype=_DTYPES.get(str(options["communication"])),
        ),
        overlap_grad_reduce=bool(options["overlap_grads"]),
        overlap_param_gather=bool(options["overlap_gathers"]),
        average_in_collective=bool(options["average"]),
    )
    # Only NCCL can multiply before it sums. `fully_shard_model` has no argument for this.
    sharded.ddp_config.gradient_reduce_div_fusion = False
    return sharded


def import_megatron_fsdp() -> Any:
    """Import megatron_fsdp as if Megatron-Core were not installed."""
    # Otherwise it would use a Megatron-Core class that has changed in 0.16.1.
    warnings.filterwarnings("ignore", module=r"(torch|megatron_fsdp)\..*")
    logging.getLogger("megatron_fsdp").setLevel(logging.ERROR)
    hidden = {name: sys.modules[name] for name in list(sys.modules) if _is_of_core(name)}
    if "megatron_fsdp" not in sys.modules:
        for name in hidden:
            del sys.modules[name]
        # None makes `import megatron` raise ImportError.
        sys.modules["megatron"] = None  # pyrefly: ignore
    try:
        import megatron_fsdp  # pyrefly: ignore
    finally:
        if sys.modules.get("megatron", hidden) is None:
            del sys.modules["megatron"]
        sys.modules.update(hidden)
    return megatron_fsdp


def _is_of_core(module: str) -> bool:
    return module == "megatron" or module.startswith("megatron.")


def _mesh(blocks: int, device: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    ranks = torch.distributed.get_world_size()
    if blocks == 1:
        mesh = init_device_mesh(device, (ranks, 1), mesh_dim_names=(_SHARDS, _TENSOR))
        return {"device_mesh": mesh}
    names = (_REPLICAS, _SHARDS, _TENSOR)
    mesh: DeviceMesh = init_device_mesh(device, (blocks, ranks // blocks, 1), mesh_dim_names=names)
    # HSDP also needs a group of all ranks.
    everyone = mesh[(_REPLICAS, _SHARDS)]._flatten("everyone").get_group()
    return {"device_mesh": mesh, "dp_outer_dim": _REPLICAS, "hybrid_fsdp_group": everyone}
