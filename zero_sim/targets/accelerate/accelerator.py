"""Accelerators of ranks in one process: how one is set up, and its checkpoints.

`load_state` sets the random numbers of the process to those that were saved; other ranks of the
simulated world, and whoever judges them, go on with theirs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import CheckpointForm, Scenario
from zero_sim.targets.protocol import Settings
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


_SHARDS = "pytorch_model_fsdp_0"
"""The folder in which shards of params are, and no whole ones."""


def save_state(accelerator: Any, path: Path, *, form: CheckpointForm) -> None:
    """Save all that it has prepared; every rank calls it.

    Args:
        accelerator: This rank's.
        path: The folder.
        form: Of what is sharded: `sharded` for torch's distributed checkpoint, or `consolidated`
            for whole params on the first rank.
    """
    _choose_form(accelerator, is_whole=form == "consolidated")
    accelerator.save_state(str(path))


def load_state(accelerator: Any, path: Path) -> None:
    """Load it into what it has prepared; every rank calls it.

    Args:
        accelerator: This rank's.
        path: The folder.
    """
    _choose_form(accelerator, is_whole=not (path / _SHARDS).is_dir())
    with _own_random_numbers():
        accelerator.load_state(str(path))


def settings_of_groups(optimizer: Any, params: Mapping[str, Any]) -> Settings:
    """Settings of the optimizer's groups, except learning rates, which have a factor in them.

    Args:
        optimizer: Torch's, or accelerate's around it.
        params: Those that it steps, by name.
    """
    names = {id(param): name for name, param in params.items()}
    return Settings(
        params={
            names[id(param)]: {
                # torch makes lists of tuples where it broadcasts what it loads.
                key: tuple(value) if isinstance(value, list) else value
                for key, value in group.items()
                if key not in ("params", "lr")
            }
            for group in optimizer.param_groups
            for param in group["params"]
        }
    )


def _choose_form(accelerator: Any, *, is_whole: bool) -> None:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        # Those of the form before would stay.
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type("FULL_STATE_DICT" if is_whole else "SHARDED_STATE_DICT")


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
