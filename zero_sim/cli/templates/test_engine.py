"""pytest test_engine.py compares the engine with a single-device reference, bit for bit."""

from engine import MyTarget

from zero_sim.testing import conformance

# 50 drawn cases, always the same. A failure is shrunk to the smallest case that shows it.
test_conformance = conformance(MyTarget(), cases=50)
