"""Accelerators of ranks in one process: how one is set up, and what accelerate keeps of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.rank_local import Library, RankLocal

LIBRARY = Library(package="accelerate", extra="accelerate", judged="accelerate==1.15.0")
RANK_LOCAL = RankLocal(
    names=(
        "accelerate.state:AcceleratorState._shared_state",
        "accelerate.state:GradientState._shared_state",
        "accelerate.state:PartialState._shared_state",
    )
)
"""As `zero-sim doctor --target` finds it for 1.15.0."""


def accelerator_for(
    scenario: Scenario,
    *,
    group: ProcessGroup,
    handlers: Sequence[Any] = (),
    sync_each: bool = False,
    sharded: Mapping[str, Any] | None = None,
) -> Any:
    """A rank's accelerator, on the CPU.

    Args:
        scenario: The case; `model.dtype`, `system.redundancy` and `run.micro_batches` are read.
        group: The data-parallel group, which has to be all ranks.
        handlers: `kwargs_handlers` of the accelerator.
        sync_each: Whether gradients are reduced at every micro-batch.
        sharded: Settings of its `fsdp_plugin`, where it has one.
    """
    from accelerate import Accelerator  # pyrefly: ignore
    from accelerate.utils import GradientAccumulationPlugin  # pyrefly: ignore

    accumulation = GradientAccumulationPlugin(
        num_steps=scenario.run.micro_batches, sync_each_batch=sync_each
    )
    with rank_environment(rank=group.rank(), ranks=group.size()):
        accelerator = Accelerator(
            cpu=True,
            kwargs_handlers=list(handlers),
            gradient_accumulation_plugin=accumulation,
            mixed_precision="bf16" if scenario.model.dtype == "bf16" else "no",
        )
        if sharded is not None:
            _shard(accelerator, sharded, copies=scenario.system.redundancy)
    return accelerator


def _shard(accelerator: Any, settings: Mapping[str, Any], *, copies: int) -> None:
    """Have it shard models, as AcceleratorState has it where it finds a GPU, and nowhere else."""
    from accelerate.state import PartialState  # pyrefly: ignore
    from accelerate.utils import (  # pyrefly: ignore
        DistributedType,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
    )

    state = accelerator.state
    plugin = FullyShardedDataParallelPlugin(**settings)
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    if copies > 1:
        config = ParallelismConfig(
            dp_replicate_size=copies, dp_shard_size=accelerator.num_processes // copies
        )
        state.parallelism_config = config
        state.device_mesh = config.get_device_mesh("cpu")
        config._validate_accelerator(accelerator)


@contextmanager
def rank_environment(*, rank: int, ranks: int) -> Iterator[None]:
    """The variables by which accelerate knows its rank; it sets more of them, which are undone.

    Args:
        rank: In the world of all ranks.
        ranks: How many there are.
    """
    before = dict(os.environ)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        # Without it the number of threads would be set.
        "OMP_NUM_THREADS": "1",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
