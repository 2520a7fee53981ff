"""Run a rank program on a backend."""

from zero_sim.backends.real import RankGone, RealRank
from zero_sim.backends.stop import Stop, interrupts_ask
from zero_sim.backends.team import Ending, Teams
from zero_sim.backends.worlds import WorldPool

__all__ = [
    "Ending",
    "RankGone",
    "RealRank",
    "Stop",
    "Teams",
    "WorldPool",
    "interrupts_ask",
]
