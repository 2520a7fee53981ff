"""Initial values for ranks that start differently, or before they load a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zero_sim.scenario.kinds import is_expert

# Fill values from 2 to 8; no workload draws such values for a whole param.
_FEWEST = 2
_KINDS = 7


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's persistent buffers by name; live."""
    # With duplicates, because state_dict() contains both names of a tied param.
    params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    # state_dict() omits buffers that are not persistent.
    return {name: each for name, each in module.state_dict().items() if name not in params}


def make_unloaded(module: nn.Module) -> None:
    """Overwrite every persistent buffer, as in a process before it loads a checkpoint."""
    for tensor in saved_buffers(module).values():
        tensor.fill_(_FEWEST)


def make_distinct(module: nn.Module, *, rank: int, ep: int) -> None:
    """Overwrite each param and buffer, unless this rank is the first that has it.

    A rank that trains with these values is noticed.

    Args:
        module: The rank's module, as built.
        rank: Rank in its dp-cp group.
        ep: Number of ranks that share the experts. Each is the first with its own experts.
    """
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            # Experts repeat every `ep` ranks.
            first_holders = ep if is_expert(name) else 1
            if rank >= first_holders:
                tensor.fill_(_FEWEST + rank % _KINDS)
