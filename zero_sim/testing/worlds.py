"""Hypothesis strategies for world settings, so that a schedule shrinks with its case."""

from __future__ import annotations

from typing import Any

# Here and not in `zero_sim.sim`, because only tests need Hypothesis.
from hypothesis import strategies as st

from zero_sim.sim.inflight.late import TIMINGS
from zero_sim.sim.schedule import Choices


def schedules(*, picks_max: int = 64, ready_max: int = 8) -> st.SearchStrategy[Choices]:
    """Draw schedules, which shrink to few picks of other ranks than the first ready rank.

    Args:
        picks_max: Number of first picks that may take another rank than the first ready rank.
        ready_max: Most ranks to choose from at a pick; the world size is enough.
    """
    # 0 is the first ready rank, and integers shrink to 0.
    numbers = st.lists(st.integers(0, ready_max - 1), max_size=picks_max)
    return numbers.map(lambda choices: Choices(tuple(choices)))


def world_settings(*, picks_max: int = 64, ready_max: int = 8) -> st.SearchStrategy[dict[str, Any]]:
    """Draw schedule, timing and seed for `World.configure`; arguments as for `schedules`."""
    return st.fixed_dictionaries(
        {
            "schedule": schedules(picks_max=picks_max, ready_max=ready_max),
            # Shrinks to the first entry, which is eager.
            "timing": st.sampled_from(TIMINGS),
            "seed": st.integers(0, 2**16 - 1),
        }
    )
