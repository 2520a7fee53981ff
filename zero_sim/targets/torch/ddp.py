"""torch's DistributedDataParallel with a plain optimizer or torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities, Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.protocol import StepResult
from zero_sim.targets.torch.engines import WholeParamEngine
from zero_sim.targets.torch.optim import (
    OPTIMIZERS,
    class_of,
    param_groups,
    plain_optimizer,
    settings_of,
)

_TOPOLOGY = ("topology.tp", "topology.cp", "topology.pp", "topology.order")
_CLIPS = ("optimizer.clip_norm", "optimizer.clip_value")
_FOLLOWS = (
    *OPTIMIZER_SETTINGS, *_CLIPS, "run.micro_batches", "model.tied", "model.distinct_start",
    "model.recompute",
    *_TOPOLOGY,
)  # fmt: skip
# DDP multiplies the accumulated gradient by 1 / ranks while copying it into a bucket, then sums the
# buckets. Within `no_sync`, gradients accumulate locally.
NUMERICS = Numerics(
    divide="premul", divide_by="ranks", sync="last", grad_dtype="param",
    reported_grads="before-division", norm="of-params", clip="fp32-reciprocal",
)  # fmt: skip
"""DDP's arithmetic without a comm hook."""

_MEGABYTE = 1 << 20
_WIRE = {"none": None, "allreduce": None, "bf16-compress": "bf16"}
"""Communication dtype by hook; None for the gradient's dtype."""


def why_not_static(scenario: Scenario) -> str:
    """Return the reason why a case cannot have a static graph; "" if it can."""
    # scenarios/upstream/torch-ddp-static-graph.
    if scenario.run.micro_batches == 1:
        return ""
    return "torch 2.13 fails if the first micro-batch is under no_sync: see scenarios/upstream"


def why_not_unused(scenario: Scenario) -> str:
    """Return the reason why DDP cannot look for unused params in a case; "" if it can."""
    if scenario.model.recompute != "reentrant":
        return ""
    return "DDP finds params unused that a reentrant checkpoint uses in backward, and raises"


# Buckets of a few elements, because with the default a small model has a single bucket.
OPTIONS: Mapping[str, Option] = {
    "hook": Option(default="none", values=tuple(_WIRE)),
    "bucket_bytes": Option(default=25 * _MEGABYTE, values=(1, 40, 200)),
    "bucket_view": Option(default=False, values=(True,)),
    "static_graph": Option(default=False, values=(True,), fits=why_not_static),
    "find_unused": Option(default=False, values=(True,), fits=why_not_unused),
}


