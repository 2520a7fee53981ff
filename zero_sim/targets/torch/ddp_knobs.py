"""torch's DistributedDataParallel with what it can be set to: hooks, buckets, views, static graph.

[Note: what a hook computes]
DDP's own reduction multiplies by 1 / ranks before the sum; with a hook the gradient is the hook's
to divide. torch's `allreduce_hook` divides before the sum, and so does `bf16_compress_hook`, in the
dtype that goes over the wire; what came is cast back.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.torch.ddp import DDPEngine, TorchDDP

_WIRE = {"none": None, "allreduce": None, "bf16-compress": "bf16"}
"""By hook: the dtype that goes over the wire; None for the gradient's."""
_BYTES = 1 << 20


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


class DDPKnobsEngine(DDPEngine):
    """One rank of DDP as options say.

    Args:
        module: The model.
        scenario: The case; `optimizer` is read.
        group: The data-parallel group.
        options: The value of each option.
    """

    def __init__(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup, options: Any
    ) -> None:
        self._options = options
        super().__init__(module, scenario=scenario, group=group)

    def _wrap(self, module: nn.Module, group: ProcessGroup) -> nn.parallel.DistributedDataParallel:
        options = self._options
        ddp = nn.parallel.DistributedDataParallel(
            module,
            process_group=group,
            bucket_cap_mb=options["bucket_bytes"] / _BYTES,
            gradient_as_bucket_view=options["bucket_view"],
            static_graph=options["static_graph"],
            find_unused_parameters=options["find_unused"],
        )
        if options["hook"] != "none":
            ddp.register_comm_hook(group, _hook(options["hook"]))
        return ddp


def why_not_static(scenario: Scenario) -> str:
    """Why a case cannot have a static graph; '' where it can."""
    if scenario.run.micro_batches == 1:
        return ""
    return "torch 2.13 fails where the first micro-batch is under no_sync: see scenarios/upstream"


class TorchDDPKnobs:
    """DDP and a plain optimizer on fp32 params, with options of DDP's own.

    Args:
        as_is: Whether cases that are known to go wrong may be asked for, too.
    """

    capabilities = TorchDDP.capabilities

    def __init__(self, *, as_is: bool = False) -> None:
        self.name = f"torch-ddp-knobs{'-as-is' if as_is else ''}"
        fits = None if as_is else why_not_static
        self.options = {
            "hook": Option(default="none", values=tuple(_WIRE)),
            "bucket_bytes": Option(default=25 * _BYTES, values=(1, 40, 200)),
            "bucket_view": Option(default=False, values=(True,)),
            "static_graph": Option(default=False, values=(True,), fits=fits),
            "find_unused": Option(default=False, values=(True,)),
        }

    def numerics(self, scenario: Scenario) -> Numerics:
        """By which rules it computes a case."""
        hook = chosen_options(self, scenario)["hook"]
        return Numerics(
            divide="premul" if hook == "none" else "pre",
            divide_by="ranks",
            sync="last",
            grad_dtype="param",
            reduce_dtype=_WIRE[hook],  # pyrefly: ignore
            grads_told="before-division",
            told_dtype="param",
            norm="of-params",
            clip="fp32-reciprocal",
        )

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> DDPKnobsEngine:
        """Wrap the module for training on this rank."""
        options = chosen_options(self, scenario)
        return DDPKnobsEngine(module, scenario=scenario, group=group, options=options)
