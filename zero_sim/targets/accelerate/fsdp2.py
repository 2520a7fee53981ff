"""accelerate's `prepare` with `FullyShardedDataParallelPlugin(fsdp_version=2)`.

[Note: what stands for what]
`system.reshard_after_forward` for the plugin's, `system.sync` for `sync_each_batch`,
`system.redundancy` for `dp_replicate_size` of a `ParallelismConfig`, params of bf16 for
`mixed_precision="bf16"`, which shards them as fp32 ones. The arithmetic is FSDP2's, see there;
one rank by itself is never told to reduce at each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.accelerate.fsdp2_engine import AccelerateFSDP2Engine
from zero_sim.targets.accelerate.rules import (
    as_fsdp2,
    as_reduced,
    known_to_go_wrong,
    too_many,
    unsharded,
    why_no_mean,
)
from zero_sim.targets.accelerate.setup import LIBRARY, RANK_LOCAL
from zero_sim.targets.declared import OPTIMIZER_SETTINGS
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.torch.fsdp2 import TorchFSDP2
from zero_sim.targets.torch.fsdp2_rules import numerics_with, without_rule


class AccelerateFSDP2:
    """`Accelerator.prepare(model, optimizer)` under FSDP2: stage 3.

    Args:
        as_is: Whether cases that are known to go wrong may be asked for, too: scenarios/upstream
            has them.
    """

    library = LIBRARY
    rank_local = RANK_LOCAL
    options = {  # noqa: RUF012
        "mean_loss": Option(default=False, values=(True,), fits=why_no_mean),
        "reduce_dtype": Option(default="param", values=("fp32", "bf16")),
        "wrap": Option(default="none", values=("size",)),
        "cpu_offload": Option(default=False, values=(True,)),
        "loaded_by_first": Option(default=False, values=(True,)),
        "checkpointing": Option(default=False, values=(True,)),
    }

    def __init__(self, *, as_is: bool = False) -> None:
        self._as_is = as_is
        self.name = f"accelerate-fsdp2{'-as-is' if as_is else ''}"
        known = TorchFSDP2.capabilities
        self.capabilities = replace(
            known,
            models=(*known.models, *(("moe",) if as_is else ())),
            stages=(3,),
            dtypes=("fp32", "bf16"),
            follows=(
                *OPTIMIZER_SETTINGS,
                "optimizer.clip_norm",
                "run.micro_batches",
                "model.tied",
                "model.distinct_start",
                "system.reshard_after_forward",
                "system.sync",
                "system.redundancy",
                "reload",
            ),
            only=(("reload.weights_only", (False,)),),
        )

    def numerics(self, scenario: Scenario) -> Numerics:
        """By which rules it computes a case."""
        options = chosen_options(self, scenario)
        known = numerics_with(as_reduced(scenario), as_fsdp2(options))
        known = replace(known, sync="last" if scenario.world.size == 1 else None)
        if options["mean_loss"]:
            # With a power of two of micro-batches, where the order of divisions changes nothing.
            return replace(known, divide="post-rounded", divide_by="micro-batches")
        return known

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """What of a case is by no rule that can be declared."""
        options = chosen_options(self, scenario)
        yield from too_many(scenario)
        yield from without_rule(as_reduced(scenario), as_fsdp2(options))
        yield from unsharded(scenario)
        model = scenario.model
        if model.name == "bit-hash" and model.dtype != "fp32":
            yield Problem(
                path="model.name",
                message="accelerate has what goes into a model cast to the dtype of its params, "
                f"expected a model with no fp32 batches in {model.dtype}, got 'bit-hash'.",
                suggestion="Try another model, or fp32.",
            )
        if model.distinct_start and not options["loaded_by_first"]:
            yield Problem(
                path="model.distinct_start",
                message="each rank shards the weights that it has, unless the first one sends its "
                "own to all.",
                suggestion="Leave it out, or try option loaded_by_first.",
            )
        if not self._as_is:
            yield from known_to_go_wrong(scenario, options)

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> AccelerateFSDP2Engine:
        """Prepare the module for training on this rank."""
        options = chosen_options(self, scenario)
        return AccelerateFSDP2Engine(module, scenario=scenario, group=group, options=options)


ACCELERATE_FSDP2 = (AccelerateFSDP2(), AccelerateFSDP2(as_is=True))
