"""accelerate's `prepare` on a plain optimizer, under which it wraps DistributedDataParallel.

[Note: what stands for what]
`bucket_bytes`, `bucket_view`, `static_graph`, `find_unused` and `hook` are fields of
`DistributedDataParallelKwargs`. The arithmetic is DDP's, see there.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.accelerate.ddp_engine import MEGABYTE, AccelerateDDPEngine
from zero_sim.targets.accelerate.rules import left_out_of_files, too_many, why_no_mean
from zero_sim.targets.accelerate.setup import LIBRARY, RANK_LOCAL
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.torch.ddp import why_not_static
from zero_sim.targets.torch.optim import OPTIMIZERS
from zero_sim.workloads import EXACT_MODELS


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
        """By which rules it computes a case."""
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
        """What of a case is by no rule that can be declared."""
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


ACCELERATE_DDP = (AccelerateDDP(), AccelerateDDP(as_is=True))
