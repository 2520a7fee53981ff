"""One rank of a model and an optimizer that accelerate has prepared for DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import CheckpointForm, Scenario
from zero_sim.targets.accelerate.loop import AccumulationLoop
from zero_sim.targets.accelerate.saved import load_state, save_state, settings_of_groups
from zero_sim.targets.accelerate.setup import accelerator_for
from zero_sim.targets.protocol import Settings, StepResult
from zero_sim.targets.torch.ddp import DDPEngine
from zero_sim.targets.torch.optim import LearningRates

MEGABYTE = 1 << 20


class AccelerateDDPEngine(DDPEngine):
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

    def start_micro_batch(self, *, last: bool) -> None:
        """Begin a block of `accumulate`, which knows by itself which one is the last."""
        self._loop.start_micro_batch()

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, under which DDP reduces."""
        self._loop.backward(loss, last=last_micro)

    def step(self, *, lr_factor: float) -> StepResult:
        """Clip, if that is asked for, and update the params."""
        result = super().step(lr_factor=lr_factor)
        self._loop.end_micro_batch()
        return result

    def _clip(self) -> Tensor | None:
        spec = self._spec
        if spec.clip_value is not None:
            self._loop.clip_by_value(spec.clip_value)
        return None if spec.clip_norm is None else self._loop.clip_by_norm(spec.clip_norm)

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint."""
        save_state(self._loop.accelerator, path, form=form)

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Go on from a checkpoint, of any number of ranks."""
        load_state(self._loop.accelerator, path)

    def settings(self) -> Settings:
        """What the optimizer steps with."""
        return settings_of_groups(self._optimizer, self._params)
