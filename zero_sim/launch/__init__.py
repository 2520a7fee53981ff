"""Run a rank program on a backend."""

from zero_sim.launch.real import RealRank
from zero_sim.launch.team import Ending, Teams
from zero_sim.launch.worlds import WorldPool

__all__ = ["Ending", "RealRank", "Teams", "WorldPool"]
