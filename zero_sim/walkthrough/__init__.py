"""Walkthroughs: ZeRO and its collectives step by step, with values from real runs.

`prose.toml` contains their texts.
"""

from __future__ import annotations

from zero_sim.walkthrough.lifecycle import walk_lifecycle
from zero_sim.walkthrough.ring import walk_ring
from zero_sim.walkthrough.step import walk_step
from zero_sim.walkthrough.zero1 import walk_zero1

__all__ = ["walk_lifecycle", "walk_ring", "walk_step", "walk_zero1"]
