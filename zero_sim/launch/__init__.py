"""Run a rank program on a backend."""

from zero_sim.launch.worlds import WorldPool

__all__ = ["WorldPool"]
