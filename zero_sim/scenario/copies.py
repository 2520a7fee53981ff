"""Copies of what a case shards: how many there are."""

from __future__ import annotations

from zero_sim.scenario.spec import SystemSpec


def state_copies(system: SystemSpec) -> int:
    """Copies of the optimizer state, of stages that shard it: one a block, or one in all."""
    return 1 if system.state_over == "all" else system.redundancy
