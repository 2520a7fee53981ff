"""Making a failing case as small as it goes: what small means, what is tried, and the search."""

from zero_sim.shrink.reduce import Limits, Reduced, Stopped, shrink
from zero_sim.shrink.same import Key, key_of, may_shrink, shrink_finding
from zero_sim.shrink.size import Size, size_of

__all__ = [
    "Key",
    "Limits",
    "Reduced",
    "Size",
    "Stopped",
    "key_of",
    "may_shrink",
    "shrink",
    "shrink_finding",
    "size_of",
]
