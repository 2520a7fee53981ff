"""torch's DistributedDataParallel under a plain optimizer of torch.

[Note: what DDP computes]
Each rank multiplies its accumulated gradient by 1 / ranks while it copies it into a bucket, and the
buckets are summed: a `premul` of the reference. Within `no_sync` gradients accumulate locally. DDP
decides before forward whether it will reduce after it, so an engine has to be told of the last
micro-batch before its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities, Numerics
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.optim import (
    OPTIMIZERS,
    LearningRates,
    flat_state,
    grads_to_tell,
    plain_optimizer,
)

_TOPOLOGY = ("topology.tp", "topology.cp", "topology.pp", "topology.order")
_CLIPS = ("optimizer.clip_norm", "optimizer.clip_value")
DDP_FOLLOWS = (
    *OPTIMIZER_SETTINGS, *_CLIPS, "run.micro_batches", "model.tied", "model.distinct_start",
    *_TOPOLOGY,
)  # fmt: skip


class DDPEngine:
    """One rank of DDP and an optimizer that updates whole params.

    Args:
        module: The model; DDP is wrapped around it.
        scenario: The case; `optimizer` is read.
        group: The data-parallel group.
    """

    def __init__(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> None:
        self._spec = scenario.optimizer
        self._params = {
            name: param for name, param in module.named_parameters() if param.requires_grad
        }
        self._ddp = self._wrap(module, group)
        self.module: nn.Module = self._ddp
        self._optimizer = self._build_optimizer(group)
        self._rates = LearningRates(self._optimizer)
        self._unsynced = ExitStack()
        self._reduced: dict[str, Tensor] = {}

    def _wrap(self, module: nn.Module, group: ProcessGroup) -> nn.parallel.DistributedDataParallel:
        return nn.parallel.DistributedDataParallel(module, process_group=group)

    def _build_optimizer(self, group: ProcessGroup) -> Optimizer:
        return plain_optimizer(self._spec, self._params)

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Keep DDP from reducing, but for the last micro-batch."""
        if not last:
            self._unsynced.enter_context(self._ddp.no_sync())

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, under which DDP reduces."""
        with self._unsynced:
            loss.backward()

    def step(self, *, lr_factor: float) -> StepResult:
        """Clip, if that is asked for, and update the params."""
        self._reduced = grads_to_tell(self._spec, self._gradients())
        norm = self._clip()
        self._rates.scale(lr_factor)
        self._optimizer.step()
        return StepResult(norm=norm)

    def _clip(self) -> Tensor | None:
        """Clip as it is asked for; the norm before, where one was taken."""
        spec, norm = self._spec, None
        if spec.clip_value is not None:
            nn.utils.clip_grad_value_(self._params.values(), spec.clip_value)
        if spec.clip_norm is not None:
            # Every rank has whole gradients, so that nothing has to be exchanged.
            norm = nn.utils.clip_grad_norm_(self._params.values(), spec.clip_norm)
        return norm

    def params(self) -> Mapping[str, Tensor]:
        """Full working params, which are their own masters."""
        return {name: param.detach() for name, param in self._params.items()}

    def parts(self) -> Iterator[OwnedPart]:
        """Every param whole, with its state."""
        yield from self._parts_of(self._params, state=self._optimizer.state)

    def _parts_of(
        self, names: Sequence[str] | Mapping[str, Tensor], *, state: Mapping[Any, Any]
    ) -> Iterator[OwnedPart]:
        for name in names:
            param = self._params[name]
            grad = self._reduced.get(name)
            yield OwnedPart(
                place=Place(param=name, start=0, stop=param.numel()),
                grad=(torch.zeros_like(param) if grad is None else grad).detach().reshape(-1),
                master=param.detach().reshape(-1),
                state=flat_state(state.get(param, {})),
            )

    def _gradients(self) -> dict[str, Tensor]:
        return {name: param.grad for name, param in self._params.items() if param.grad is not None}

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Which param has a gradient where none must be; DDP pads nothing."""
        if padding_only:
            return ""
        return next(
            (f"param {name!r}" for name, grad in self._gradients().items() if grad.any()), ""
        )

    def stray_padding(self) -> str:
        """Nowhere: nothing is padded."""
        return ""


class TorchDDP:
    """DDP and a plain optimizer on fp32 params: stage 0."""

    name = "torch-ddp"
    capabilities = Capabilities(stages=(0,), optimizers=OPTIMIZERS, follows=DDP_FOLLOWS)
    numerics = Numerics(
        divide="premul", divide_by="ranks", sync="last", grad_dtype="param",
        grads_told="before-division", norm="of-params", clip="fp32-reciprocal",
    )  # fmt: skip

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> DDPEngine:
        """Wrap the module for training on this rank."""
        return DDPEngine(module, scenario=scenario, group=group)
