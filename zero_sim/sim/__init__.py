"""The simulated cluster: N ranks of unmodified torch.distributed code in one process."""

from zero_sim.sim.failures import (
    ContractViolation,
    Deadlock,
    RankFailed,
    RankStalled,
    RankStatus,
    WorldFailure,
)
from zero_sim.sim.faults import Fault, InjectedCrash
from zero_sim.sim.log import CollectiveRecord, EventLog, FaultRecord
from zero_sim.sim.world import World

__all__ = [
    "CollectiveRecord",
    "ContractViolation",
    "Deadlock",
    "EventLog",
    "Fault",
    "FaultRecord",
    "InjectedCrash",
    "RankFailed",
    "RankStalled",
    "RankStatus",
    "World",
    "WorldFailure",
]
