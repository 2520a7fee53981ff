"""One rank of DeepSpeed's engine, and what it tells of masters, state and gradients."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_sim.scenario.spec import CheckpointForm, OptimizerSpec
from zero_sim.targets.deepspeed.parts import parts_of
from zero_sim.targets.deepspeed.universal import convert
from zero_sim.targets.protocol import OwnedPart, Settings, StepResult
from zero_sim.targets.torch.optim import LearningRates, plain_optimizer

_TAG, _UNIVERSAL = "saved", "universal"


class DeepSpeedEngine:
    """One rank of DeepSpeed's engine.

    Args:
        module: The model.
        spec: The optimizer.
        config: Of DeepSpeed.
    """

    def __init__(self, module: nn.Module, *, spec: OptimizerSpec, config: dict[str, Any]) -> None:
        deepspeed = import_deepspeed()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._client = plain_optimizer(spec, trained)
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._client,
            config=config,
            dist_init_required=False,
        )
        self.module: nn.Module = self._engine
        self._params = trained
        stage = config["zero_optimization"]["stage"]
        self._parts = parts_of(
            stage, optimizer=self._optimizer, client=self._client, params=trained
        )
        self._rates = LearningRates(self._client)
        self._is_gathered = stage == 3
        self._scales = spec.loss_scale is not None
        self._clips = spec.clip_norm is not None
        self._is_universal = "checkpoint" in config
        self._reduced: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        """Nothing: the engine forgets gradients when it has stepped."""

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward; the engine counts micro-batches by calls of its `step`."""
        self._engine.backward(loss, scale_wrt_gas=False)
        if not last_micro:
            self._engine.step()

    def step(self, *, lr_factor: float) -> StepResult:
        """Update the params."""
        self._reduced = self._parts.gradients()
        scale = getattr(self._optimizer, "loss_scale", 1.0) if self._scales else None
        self._rates.scale(lr_factor)
        self._engine.step()
        skipped = bool(getattr(self._optimizer, "overflow", False))
        # Of a step that is skipped it says inf, a NaN or not.
        norm = self._engine.get_global_grad_norm() if self._clips else None
        return StepResult(
            norm=None if norm is None else torch.as_tensor(norm).float(),
            skipped=skipped,
            loss_scale=scale,
        )

    def params(self) -> Mapping[str, Tensor]:
        """Full working params; of stage 3 gathered."""
        if not self._is_gathered:
            return {name: param.detach() for name, param in self._params.items()}
        with import_deepspeed().zero.GatheredParameters(list(self._params.values())):
            return {name: param.detach().clone() for name, param in self._params.items()}

    def parts(self) -> Iterator[OwnedPart]:
        """What this rank has of masters and state."""
        yield from self._parts.owned(self._reduced)

    def settings(self) -> Settings:
        """The loss scale and for how many steps it was right."""
        scaler = getattr(self._optimizer, "loss_scaler", None)
        if not self._scales or scaler is None:
            return Settings(params={})
        good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        return Settings(params={}, loss_scale=scaler.cur_scale, good_steps=good_steps)

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint; the first rank makes a universal one of it where that is asked."""
        self._engine.save_checkpoint(str(path), tag=_TAG)
        if self._is_universal:
            # All files have to be there before, and no rank loads before it is whole.
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                convert(path / _TAG, path / _UNIVERSAL)
            torch.distributed.barrier()

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Go on from a checkpoint."""
        tag = _UNIVERSAL if self._is_universal else _TAG
        self._engine.load_checkpoint(str(path), tag=tag, load_optimizer_states=not weights_only)


def import_deepspeed() -> Any:
    """The library, for the CPU and without what it would compile."""
    # It calls names of torch that newer versions of torch deprecate, in every step.
    warnings.filterwarnings("ignore", ".*torch.distributed.* is deprecated", FutureWarning)
    import deepspeed  # pyrefly: ignore

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its shared-memory reduction would be compiled for half a minute, and is not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It looks for kernels of oneDNN, and torch computes in fp16 on CPUs without them, too.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    return deepspeed
