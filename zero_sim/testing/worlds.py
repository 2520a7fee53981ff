"""Hypothesis strategies for how a world runs, so that a schedule shrinks with the case it broke.

Not imported by `zero_sim.sim`: Hypothesis is for tests.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from zero_sim.sim.inflight.late import TIMINGS
from zero_sim.sim.schedule import Choices


def schedules(*, picks_max: int = 64, ready_max: int = 8) -> st.SearchStrategy[Choices]:
    """Any schedule whose first picks are free; it shrinks to few choices, small ones, all first.

    Args:
        picks_max: How many picks may differ from the first ready rank.
        ready_max: Up to how many ranks a pick may choose among; the number of ranks is enough.
    """
    numbers = st.lists(st.integers(0, ready_max - 1), max_size=picks_max)
    return numbers.map(lambda choices: Choices(tuple(choices)))


def world_settings(*, picks_max: int = 64, ready_max: int = 8) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments of `World.configure`: schedule, timing and seed; they shrink to eager.

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
