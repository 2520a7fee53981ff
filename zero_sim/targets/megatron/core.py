"""Megatron-Core's DistributedDataParallel with its plain and its distributed optimizer.

[Note: what Megatron-Core computes]
Gradients accumulate in flat buffers, in backward order, each param behind padding to 64 elements
where the optimizer is distributed. What a rank has accumulated is multiplied with 1 / ranks and
summed: by an all-reduce, or by a reduce-scatter of each bucket whose shards the ranks step. It
calls `torch.cuda` wherever it runs.
"""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import Capabilities
from zero_sim.targets.megatron.engine import MegatronEngine
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.rank_local import Library, RankLocal


class MegatronCore:
    """Megatron-Core's DDP on fp32 params; at stage 1 with its DistributedOptimizer."""

    name = "megatron-core"
    library = Library(package="megatron.core", extra="megatron", judged="megatron-core==0.16.1")
    # 35 of its globals differ by rank, and `zero-sim doctor --target` names them.
    rank_local = RankLocal(names=("megatron.core.parallel_state:*",), cuda_is_cpu=True)
    capabilities = Capabilities(
        stages=(0, 1),
        optimizers=("adamw",),
        follows=(
            "optimizer.betas",
            "optimizer.eps",
            "optimizer.weight_decay",
            "optimizer.warmup_steps",
            "run.micro_batches",
            "model.tied",
            "system.bucket_elems",
            "system.overlap_grads",
        ),
    )
    numerics = Numerics(
        divide="premul-fp32",
        divide_by="ranks",
        sync="last",
        grad_dtype="param",
        grads_told="before-division",
    )

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> MegatronEngine:
        """Wrap the module for training on this rank."""
        return MegatronEngine(module, scenario=scenario)
