"""accelerate's `prepare` on a plain optimizer, as DistributedDataParallel and as FSDP2.

[Note: what stands for what]
As DDP, `bucket_bytes`, `bucket_view`, `static_graph`, `find_unused` and `hook` are fields of
`DistributedDataParallelKwargs`. As FSDP2 (`FullyShardedDataParallelPlugin(fsdp_version=2)`),
`system.reshard_after_forward` stands for the plugin's, `system.sync` for `sync_each_batch`,
`system.redundancy` for `dp_replicate_size` of a `ParallelismConfig`, params of bf16 for
`mixed_precision="bf16"`, which shards them as fp32 ones. The arithmetic is torch's, see there; one
rank by itself is never told to reduce at each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.accelerate.accelerator import LIBRARY, RANK_LOCAL
from zero_sim.targets.accelerate.engine import MEGABYTE, AccelerateDDPEngine, AccelerateFSDP2Engine
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, UPSTREAM, Capabilities
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.torch.ddp import why_not_static
from zero_sim.targets.torch.fsdp2 import TorchFSDP2, numerics_with, without_rule
from zero_sim.targets.torch.optim import OPTIMIZERS
from zero_sim.workloads import EXACT_MODELS

MICRO_BATCHES_MAX = 40
"""Up to which fp32 gives 1 for 1/n times n; 1/41 times 41 is less."""


def why_no_mean(scenario: Scenario) -> str:
    """Why losses that are divided have no rule in a case; '' where they have one."""
    count = scenario.run.micro_batches
    if count & (count - 1) == 0:
        return ""
    return "no power of two of micro-batches, whose reciprocal goes rounded through backward"


def too_many(scenario: Scenario) -> Iterator[Problem]:
    """Refuse more micro-batches than the largest number whose division can be undone."""
    if scenario.run.micro_batches > MICRO_BATCHES_MAX:
        yield Problem(
            path="run.micro_batches",
            message="accelerate divides each loss by their number, which a product with it undoes "
            f"in fp32 up to {MICRO_BATCHES_MAX}, got {scenario.run.micro_batches}.",
            suggestion=f"Try {MICRO_BATCHES_MAX}.",
        )


def unsharded(scenario: Scenario) -> Iterator[Problem]:
    """Refuse as many copies as ranks, for which accelerate has no FSDP2."""
    copies = scenario.system.redundancy
    if 1 < copies == scenario.world.size:
        yield Problem(
            path="system.redundancy",
            message="expected fewer copies than ranks, as accelerate asks for a dimension to shard "
            f"over, got {copies} of each.",
            suggestion="Leave it out, or try target accelerate-ddp.",
        )


def left_out_of_files(scenario: Scenario) -> Iterator[Problem]:
    """Refuse several params without elements, of which accelerate 1.15.0 saves the first as DDP."""
    empty = [shape for shape in scenario.model.shapes or () if 0 in shape]
    if scenario.reload is not None and len(empty) > 1:
        yield Problem(
            path="model.shapes",
            message="accelerate 1.15.0 saves the first alone of params without elements, and "
            f"cannot load them, expected one at most with [reload], got {len(empty)}. {UPSTREAM}",
            suggestion="Leave out all but one.",
        )


def known_to_go_wrong(scenario: Scenario, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Cases that accelerate 1.15.0 raises at.

    Args:
        scenario: As the target is given it.
        options: The value of each option.
    """
    if options["loaded_by_first"] and scenario.model.name != "mlp":
        yield Problem(
            path="system.options",
            message="accelerate 1.15.0 raises where the first rank loads params that the model "
            f"itself has, got loaded_by_first and model.name = {scenario.model.name!r}. "
            f"{UPSTREAM}",
            suggestion="Try the model mlp.",
        )
    if scenario.optimizer.name == "adagrad" and scenario.reload is not None:
        yield Problem(
            path="optimizer.name",
            message="accelerate 1.15.0 cannot save an optimizer that has state before its first "
            f"step, got 'adagrad' with [reload]. {UPSTREAM}",
            suggestion="Try another one.",
        )
    has_state = scenario.optimizer.name != "sgd" or scenario.optimizer.momentum
    if scenario.reload is not None and scenario.reload.form == "consolidated" and not has_state:
        yield Problem(
            path="reload.form",
            message="torch 2.13 raises 'Expected device to be set' where accelerate has it load a "
            "whole state of an optimizer that has no tensors in it, got SGD without momentum. "
            f"{UPSTREAM}",
            suggestion="Try form = 'sharded', or another optimizer.",
        )
    if options["wrap"] == "size" and scenario.model.tied:
        yield Problem(
            path="model.tied",
            message="accelerate 1.15.0 wraps by size what shares a param with another module, "
            "which torch 2.13 refuses in the first forward, got "
            f"{', '.join(map(repr, scenario.model.tied))}. {UPSTREAM}",
            suggestion="Try option wrap=none.",
        )
    if options["checkpointing"] and options["wrap"] == "none":
        yield Problem(
            path="system.options",
            message="accelerate 1.15.0 raises where it checkpoints activations and wraps no "
            f"children. {UPSTREAM}",
            suggestion="Try option wrap=size.",
        )


