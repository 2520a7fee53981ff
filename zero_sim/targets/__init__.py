"""Systems under test behind one small protocol."""

from zero_sim.targets.protocol import (
    CostedEngine,
    Engine,
    OwnedPart,
    PaddedEngine,
    Place,
    StepResult,
    Target,
)
from zero_sim.targets.registry import find_target, target_names

__all__ = [
    "CostedEngine",
    "Engine",
    "OwnedPart",
    "PaddedEngine",
    "Place",
    "StepResult",
    "Target",
    "find_target",
    "target_names",
]
