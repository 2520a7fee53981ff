"""Training on one device without buffers: the baseline of memory and speed.

The engine trains the module's own params, with gradients in `.grad`; a 16-bit param also has an
fp32 master. Gradients are freed after each step, or kept and zeroed. Keeping them costs as much
memory as the params, but saves allocations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, PLAIN_MODELS, Capabilities, Numerics
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.optim import OPTIMIZERS, LearningRates, flat_state, plain_optimizer


class SingleDeviceEngine:
    """A module, its masters and a plain optimizer."""

    def __init__(self, module: nn.Module, *, scenario: Scenario, keeps_grads: bool) -> None:
        self.module = module
        self._spec = scenario.optimizer
        self._keeps_grads = keeps_grads
        self._params = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._masters = {name: _master_of(param) for name, param in self._params.items()}
        self._optimizer = plain_optimizer(self._spec, self._masters)
        self._rates = LearningRates(self._optimizer)

    def zero_grad(self) -> None:
        """Reset the gradients."""
        for param in self._params.values():
            if not self._keeps_grads:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, which adds to the gradients."""
        loss.backward()

    @torch.no_grad()
    def step(self, *, lr_factor: float) -> StepResult:
        """Update the masters and cast them into the params."""
        grads = {name: param.grad for name, param in self._params.items()}
        for name, master in self._masters.items():
            grad = grads[name]
            # A copy, because clipping and some optimizers write to the gradient, but `parts`
            # reports it as backward left it.
            master.grad = None if grad is None else grad.to(torch.float32, copy=True)
        norm = None
        # First by value, then by norm, as in the reference.
        if self._spec.clip_value is not None:
            nn.utils.clip_grad_value_(self._masters.values(), self._spec.clip_value)
        if self._spec.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._masters.values(), self._spec.clip_norm)
        self._rates.scale(lr_factor)
        self._optimizer.step()
        for name, master in self._masters.items():
            # In fp32 the master is the param itself, so restore its gradient afterwards.
            master.grad = None
            self._params[name].copy_(master)
            self._params[name].grad = grads[name]
        return StepResult(norm=norm)

    def settle(self) -> None:
        """Free the gradients, which `parts` has already reported."""
        if not self._keeps_grads:
            self.zero_grad()

    def params(self) -> Mapping[str, Tensor]:
        """Return all working params."""
        return {name: param.detach() for name, param in self._params.items()}

    def parts(self) -> Iterator[OwnedPart]:
        """Yield all params whole, with masters and state."""
        for name, master in self._masters.items():
            param = self._params[name]
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            yield OwnedPart(
                place=Place(param=name, start=0, stop=param.numel()),
                grad=grad.detach().reshape(-1),
                master=master.detach().reshape(-1),
                state=flat_state(self._optimizer.state.get(master, {})),
            )

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Name a param with a nonzero gradient. There is no padding."""
        grads = {} if padding_only else {n: p.grad for n, p in self._params.items()}
        return next((f"param {n!r}" for n, g in grads.items() if g is not None and g.any()), "")

    def memory(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all named memory."""
        for name, param in self._params.items():
            yield "params", param
            if param.grad is not None:
                yield "gradients", param.grad
            if self._masters[name] is not param:
                yield "masters", self._masters[name]
        for state in self._optimizer.state.values():
            named = ((key, value) for key, value in state.items() if isinstance(value, Tensor))
            yield from ((key, value) for key, value in named if value.dim())


@dataclass(kw_only=True, slots=True, eq=False)
class SingleDevice:
    """Training on one device, with a single rank."""

    name: str = "single-device"
    keeps_grads: bool = False
    """True to keep gradients in memory, as `zero_grad(set_to_none=False)` does."""
    capabilities: ClassVar = Capabilities(
        models=PLAIN_MODELS,
        dtypes=("fp32", "bf16", "fp16"),
        stages=(0,),
        optimizers=OPTIMIZERS,
        world_size_max=1,
        follows=(
            *OPTIMIZER_SETTINGS,
            "optimizer.clip_norm",
            "optimizer.clip_value",
            "model.tied",
            "model.recompute",
            "run.micro_batches",
        ),
    )
    numerics: ClassVar = Numerics(
        # A single rank divides nothing.
        divide="none",
        divide_by="ranks",
        sync="last",
        grad_dtype="param",
        reported_grads="before-division",
        norm="of-params",
        clip="fp32-reciprocal",
    )

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> SingleDeviceEngine:
        """Wrap the module for training."""
        return SingleDeviceEngine(module, scenario=scenario, keeps_grads=self.keeps_grads)


def _master_of(param: nn.Parameter) -> nn.Parameter:
    """Return the param itself if it is fp32, else an fp32 copy for the optimizer."""
    if param.dtype is torch.float32:
        return param
    return nn.Parameter(param.detach().to(torch.float32))


TARGETS = (
    SingleDevice(),
    SingleDevice(name="single-device-keeping-grads", keeps_grads=True),
)
