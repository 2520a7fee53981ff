"""Check ids: reports print them, scenarios expect them, `zero-sim explain` explains them."""

from __future__ import annotations

from enum import StrEnum


class Check(StrEnum):
    """All check ids; the part before the dot is the area."""

    # Values that differ from the reference.
    EQUALITY_LOAD = "equality.load"
    EQUALITY_LOSS = "equality.loss"
    EQUALITY_GRAD = "equality.grad"
    EQUALITY_NORM = "equality.norm"
    EQUALITY_ZEROS = "equality.zeros"
    EQUALITY_SKIPPED = "equality.skipped"
    EQUALITY_LOSS_SCALE = "equality.loss-scale"
    EQUALITY_MASTER = "equality.master"
    EQUALITY_STATE = "equality.state"
    EQUALITY_LAYOUT = "equality.layout"
    EQUALITY_PARAMS = "equality.params"
    EQUALITY_SCALE = "equality.scale"
    # Properties other than values: ownership, padding, casts, calls, memory, hooks.
    INVARIANT_OWNERSHIP = "invariant.ownership"
    INVARIANT_ZERO_GRADIENTS = "invariant.zero-gradients"
    INVARIANT_PADDING = "invariant.padding"
    INVARIANT_CAST = "invariant.cast"
    INVARIANT_START = "invariant.start"
    INVARIANT_REPLICAS = "invariant.replicas"
    INVARIANT_OVERLAP = "invariant.overlap"
    INVARIANT_VOLUME = "invariant.volume"
    INVARIANT_MEMORY = "invariant.memory"
    INVARIANT_CROSSING = "invariant.crossing"
    INVARIANT_ONE_DEVICE = "invariant.one-device"
    INVARIANT_GIVEN_BACK = "invariant.given-back"
    # Failed worlds and ranks.
    WORLD_CONTRACT = "world.contract"
    WORLD_DEADLOCK = "world.deadlock"
    WORLD_RACE = "world.race"
    WORLD_IN_FLIGHT_RACE = "world.in-flight-race"
    WORLD_STALLED_BY_PLAN = "world.stalled-by-plan"
    WORLD_RANK_FAILED = "world.rank-failed"
    WORLD_STALLED = "world.stalled"
    WORLD_FAILED = "world.failed"
    WORLD_RANK_DIED = "world.rank-died"
    WORLD_HUNG = "world.hung"
    # A real backend that does not add in its modelled order.
    BACKEND_ORDER_DRIFT = "backend.order-drift"
    # Expectations in the scenario's `expect`.
    EXPECT_ACCURACY = "expect.accuracy"
    EXPECT_FINDING = "expect.finding"
    # Passes that prove nothing, so the verdict is not a pass.
    GUARD_SAME_DATA = "guard.same-data"
    GUARD_ZERO_GRADIENTS = "guard.zero-gradients"
    GUARD_WIDE_BOUNDS = "guard.wide-bounds"
    GUARD_NOT_FOLLOWED = "guard.not-followed"
    GUARD_NOTHING_STEPPED = "guard.nothing-stepped"
    GUARD_NOT_ORDER_FREE = "guard.not-order-free"
    GUARD_NORM_NOT_CERTIFIED = "guard.norm-not-certified"
    GUARD_FAULT_UNNOTICED = "guard.fault-unnoticed"
    GUARD_FAULT_NOT_REACHED = "guard.fault-not-reached"
    # Failures of zero_sim itself, not of the system.
    INTERNAL_JUDGE = "internal.judge"
    INTERNAL_ERROR = "internal.error"
    INTERNAL_PROCESS_DIED = "internal.process-died"

    @property
    def area(self) -> str:
        """The check's area, such as `equality`, which a scenario may also expect."""
        return self.partition(".")[0]
