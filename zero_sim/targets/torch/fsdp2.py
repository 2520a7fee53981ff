"""torch's `fully_shard` (FSDP2) under a plain optimizer of torch, on a mesh where the params are.

[Note: what FSDP2 computes]
Each module that is sharded reduces the gradients of all its params in one reduce-scatter with AVG,
in fp32: a sum, then a division, `post` of the reference; but on NCCL a product with the reciprocal
before the sum, `premul`. What the sharded params hold in `.grad` is divided already. A param is
cut along its first dimension into chunks of equally many rows, the last ones shorter or empty.
Between micro-batches gradients accumulate locally, whole.

[Note: clipping by norm]
Of sharded gradients torch takes the norm of each rank's rows, and one all-reduce adds the squares
of all of these over the ranks: `of-rows` of the reference.

[Note: params that some rank does not use]
Each rank leaves the params that its own losses do not reach out of the reduce-scatter. Where ranks
differ in that, they bring tensors of other params to one call: it fails where the sizes differ, and
where they are equal, gradients of different params are added without an error (torch 2.13, without
`reduce_scatter_unused_params`). So only models are declared of which every micro-batch uses all; a
test shows what comes of others.
"""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities, Numerics
from zero_sim.targets.torch.fsdp2_engine import FSDP2Engine
from zero_sim.targets.torch.optim import OPTIMIZERS

_ROWS_ALONE = "its step looks at whole params, of which fully_shard gives it a rank's rows"


class TorchFSDP2:
    """`fully_shard` on fp32 params; params, gradients and state are sharded."""

    name = "torch-fsdp2"
    capabilities = Capabilities(
        stages=(1,),
        # A scalar has no rows to deal out, and backward fails where a param has no elements.
        scalar_params=False,
        empty_params=False,
        optimizers=tuple(
            name for name in OPTIMIZERS if name not in ("rprop", *WHOLE_PARAM_OPTIMIZERS)
        ),
        why_no_optimizer=(
            ("rprop", "torch's in-place masks have no rule for sharded tensors, and raise"),
            *((name, _ROWS_ALONE) for name in WHOLE_PARAM_OPTIMIZERS),
        ),
        follows=(
            *OPTIMIZER_SETTINGS,
            "optimizer.clip_norm",
            "optimizer.clip_value",
            "model.tied",
            "run.micro_batches",
        ),
    )
    numerics = Numerics(
        divide="avg",
        divide_by="ranks",
        sync="last",
        grad_dtype="param",
        grads_told="after-division",
        norm="of-rows",
        clip="fp32-reciprocal",
    )

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> FSDP2Engine:
        """Shard the module for training on this rank."""
        return FSDP2Engine(module, scenario=scenario, group=group)