def as_reduced(scenario: Scenario) -> Scenario:
    """The case with one rank by itself reducing once a step, whatever it says."""
    if scenario.world.size > 1:
        return scenario
    return replace(scenario, system=replace(scenario.system, sync="last"))


def as_fsdp2(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that rules of FSDP2 ask for; those that accelerate has not as torch has them."""
    return {
        "reduce_dtype": options["reduce_dtype"],
        "all_reduce_last": False,
        "divide_factor": 0.0,
        "force_sum": False,
    }


def _why_not_compressed(scenario: Scenario) -> str:
    if scenario.model.name in EXACT_MODELS:
        return "gradients of a model that are more than fp16 holds"
    if scenario.world.size == 1 and scenario.run.micro_batches > 1:
        return "one rank by itself, which reduces what it accumulated at every micro-batch"
    return ""


class AccelerateDDP:
    """`Accelerator().prepare(model, optimizer)` on fp32 params: stage 0.

    Args:
        as_is: Whether cases that are known to go wrong may be asked for, too: scenarios/upstream
            has them.
    """

    library = LIBRARY
    rank_local = RANK_LOCAL
    capabilities = Capabilities(
        stages=(0,),
        optimizers=OPTIMIZERS,
        follows=(
            *OPTIMIZER_SETTINGS,
            "optimizer.clip_norm",
            "optimizer.clip_value",
            "run.micro_batches",
            "model.tied",
            "model.distinct_start",
            "reload",
        ),
        only=(("reload.form", ("consolidated",)), ("reload.weights_only", (False,))),
    )
    options = {  # noqa: RUF012
        "mean_loss": Option(default=False, values=(True,), fits=why_no_mean),
        "hook": Option(default="no", values=("fp16",), fits=_why_not_compressed),
        "bucket_bytes": Option(default=25 * MEGABYTE, values=(1, 40, 200)),
        "bucket_view": Option(default=False, values=(True,)),
        "static_graph": Option(default=False, values=(True,), fits=why_not_static),
        "find_unused": Option(default=False, values=(True,)),
    }

    def __init__(self, *, as_is: bool = False) -> None:
        self._as_is = as_is
        self.name = f"accelerate-ddp{'-as-is' if as_is else ''}"

    def numerics(self, scenario: Scenario) -> Numerics:
        """Return the rules of a case."""
        options = chosen_options(self, scenario)
        is_hooked = options["hook"] == "fp16"
        return Numerics(
            divide="pre" if is_hooked else "premul",
            divide_by="micro-batches" if options["mean_loss"] else "ranks",
            sync="last",
            grad_dtype="param",
            reduce_dtype="fp16" if is_hooked else None,
            grads_told="before-division",
            told_dtype="param",
            norm="of-params",
            clip="fp32-reciprocal",
        )

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield parts of a case for which no rule can be declared."""
        yield from too_many(scenario)
        options = chosen_options(self, scenario)
        if options["hook"] == "fp16" and options["mean_loss"] and scenario.run.micro_batches > 1:
            yield Problem(
                path="system.options",
                message="losses that are divided give gradients that fp16 holds less precisely "
                "where they are small, while rules divide what was rounded, expected hook=fp16 or "
                "mean_loss=true, got both.",
                suggestion="Leave one out, or accumulation.",
            )
        if not self._as_is:
            yield from left_out_of_files(scenario)

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> AccelerateDDPEngine:
        """Prepare the module for training on this rank."""
        options = chosen_options(self, scenario)
        return AccelerateDDPEngine(module, scenario=scenario, group=group, options=options)


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
        """Return the rules of a case."""
        options = chosen_options(self, scenario)
        known = numerics_with(as_reduced(scenario), as_fsdp2(options))
        known = replace(known, sync="last" if scenario.world.size == 1 else None)
        if options["mean_loss"]:
            # With a power of two of micro-batches, where the order of divisions changes nothing.
            return replace(known, divide="post-rounded", divide_by="micro-batches")
        return known

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield parts of a case for which no rule can be declared."""
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


TARGETS = (
    AccelerateDDP(),
    AccelerateDDP(as_is=True),
    AccelerateFSDP2(),
    AccelerateFSDP2(as_is=True),
)
