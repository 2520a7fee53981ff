"""A module under Megatron-FSDP, as a scenario and options of the target say."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_sim.scenario.spec import SystemSpec
from zero_sim.targets.options import OptionValue
from zero_sim.targets.torch.wrapping import called_children

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_REPLICAS, _SHARDS, _TENSOR = "replicas", "shards", "tp"


def wrapped(
    module: nn.Module, *, system: SystemSpec, options: Mapping[str, OptionValue], as_is: bool
) -> Any:
    """The module sharded, with the classes of its children with params for units.

    Args:
        module: The model.
        system: `stage` and `redundancy` are read.
        options: The value of each option.
        as_is: Whether what is known to go wrong is done: scenarios/upstream has it.
    """
    library = import_megatron_fsdp()
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    units = {type(child) for _, child in called_children(module)} or {type(module)}
    mesh = _mesh(system.redundancy, device.type)
    if options["average"] and not as_is:
        # Without one 0.6.1 fails, with experts or not: scenarios/upstream has this case.
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
    # NCCL alone has a sum that multiplies before it, which `fully_shard_model` cannot be told.
    sharded.ddp_config.gradient_reduce_div_fusion = False
    return sharded


def import_megatron_fsdp() -> Any:
    """The library by itself: it would go by whichever version of Megatron-Core it finds."""
    warnings.filterwarnings("ignore", module=r"(torch|megatron_fsdp)\..*")
    logging.getLogger("megatron_fsdp").setLevel(logging.ERROR)
    hidden = {name: sys.modules[name] for name in list(sys.modules) if _is_of_core(name)}
    if "megatron_fsdp" not in sys.modules:
        for name in hidden:
            del sys.modules[name]
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
    """The ranks, of which those of one block share what is sharded."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = torch.distributed.get_world_size()
    if blocks == 1:
        mesh = init_device_mesh(device, (ranks, 1), mesh_dim_names=(_SHARDS, _TENSOR))
        return {"device_mesh": mesh}
    names = (_REPLICAS, _SHARDS, _TENSOR)
    mesh: DeviceMesh = init_device_mesh(device, (blocks, ranks // blocks, 1), mesh_dim_names=names)
    everyone = mesh[(_REPLICAS, _SHARDS)]._flatten("everyone").get_group()
    return {"device_mesh": mesh, "dp_outer_dim": _REPLICAS, "hybrid_fsdp_group": everyone}
