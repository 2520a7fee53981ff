"""Sharding: the memory that is split over ranks, with ZeRO's stages as a table.

Source: ZeRO (arXiv 1910.02054), section 5. Stage 0 is plain data parallelism: every rank is a shard
group of its own, and all ranks are replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """True for memory that is split over a shard group; the rest is whole on each rank."""

    state: bool
    """fp32 masters and optimizer state."""
    grads: bool
    """Gradients. They are unsharded only from a unit's first gradient to its reduction."""
    params: bool
    """Working params. They are unsharded only while a forward or backward uses their unit."""


# Engine code reads these booleans, not stage numbers. Rows 1 to 3 are the paper's P_os, P_os+g
# and P_os+g+p.
_TABLE: dict[Stage, Sharding] = {
    0: Sharding(state=False, grads=False, params=False),
    1: Sharding(state=True, grads=False, params=False),
    2: Sharding(state=True, grads=True, params=False),
    3: Sharding(state=True, grads=True, params=True),
}


def sharding_of(stage: Stage) -> Sharding:
    """Return the sharding at a stage."""
    return _TABLE[stage]
