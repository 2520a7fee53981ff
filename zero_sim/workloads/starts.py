"""Starts of ranks that do not begin alike, or not with what a checkpoint has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zero_sim.scenario.kinds import is_expert

_FEWEST = 2
_KINDS = 7


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a module by name; live."""
    params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: each for name, each in module.state_dict().items() if name not in params}


def make_unloaded(module: nn.Module) -> None:
    """Overwrite every persistent buffer, as a process that is yet to load a checkpoint has it.

    Args:
        module: The rank's own, as built.
    """
    for tensor in saved_buffers(module).values():
        tensor.fill_(_FEWEST)


def make_distinct(module: nn.Module, *, rank: int, ep: int) -> None:
    """Overwrite every param and buffer of which this rank is not the first holder.

    With numbers that no workload draws for a whole param: a rank that trains on with them is seen.

    Args:
        module: The rank's own, as built.
        rank: Rank in its dp-cp group.
        ep: Number of ranks that the experts are dealt to; each of them is the first holder of its
            share.
    """
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            first_holders = ep if is_expert(name) else 1
            if rank >= first_holders:
                tensor.fill_(_FEWEST + rank % _KINDS)
