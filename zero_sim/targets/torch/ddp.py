"""torch's DistributedDataParallel under a plain optimizer or torch's ZeroRedundancyOptimizer.

[Note: what DDP computes]
Each rank multiplies its accumulated gradient by 1 / ranks while it copies it into a bucket, and the
buckets are summed: a `premul` of the reference. Within `no_sync` gradients accumulate locally. DDP
decides before forward whether it will reduce after it, so an engine has to be told of the last
micro-batch before its forward.

[Note: what a hook computes]
With a comm hook the gradient is the hook's to divide. torch's `allreduce_hook` divides before the
sum, and so does `bf16_compress_hook`, in the dtype that goes over the wire; the result is cast
back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities, Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.optim import (
    OPTIMIZERS,
    LearningRates,
    class_of,
    flat_state,
    grads_to_tell,
    param_groups,
    plain_optimizer,
    settings_of,
)

_TOPOLOGY = ("topology.tp", "topology.cp", "topology.pp", "topology.order")
_CLIPS = ("optimizer.clip_norm", "optimizer.clip_value")
_FOLLOWS = (
    *OPTIMIZER_SETTINGS, *_CLIPS, "run.micro_batches", "model.tied", "model.distinct_start",
    *_TOPOLOGY,
)  # fmt: skip
NUMERICS = Numerics(
    divide="premul", divide_by="ranks", sync="last", grad_dtype="param",
    grads_told="before-division", norm="of-params", clip="fp32-reciprocal",
)  # fmt: skip
"""Rules of DDP without a hook."""

_MEGABYTE = 1 << 20
_WIRE = {"none": None, "allreduce": None, "bf16-compress": "bf16"}
"""By hook: the dtype that goes over the wire; None for the gradient's."""


def why_not_static(scenario: Scenario) -> str:
    """Say why a case cannot have a static graph; '' if it can."""
    if scenario.run.micro_batches == 1:
        return ""
    return "torch 2.13 fails where the first micro-batch is under no_sync: see scenarios/upstream"


OPTIONS: Mapping[str, Option] = {
    "hook": Option(default="none", values=tuple(_WIRE)),
    "bucket_bytes": Option(default=25 * _MEGABYTE, values=(1, 40, 200)),
    "bucket_view": Option(default=False, values=(True,)),
    "static_graph": Option(default=False, values=(True,), fits=why_not_static),
    "find_unused": Option(default=False, values=(True,)),
}


class DDPEngine:
    """One rank of DDP and an optimizer that updates whole params.

    Args:
        module: The model; DDP is wrapped around it.
        scenario: The case; `optimizer` is read.
        group: The data-parallel group.
        options: Values of `OPTIONS`; None for the defaults.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        scenario: Scenario,
        group: ProcessGroup,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._spec = scenario.optimizer
        self._params = {
            name: param for name, param in module.named_parameters() if param.requires_grad
        }
        self._ddp = _wrapped(module, group=group, options=options)
        self.module: nn.Module = self._ddp
        self._optimizer = self._build_optimizer(group)
        self._rates = LearningRates(self._optimizer)
        self._unsynced = ExitStack()
        self._reduced: dict[str, Tensor] = {}

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
        """Name a param with a gradient where none must be; DDP pads nothing."""
        if padding_only:
            return ""
        return next(
            (f"param {name!r}" for name, grad in self._gradients().items() if grad.any()), ""
        )

    def stray_padding(self) -> str:
        """Nowhere: nothing is padded."""
        return ""


def _wrapped(
    module: nn.Module, *, group: ProcessGroup, options: Mapping[str, Any] | None
) -> nn.parallel.DistributedDataParallel:
    defaults = {name: option.default for name, option in OPTIONS.items()}
    chosen: dict[str, Any] = {**defaults, **(options or {})}
    size = chosen["bucket_bytes"]
    ddp = nn.parallel.DistributedDataParallel(
        module,
        process_group=group,
        # A size that is given is that of the first bucket too, which is smaller by default.
        bucket_cap_mb=None if size == defaults["bucket_bytes"] else size / _MEGABYTE,
        gradient_as_bucket_view=chosen["bucket_view"],
        static_graph=chosen["static_graph"],
        find_unused_parameters=chosen["find_unused"],
    )
    if chosen["hook"] != "none":
        ddp.register_comm_hook(group, _hook(chosen["hook"]))
    return ddp


def _hook(name: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if name == "allreduce":
        return default_hooks.allreduce_hook

    # Under its own name DDP refuses it where there is no NCCL.
    def compress(group: Any, bucket: Any) -> Any:
        return default_hooks.bf16_compress_hook(group, bucket)

    # DDP reads the annotations, which here are text.
    compress.__annotations__ = default_hooks.bf16_compress_hook.__annotations__
    return compress


class ZeroRedundancyEngine(DDPEngine):
    """One rank of DDP and torch's ZeroRedundancyOptimizer, which deals whole params to ranks."""

    def _build_optimizer(self, group: ProcessGroup) -> Optimizer:
        # Import where it is needed: it takes a tenth of a second.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self._sharded = ZeroRedundancyOptimizer(
            param_groups(self._spec, self._params),
            class_of(self._spec),
            process_group=group,
            **settings_of(self._spec),
        )
        return self._sharded

    def parts(self) -> Iterator[OwnedPart]:
        """The params that this rank updates, whole."""
        local = self._sharded.optim
        mine = {id(param) for group in local.param_groups for param in group["params"]}
        names = [name for name, param in self._params.items() if id(param) in mine]
        yield from self._parts_of(names, state=local.state)


class TorchDDP:
    """DDP and a plain optimizer on fp32 params: stage 0.

    Args:
        as_is: True to accept cases that are known to go wrong, too.
    """

    capabilities = Capabilities(stages=(0,), optimizers=OPTIMIZERS, follows=_FOLLOWS)

    def __init__(self, *, as_is: bool = False) -> None:
        self.name = f"torch-ddp{'-as-is' if as_is else ''}"
        graph = replace(OPTIONS["static_graph"], fits=None if as_is else why_not_static)
        self.options = {**OPTIONS, "static_graph": graph}

    def numerics(self, scenario: Scenario) -> Numerics:
        """Return the rules of a case, which depend on the hook."""
        hook = chosen_options(self, scenario)["hook"]
        if hook == "none":
            return NUMERICS
        wire: Any = _WIRE[str(hook)]
        return replace(NUMERICS, divide="pre", reduce_dtype=wire, told_dtype="param")

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> DDPEngine:
        """Wrap the module for training on this rank."""
        options = chosen_options(self, scenario)
        return DDPEngine(module, scenario=scenario, group=group, options=options)


class TorchZeroRedundancy:
    """DDP and ZeroRedundancyOptimizer on fp32 params: stage 1, whole params a rank."""

    name = "torch-zero-redundancy"
    capabilities = Capabilities(stages=(1,), optimizers=OPTIMIZERS, follows=_FOLLOWS)
    numerics = NUMERICS

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> ZeroRedundancyEngine:
        """Wrap the module for training on this rank."""
        return ZeroRedundancyEngine(module, scenario=scenario, group=group)


TARGETS = (TorchDDP(), TorchDDP(as_is=True), TorchZeroRedundancy())
