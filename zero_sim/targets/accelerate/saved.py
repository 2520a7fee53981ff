"""Checkpoints of an accelerator: `save_state` and `load_state`, whole or in shards.

`load_state` sets the random numbers of the process to those that were saved; other ranks of the
simulated world, and whoever judges them, go on with theirs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zero_sim.scenario.spec import CheckpointForm
from zero_sim.targets.protocol import Settings

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
    """What the optimizer's groups say, but for learning rates, which have a factor in them.

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
