"""Starts of ranks that do not begin alike."""

from __future__ import annotations

import torch
from torch import nn

from zero_sim.scenario.kinds import is_expert

_FEWEST = 2
_KINDS = 7


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
