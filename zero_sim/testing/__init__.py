"""For test suites of other people: judge an optimizer of your own in ten lines."""

from zero_sim.fuzz.strategies import scenarios
from zero_sim.testing.conformance import NotConformant, conformance
from zero_sim.testing.schedules import Exploration, ExploredFailure, explore

__all__ = [
    "Exploration",
    "ExploredFailure",
    "NotConformant",
    "conformance",
    "explore",
    "scenarios",
]
