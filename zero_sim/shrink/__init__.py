"""Shrinking of failing cases: case sizes, smaller candidates, and the search."""

from zero_sim.shrink.keys import (
    BEYOND_VALUES,
    Key,
    how_far_apart,
    key_of,
    may_become,
    may_shrink,
    places_of,
)
from zero_sim.shrink.reduce import Limits, Reduced, Stopped, shrink
from zero_sim.shrink.same import right_judge, shrink_finding
from zero_sim.shrink.size import Size, settings_of, size_of

__all__ = [
    "BEYOND_VALUES",
    "Key",
    "Limits",
    "Reduced",
    "Size",
    "Stopped",
    "how_far_apart",
    "key_of",
    "may_become",
    "may_shrink",
    "places_of",
    "right_judge",
    "settings_of",
    "shrink",
    "shrink_finding",
    "size_of",
]
