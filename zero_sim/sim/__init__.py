"""The simulated cluster: N ranks of unmodified torch.distributed code in one process."""

from zero_sim.sim.failures import (
    ContractViolation,
    Deadlock,
    RankFailed,
    RankStalled,
    RankStatus,
    WorldFailure,
)
from zero_sim.sim.log import CollectiveRecord, EventLog, Moment
from zero_sim.sim.schedule import Replay
from zero_sim.sim.world import World

__all__ = [
    "CollectiveRecord",
    "ContractViolation",
    "Deadlock",
    "EventLog",
    "Moment",
    "RankFailed",
    "RankStalled",
    "RankStatus",
    "Replay",
    "World",
    "WorldFailure",
]
