"""Run a rank program on a backend."""

from zero_sim.launch.memory import settle_memory
from zero_sim.launch.real import RankGone, RealRank
from zero_sim.launch.stop import Stop, interrupts_ask
from zero_sim.launch.team import Ending, Teams
from zero_sim.launch.worlds import WorldPool

__all__ = [
    "Ending",
    "RankGone",
    "RealRank",
    "Stop",
    "Teams",
    "WorldPool",
    "interrupts_ask",
    "settle_memory",
]
