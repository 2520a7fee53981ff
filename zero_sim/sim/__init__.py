"""The simulated cluster: N ranks of unmodified torch.distributed code in one process."""

from zero_sim.sim.failures import (
    ContractViolation,
    Deadlock,
    InFlightRace,
    RankFailed,
    RankStalled,
    RankStatus,
    ScheduleDiverged,
    WorldFailure,
)
from zero_sim.sim.flight import Flight, Flights
from zero_sim.sim.log import CollectiveRecord, EventLog, Moment
from zero_sim.sim.schedule import Choices, Replay
from zero_sim.sim.world import World

__all__ = [
    "Choices",
    "CollectiveRecord",
    "ContractViolation",
    "Deadlock",
    "EventLog",
    "Flight",
    "Flights",
    "InFlightRace",
    "Moment",
    "RankFailed",
    "RankStalled",
    "RankStatus",
    "Replay",
    "ScheduleDiverged",
    "World",
    "WorldFailure",
]
