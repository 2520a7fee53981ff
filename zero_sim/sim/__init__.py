"""The simulated cluster: N ranks of unmodified torch.distributed code in one process."""

from zero_sim.sim.failures import (
    Access,
    ContractViolation,
    DataRace,
    Deadlock,
    RankFailed,
    RankStalled,
    RankStatus,
    WorldFailure,
)
from zero_sim.sim.log import CollectiveRecord, EventLog
from zero_sim.sim.races import unwatched
from zero_sim.sim.world import World

__all__ = [
    "Access",
    "CollectiveRecord",
    "ContractViolation",
    "DataRace",
    "Deadlock",
    "EventLog",
    "RankFailed",
    "RankStalled",
    "RankStatus",
    "World",
    "WorldFailure",
    "unwatched",
]
