"""One rank of a model and an optimizer that accelerate has prepared, and the loop of its guides.

[Note: losses]
`Accelerator.backward` divides each loss by the number of micro-batches, which is a division of each
gradient where that number is a power of two, and only there: elsewhere 1/3 goes through all of
backward. So the loss that it is given is multiplied by that number, and 1/n times n is 1 for each n
up to 40; with `mean_loss` it is given the loss as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import CheckpointForm, Scenario
from zero_sim.targets.accelerate.accelerator import (
    accelerator_for,
    load_state,
    save_state,
    settings_of_groups,
)
from zero_sim.targets.protocol import Settings, StepResult
from zero_sim.targets.torch.ddp import DDPEngine
from zero_sim.targets.torch.fsdp2_engine import FSDP2Engine
from zero_sim.targets.torch.optim import LearningRates, plain_optimizer

MEGABYTE = 1 << 20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WRAPPED = "_checkpoint_wrapped_module."
"""Part of the names of params below a module with checkpointed activations."""


class AccumulationLoop:
    """One rank's model and optimizer as `Accelerator.prepare` gives them, and how to train them.

    Args:
        module: The bare model.
        accelerator: This rank's.
        scenario: The case; `optimizer` and `run.micro_batches` are read.
        mean_loss: Whether losses are divided by the number of micro-batches.
    """

    def __init__(
        self, module: nn.Module, *, accelerator: Any, scenario: Scenario, mean_loss: bool
    ) -> None:
        away = next((p.device for p in module.parameters() if p.device.type != "cpu"), None)
        if away is not None:
            raise UsageError(
                "expected a model on the CPU, where accelerate would bring it, got one on "
                f"{away}. Try leaving out --device."
            )
        self._factor = 1 if mean_loss else scenario.run.micro_batches
        self._micro_batch = ExitStack()
        self.accelerator = accelerator
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.module, self.optimizer = self.accelerator.prepare(
            module, plain_optimizer(scenario.optimizer, trained)
        )

    def start_micro_batch(self) -> None:
        """Begin a block of `accumulate`, which counts, and reduces with the last one alone."""
        self._micro_batch.enter_context(self.accelerator.accumulate(self.module))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run backward, and but for the last micro-batch end its block."""
        self.accelerator.backward(loss * self._factor)
        if not last:
            # As the guides have it, after every micro-batch; both do nothing before the last one.
            self.optimizer.step()
            self.end_micro_batch()
            self.optimizer.zero_grad()

    def clip_by_norm(self, bound: float) -> Tensor:
        """Clip, and give the norm before."""
        return self.accelerator.clip_grad_norm_(self.module.parameters(), bound)

    def clip_by_value(self, bound: float) -> None:
        """Clip each element."""
        self.accelerator.clip_grad_value_(self.module.parameters(), bound)

    def end_micro_batch(self) -> None:
        """End the block of `accumulate`; of the last micro-batch behind the update."""
        self._micro_batch.close()


class _PreparedEngine:
    """Methods of an engine of torch whose model and optimizer accelerate has prepared."""

    _loop: AccumulationLoop
    _optimizer: Any
    _params: Any

    def start_micro_batch(self, *, last: bool) -> None:
        """Begin a block of `accumulate`, which knows by itself which one is the last."""
        self._loop.start_micro_batch()

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, under which gradients are reduced."""
        self._loop.backward(loss, last=last_micro)

    def step(self, *, lr_factor: float) -> StepResult:
        """Update as the engine of torch does, and end the last block of `accumulate`."""
        result = super().step(lr_factor=lr_factor)  # pyrefly: ignore
        self._loop.end_micro_batch()
        return result

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint."""
        save_state(self._loop.accelerator, path, form=form)

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Go on from a checkpoint, of any number of ranks."""
        load_state(self._loop.accelerator, path)

    def settings(self) -> Settings:
        """Settings of the optimizer."""
        return settings_of_groups(self._optimizer, self._params)


class AccelerateDDPEngine(_PreparedEngine, DDPEngine):
    """One rank of a model and an optimizer as accelerate prepares them.

    Args:
        module: The model.
        scenario: The case; `optimizer` and `run.micro_batches` are read.
        group: The data-parallel group.
        options: The value of each option.
    """

    def __init__(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup, options: Any
    ) -> None:
        from accelerate import utils  # pyrefly: ignore

        self._spec = scenario.optimizer
        self._params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        handler = utils.DistributedDataParallelKwargs(
            bucket_cap_mb=options["bucket_bytes"] / MEGABYTE,
            gradient_as_bucket_view=options["bucket_view"],
            static_graph=options["static_graph"],
            find_unused_parameters=options["find_unused"],
            comm_hook=utils.DDPCommunicationHookType(options["hook"]),
        )
        self._loop = AccumulationLoop(
            module,
            accelerator=accelerator_for(scenario, group=group, handlers=[handler]),
            scenario=scenario,
            mean_loss=options["mean_loss"],
        )
        self.module = self._loop.module
        self._optimizer = self._loop.optimizer
        self._rates = LearningRates(self._optimizer)
        self._reduced: dict[str, Tensor] = {}

    def _clip(self) -> Tensor | None:
        spec = self._spec
        if spec.clip_value is not None:
            self._loop.clip_by_value(spec.clip_value)
        return None if spec.clip_norm is None else self._loop.clip_by_norm(spec.clip_norm)


class AccelerateFSDP2Engine(_PreparedEngine, FSDP2Engine):
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

    def _clip(self) -> Tensor | None:
        bound = self._spec.clip_norm
        return None if bound is None else cast("Any", self._loop.clip_by_norm(bound)).full_tensor()


def _plugin_settings(scenario: Scenario, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `FullyShardedDataParallelPlugin`."""
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
