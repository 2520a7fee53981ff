"""Distributed checkpoints, as in torch's documentation: `get_state_dict` and `save`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer


def save(module: nn.Module, optimizer: Optimizer, path: Path) -> None:
    """Save params and optimizer state. Every rank in the world must call it."""
    # A late import, because most cases have no checkpoints.
    from torch.distributed import checkpoint

    checkpoint.save(_state_of(module, optimizer), checkpoint_id=str(path))


def load(module: nn.Module, optimizer: Optimizer, path: Path) -> None:
    """Load params and optimizer state for these ranks. Every rank in the world must call it."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    # `checkpoint.load` fills this state's tensors in place, so all of them must exist.
    state = _state_of(module, optimizer)
    checkpoint.load(state, checkpoint_id=str(path))
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def _state_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    # Keyed by param name, not by index, so ranks with other shards can load it.
    model_state, optimizer_state = get_state_dict(module, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
