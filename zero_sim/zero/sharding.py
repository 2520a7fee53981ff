"""Sharding: what of a model's memory each rank keeps a part of, ZeRO's stages as rows of a table.

Source: ZeRO (arXiv 1910.02054), section 5: P_os, P_os+g and P_os+g+p. Stage 0 is plain data
parallelism: every rank is a shard group of its own, and all of them hold copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Which memory is cut over the ranks of a shard group; the rest is whole on each of them."""

    state: bool
    """fp32 masters and the optimizer's state."""
    grads: bool
    """Gradients: whole ones live only from a unit's first gradient until it is reduced."""
    params: bool
    """Working params: whole ones live only while a forward or backward uses their unit."""


_TABLE: dict[Stage, Sharding] = {
    0: Sharding(state=False, grads=False, params=False),
    1: Sharding(state=True, grads=False, params=False),
    2: Sharding(state=True, grads=True, params=False),
    3: Sharding(state=True, grads=True, params=True),
}


def sharding_of(stage: Stage) -> Sharding:
    """Return the row of a stage; nothing else knows what a stage is."""
    return _TABLE[stage]
