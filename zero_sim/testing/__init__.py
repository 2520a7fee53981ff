"""For test suites of other people: judge an optimizer of your own in ten lines."""

from zero_sim.fuzz.drawing import scenarios_for
from zero_sim.testing.conformance import NotConformant, conformance

__all__ = ["NotConformant", "conformance", "scenarios_for"]
