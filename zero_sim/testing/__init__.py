"""Tools for your test suite: judge an optimizer in ten lines, and explore schedules."""

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
