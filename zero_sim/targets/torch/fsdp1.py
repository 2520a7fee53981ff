"""torch's FullyShardedDataParallel (FSDP1) under a plain optimizer of torch.

[Note: what FSDP1 computes]
All params of the module lie in one flat param, each behind padding to 16 bytes, cut evenly over the
ranks. Each rank divides its gradient by a power of two near the root of the number of ranks, a
reduce-scatter sums, and the sum is divided by the rest. With `NO_SHARD`, which one rank gets in any
case, an all-reduce takes the place of the reduce-scatter, and clipping is torch's own; of params
without elements FSDP1 makes no gradients, so that the norm is one of fewer params.
"""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities, Numerics
from zero_sim.targets.torch.fsdp1_engine import FSDP1Engine
from zero_sim.targets.torch.optim import OPTIMIZERS


def predivide_factor(ranks: int) -> float:
    """The power of two by which FSDP1 divides before the sum, so that neither half overflows."""
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)


class TorchFSDP1:
    """FullyShardedDataParallel on fp32 params; the stage is its sharding strategy."""

    name = "torch-fsdp1"
    capabilities = Capabilities(
        stages=(0, 2, 3),
        scalar_params=False,
        # Flat params are cut anywhere, where muon and lamb look at whole params.
        optimizers=tuple(name for name in OPTIMIZERS if name not in WHOLE_PARAM_OPTIMIZERS),
        follows=(*OPTIMIZER_SETTINGS, "model.tied", "run.micro_batches", "optimizer.clip_norm"),
    )

    def numerics(self, scenario: Scenario) -> Numerics:
        """By which rules it computes a case."""
        ranks = scenario.world.size
        is_whole = scenario.system.stage == 0 or ranks == 1
        has_empty = any(0 in shape for shape in scenario.model.shapes or ())
        whole = "told" if has_empty else "of-params"
        return Numerics(
            divide="post-rounded",
            divide_by="ranks",
            predivide_by=predivide_factor(ranks),
            sync="last",
            grad_dtype="param",
            grads_told="after-division",
            norm=whole if is_whole else "of-own-params",
            clip="fp32-reciprocal",
        )

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> FSDP1Engine:
        """Shard the module for training on this rank."""
        return FSDP1Engine(module, scenario=scenario, group=group)