class DDPEngine(WholeParamEngine):
    """DDP and an optimizer that updates whole params, on a rank."""

    def __init__(
        self,
        module: nn.Module,
        *,
        scenario: Scenario,
        group: ProcessGroup,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._spec = scenario.optimizer
        # Read names before the wrapper adds its prefix.
        params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        self._ddp = _wrapped(module, group=group, options=options)
        super().__init__(module, self._build_optimizer(params, group), group=group)
        # Run forward through the wrapper, because DDP prepares its reductions there.
        self.module = self._ddp
        self._unsynced = ExitStack()

    def _build_optimizer(
        self, params: Mapping[str, nn.Parameter], group: ProcessGroup
    ) -> Optimizer:
        return plain_optimizer(self._spec, params)

    def start_micro_batch(self, *, last: bool) -> None:
        """Keep DDP from reducing, except in the last micro-batch."""
        # Here, not in `backward`, because DDP decides in forward if backward will reduce.
        if not last:
            self._unsynced.enter_context(self._ddp.no_sync())

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, during which DDP reduces."""
        # Exits `no_sync` afterwards, if `start_micro_batch` entered it.
        with self._unsynced:
            loss.backward()

    def reduce(self) -> None:
        """Do nothing, because DDP reduces during backward."""

    def update(self) -> StepResult:
        """Clip if the scenario does, and update the params."""
        spec, norm = self._spec, None
        if spec.clip_value is not None:
            nn.utils.clip_grad_value_(self.named.values(), spec.clip_value)
        if spec.clip_norm is not None:
            # Every rank has whole gradients, so the norm needs no communication.
            norm = nn.utils.clip_grad_norm_(self.named.values(), spec.clip_norm)
        self.optimizer.step()
        return StepResult(norm=norm)

    def stray_padding(self) -> str:
        """Return "", because DDP has no padding."""
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
        # None keeps the first bucket's smaller default; a number also sets the first bucket's size.
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

    # A wrapper, because DDP recognizes `bf16_compress_hook` by name and refuses it without NCCL.
    def compress(group: Any, bucket: Any) -> Any:
        return default_hooks.bf16_compress_hook(group, bucket)

    # DDP compares annotations with types, but in this module they are strings.
    compress.__annotations__ = default_hooks.bf16_compress_hook.__annotations__
    return compress


class ZeroRedundancyEngine(DDPEngine):
    """DDP and torch's ZeroRedundancyOptimizer, which assigns whole params to ranks."""

    def _build_optimizer(
        self, params: Mapping[str, nn.Parameter], group: ProcessGroup
    ) -> Optimizer:
        # A late import, because it takes a tenth of a second.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self._sharded = ZeroRedundancyOptimizer(
            param_groups(self._spec, params),
            class_of(self._spec),
            process_group=group,
            **settings_of(self._spec),
        )
        return self._sharded

    def owns(self, name: str) -> bool:
        """Return True if this rank's local optimizer steps a param."""
        # `optim` is the local optimizer, which only has this rank's params.
        groups = self._sharded.optim.param_groups
        # Compare identity, because == compares elements.
        return any(self.named[name] is param for group in groups for param in group["params"])

    def state_of(self, param: nn.Parameter) -> Mapping[str, Any]:
        """Return the local optimizer's state for a param."""
        return self._sharded.optim.state.get(param, {})


class TorchDDP:
    """DDP and a plain optimizer on fp32 params: stage 0.

    Args:
        as_is: True to also accept cases that are known to go wrong.
    """

    capabilities = Capabilities(stages=(0,), optimizers=OPTIMIZERS, follows=_FOLLOWS)

    def __init__(self, *, as_is: bool = False) -> None:
        self.name = f"torch-ddp{'-as-is' if as_is else ''}"
        graph = replace(OPTIONS["static_graph"], fits=None if as_is else why_not_static)
        self.options = {**OPTIONS, "static_graph": graph}

    def numerics(self, scenario: Scenario) -> Numerics:
        """Return the arithmetic of a case, which depends on the hook."""
        hook = chosen_options(self, scenario)["hook"]
        if hook == "none":
            return NUMERICS
        wire: Any = _WIRE[str(hook)]
        # DDP leaves the division to a comm hook. Both hooks divide before the sum, in the
        # communication dtype, and cast the result back to the gradient's dtype.
        return replace(NUMERICS, divide="pre", reduce_dtype=wire, reported_dtype="param")

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> DDPEngine:
        """Wrap the module for training on this rank."""
        options = chosen_options(self, scenario)
        return DDPEngine(module, scenario=scenario, group=group, options=options)


class TorchZeroRedundancy:
    """DDP and ZeroRedundancyOptimizer on fp32 params: stage 1, with an owner for each param."""

    name = "torch-zero-redundancy"
    capabilities = Capabilities(stages=(1,), optimizers=OPTIMIZERS, follows=_FOLLOWS)
    # As for DDP, because whole gradients are all-reduced and only the update is sharded.
    numerics = NUMERICS

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> ZeroRedundancyEngine:
        """Wrap the module for training on this rank."""
        return ZeroRedundancyEngine(module, scenario=scenario, group=group)


TARGETS = (TorchDDP(), TorchDDP(as_is=True), TorchZeroRedundancy())
