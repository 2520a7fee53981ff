"""One rank of a model and an optimizer that accelerate has prepared for FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import CheckpointForm, Scenario
from zero_sim.targets.accelerate.loop import AccumulationLoop
from zero_sim.targets.accelerate.saved import load_state, save_state, settings_of_groups
from zero_sim.targets.accelerate.setup import accelerator_for
from zero_sim.targets.protocol import Settings, StepResult
from zero_sim.targets.torch.fsdp2_engine import FSDP2Engine
from zero_sim.targets.torch.optim import LearningRates

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WRAPPED = "_checkpoint_wrapped_module."
"""What a module whose activations are checkpointed has in the names of its params."""


class AccelerateFSDP2Engine(FSDP2Engine):
    """One rank of FSDP2 as accelerate prepares it.

    Args:
        module: The model; its params become sharded ones.
        scenario: The case; `optimizer`, `system` and `run.micro_batches` are read.
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
        self._spec = scenario.optimizer
        self._size = group.size() // scenario.system.redundancy
        self._rank = group.rank() % self._size
        self._dtype = _DTYPES[scenario.model.dtype]
        # One that is tied, and wrapped with each of its names, is two when it is prepared.
        names = {name for name, param in module.named_parameters() if param.requires_grad}
        accelerator = accelerator_for(
            scenario,
            group=group,
            sync_each=scenario.system.sync == "every",
            sharded=_plugin_settings(scenario, options),
        )
        self._loop = AccumulationLoop(
            module,
            accelerator=accelerator,
            scenario=scenario,
            mean_loss=options["mean_loss"],
        )
        self.module = self._loop.module
        self._params: dict[str, Any] = {
            bare: param
            for name, param in self.module.named_parameters()
            if (bare := name.replace(_WRAPPED, "")) in names
        }
        self._optimizer = self._loop.optimizer
        self._rates = LearningRates(self._optimizer)
        self._reduced: dict[str, Tensor] = {}

    def start_micro_batch(self, *, last: bool) -> None:
        """Begin a block of `accumulate`, which knows by itself which one is the last."""
        self._loop.start_micro_batch()

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, under which gradients are reduced."""
        self._loop.backward(loss, last=last_micro)

    def step(self, *, lr_factor: float) -> StepResult:
        """Clip, if that is asked for, and update the shards."""
        result = super().step(lr_factor=lr_factor)
        self._loop.end_micro_batch()
        return result

    def _clip(self) -> Tensor | None:
        bound = self._spec.clip_norm
        return None if bound is None else cast("Any", self._loop.clip_by_norm(bound)).full_tensor()

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint."""
        save_state(self._loop.accelerator, path, form=form)

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Go on from a checkpoint, of any number of ranks."""
        load_state(self._loop.accelerator, path)

    def settings(self) -> Settings:
        """What the optimizer steps with."""
        return settings_of_groups(self._optimizer, self._params)


def _plugin_settings(scenario: Scenario, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `FullyShardedDataParallelPlugin` is set to."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    own = None if scenario.model.dtype == "fp32" else _DTYPES[scenario.model.dtype]
    settings: dict[str, Any] = {
        "fsdp_version": 2,
        "reshard_after_forward": scenario.system.reshard_after_forward,
        "cpu_ram_efficient_loading": options["loaded_by_first"],
        "activation_checkpointing": options["checkpointing"],
    }
    if options["wrap"] == "size":
        settings |= {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1}
    if options["cpu_offload"]:
        settings["cpu_offload"] = CPUOffloadPolicy(pin_memory=False)
    if options["reduce_dtype"] != "param":
        settings["mixed_precision_policy"] = MixedPrecisionPolicy(
            param_dtype=own, reduce_dtype=_DTYPES[options["reduce_dtype"]], output_dtype=own
        )
    return settings
