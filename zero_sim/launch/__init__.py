"""Run a rank program on a backend."""

from zero_sim.launch.real import RankGone, RealRank
from zero_sim.launch.team import Ending, Teams
from zero_sim.launch.worlds import WorldPool

__all__ = ["Ending", "RankGone", "RealRank", "Teams", "WorldPool"]
