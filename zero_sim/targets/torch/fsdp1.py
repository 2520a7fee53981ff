"""torch's FullyShardedDataParallel (FSDP1) under a plain optimizer of torch.

[Note: what FSDP1 computes]
All params of the module lie in one flat param, each behind padding to 16 bytes, cut evenly over the
ranks. Each rank divides its gradient by a power of two near the root of the number of ranks, a
reduce-scatter sums, and the sum is divided by the rest. With `NO_SHARD`, which one rank gets in any
case, an all-reduce takes the place of the reduce-scatter, and clipping is torch's own; of params
without elements FSDP1 makes no gradients, so that the norm is one of fewer params.

[Note: what FSDP1 computes by what it is set to]
Micro-batches accumulate under `no_sync` in the dtype of the params that forward has; what came of
that is cast to `reduce_dtype`, divided, summed and divided there, and cast to fp32, in which rounds
that are each reduced are added. With HSDP both parts of the division are of all ranks, and stand
before the first sum and behind the last one.

[Note: what stands for what]
The stage for the sharding strategy; `system.redundancy` for `HYBRID_SHARD`, at stage 2
`_HYBRID_SHARD_ZERO2`; `system.sync` for whether there is a `no_sync`; `model.dtype` for
`param_dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, UPSTREAM, Capabilities, Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.torch.fsdp1_engine import FSDP1Engine
from zero_sim.targets.torch.optim import OPTIMIZERS


def predivide_factor(ranks: int) -> float:
    """The power of two by which FSDP1 divides before the sum, so that neither half overflows."""
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)


class TorchFSDP1:
    """FullyShardedDataParallel, with fp32 masters.

    Args:
        as_is: True to accept cases that are known to go wrong, too.
    """

    capabilities = Capabilities(
        stages=(0, 2, 3),
        dtypes=("fp32", "bf16"),
        scalar_params=False,
        # Flat params are cut anywhere, where muon and lamb look at whole params.
        optimizers=tuple(name for name in OPTIMIZERS if name not in WHOLE_PARAM_OPTIMIZERS),
        follows=(
            *OPTIMIZER_SETTINGS,
            "model.tied",
            "run.micro_batches",
            "optimizer.clip_norm",
            "system.redundancy",
            "system.sync",
        ),
    )
    options = {  # noqa: RUF012
        "reduce_dtype": Option(default="param", values=("fp32", "bf16")),
        "backward_prefetch": Option(default="pre", values=("post", "none")),
        "forward_prefetch": Option(default=False, values=(True,)),
        "limit_all_gathers": Option(default=True, values=(False,)),
    }

    def __init__(self, *, as_is: bool = False) -> None:
        self._as_is = as_is
        self.name = f"torch-fsdp1{'-as-is' if as_is else ''}"

    def numerics(self, scenario: Scenario) -> Numerics:
        """Return the rules of a case."""
        ranks = scenario.world.size
        has_empty = any(0 in shape for shape in scenario.model.shapes or ())
        whole = "told" if has_empty else "of-params"
        reduce: Any = chosen_options(self, scenario)["reduce_dtype"]
        every = scenario.system.sync == "every"
        return Numerics(
            divide="post-rounded",
            divide_by="ranks",
            predivide_by=predivide_factor(ranks),
            divide_each="round" if every else "step",
            grad_dtype="param",
            accumulate_dtype="fp32" if every else "param",
            reduce_dtype=reduce,
            grads_told="after-division",
            told_dtype="fp32",
            norm=whole if _is_whole(scenario) else "of-own-params",
            clip="fp32-reciprocal",
        )

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """What of a case is known to go wrong, or is by no rule that can be declared."""
        every = scenario.system.sync == "every"
        if _is_whole(scenario) and every and scenario.run.micro_batches > 1:
            yield Problem(
                path="system.sync",
                message="where nothing is sharded FSDP1 sums again over the ranks what it has "
                "summed of earlier micro-batches, which is by no rule that can be declared.",
                suggestion="Try sync = 'last', or one micro-batch.",
            )
        if not self._as_is:
            yield from _known_to_go_wrong(scenario)

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> FSDP1Engine:
        """Shard the module for training on this rank."""
        options = chosen_options(self, scenario)
        return FSDP1Engine(module, scenario=scenario, group=group, options=options)


def _is_whole(scenario: Scenario) -> bool:
    """Whether nothing is sharded."""
    return scenario.system.stage == 0 or scenario.world.size == 1


def _known_to_go_wrong(scenario: Scenario) -> Iterator[Problem]:
    """Cases that go wrong in torch 2.13."""
    narrow, accumulates = scenario.model.dtype != "fp32", scenario.run.micro_batches > 1
    if _is_whole(scenario) and narrow and scenario.model.tied and accumulates:
        yield Problem(
            path="model.tied",
            message="where nothing is sharded FSDP1 of torch 2.13 raises as it gives the other "
            "name of a tied fp32 param the 16-bit gradient of an earlier micro-batch, got "
            f"{', '.join(map(repr, scenario.model.tied))}. {UPSTREAM}",
            suggestion="Try fp32, or one micro-batch.",
        )
    copies = scenario.system.redundancy
    if 1 < copies == scenario.world.size:
        yield Problem(
            path="system.redundancy",
            message="torch 2.13 reduces nothing with HYBRID_SHARD where a block has one rank, got "
            f"{copies} blocks. {UPSTREAM}",
            suggestion="Try stage 0, or fewer copies than ranks.",
        )
