"""The simulated cluster: N ranks of unmodified torch.distributed code in one process."""

from zero_sim.sim.failures import (
    Access,
    ContractViolation,
    DataRace,
    Deadlock,
    InFlightRace,
    RankFailed,
    RankStalled,
    RankStatus,
    ScheduleDiverged,
    WorldFailure,
)
from zero_sim.sim.faults import Fault, InjectedCrash
from zero_sim.sim.in_flight_buffers import InFlightBuffer, InFlightBuffers
from zero_sim.sim.inflight.races import unwatched
from zero_sim.sim.log import CollectiveRecord, EventLog, FaultRecord, Moment
from zero_sim.sim.schedule import Choices, Replay
from zero_sim.sim.world.world import World

__all__ = [
    "Access",
    "Choices",
    "CollectiveRecord",
    "ContractViolation",
    "DataRace",
    "Deadlock",
    "EventLog",
    "Fault",
    "FaultRecord",
    "InFlightBuffer",
    "InFlightBuffers",
    "InFlightRace",
    "InjectedCrash",
    "Moment",
    "RankFailed",
    "RankStalled",
    "RankStatus",
    "Replay",
    "ScheduleDiverged",
    "World",
    "WorldFailure",
    "unwatched",
]
