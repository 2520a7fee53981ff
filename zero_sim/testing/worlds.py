"""Hypothesis strategies for settings of a world, so that a schedule shrinks with its case.

`zero_sim.sim` does not import this module, because Hypothesis is only needed by tests.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from zero_sim.sim.inflight.late import TIMINGS
from zero_sim.sim.schedule import Choices


def schedules(*, picks_max: int = 64, ready_max: int = 8) -> st.SearchStrategy[Choices]:
    """Draw schedules whose first picks are free; they shrink to few and small choices.

    Args:
        picks_max: Largest number of picks that may differ from the first ready rank.
        ready_max: Largest number of ranks at a pick; the world size is enough.
    """
    numbers = st.lists(st.integers(0, ready_max - 1), max_size=picks_max)
    return numbers.map(lambda choices: Choices(tuple(choices)))


def world_settings(*, picks_max: int = 64, ready_max: int = 8) -> st.SearchStrategy[dict[str, Any]]:
    """Draw schedule, timing and seed for `World.configure`; they shrink to eager timing.

    Args:
        picks_max: As for `schedules`.
        ready_max: As for `schedules`.
    """
    return st.fixed_dictionaries(
        {
            "schedule": schedules(picks_max=picks_max, ready_max=ready_max),
            "timing": st.sampled_from(TIMINGS),
            "seed": st.integers(0, 2**16 - 1),
        }
    )
