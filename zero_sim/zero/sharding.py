"""Sharding: the memory that is split over ranks, with ZeRO's stages as rows of a table.

Source: ZeRO (arXiv 1910.02054), section 5: P_os, P_os+g and P_os+g+p. Stage 0 is plain data
parallelism: every rank is its own shard group, and all ranks are replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """The memory that is split over the ranks of a shard group; the rest is whole on each rank."""

    state: bool
    """fp32 masters and the optimizer's state."""
    grads: bool
    """Gradients: unsharded ones exist only from a unit's first gradient to its reduction."""
    params: bool
    """Working params: unsharded ones exist only while a forward or backward uses their unit."""


# The only place that knows stage numbers; all other code reads the three booleans.
# Rows 1 to 3 are P_os, P_os+g and P_os+g+p of the paper.
_TABLE: dict[Stage, Sharding] = {
    0: Sharding(state=False, grads=False, params=False),
    1: Sharding(state=True, grads=False, params=False),
    2: Sharding(state=True, grads=True, params=False),
    3: Sharding(state=True, grads=True, params=True),
}


def sharding_of(stage: Stage) -> Sharding:
    """Return the sharding of a stage."""
    return _TABLE[stage]
