"""Setups for real backends: their cases and orders of addition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from zero_sim.backends.transports import find_transport
from zero_sim.errors import EnvironmentProblem
from zero_sim.findings.records import CaseResult, Finding, not_judged
from zero_sim.reference.division import count_contributions
from zero_sim.run.probing import OrderDrift
from zero_sim.run.real import processes_of
from zero_sim.scenario.checks import Check
from zero_sim.scenario.conditions import why_order_matters
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import (
    Target,
    find_target,
    library_target_names,
    numerics_of,
    reduce_ops_of,
    target_names,
)
from zero_sim.workloads import EXACT_MODELS

RealBackend = Literal["gloo", "nccl"]
WORKERS_MAX = 16
"""Most ranks of a case on own workers, which all share this machine."""
OWN_ORDERS: Mapping[RealBackend, str] = {"gloo": "gloo", "nccl": "nccl-ring"}
"""Modelled order in which each backend adds by itself, with our settings."""

# Without an order, a new backend could judge nothing.
assert set(OWN_ORDERS) == set(get_args(RealBackend))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Backend for all cases, and its settings."""

    backend: RealBackend
    native: bool = False
    """True if the backend adds in its own order, overriding the cases' order. Results that do not
    depend on the order are compared exactly, others with bounds."""
    ranks_max: int = WORKERS_MAX
    """Most ranks of a case."""

    @property
    def device(self) -> str:
        """Device of the ranks."""
        return find_transport(self.backend).device_type

    def why_left_out(self, scenario: Scenario) -> str:
        """Return the reason why a case cannot be judged here; empty if it can."""
        # Only the simulated world counts calls for a planned fault.
        if scenario.faults:
            return "only the simulated world has planned faults"
        if processes_of(scenario) > self.ranks_max:
            return f"more than {self.ranks_max} ranks"
        # The order does not matter for an exact model, nor for bounds.
        is_owed = scenario.model.name in EXACT_MODELS or not scenario.world.order_known
        if self.native and not self.is_own(scenario) and not is_owed:
            return f"the bits depend on an order that is not {self.backend}'s own"
        if self.native and scenario.world.order_known and self._rounds_before_the_sum(scenario):
            return "ranks divide before the sum by no power of two, so bits depend on the order"
        # If ranks fold data themselves, they need no reduce operation from the backend.
        missing = self._missing_ops(scenario) if self.order_of(scenario) is None else ()
        if missing:
            return f"{self.backend} by itself has no {', '.join(missing)}"
        return ""

    def _missing_ops(self, scenario: Scenario) -> tuple[str, ...]:
        target = _registered(scenario)
        if target is None:
            return ()
        lacks = find_transport(self.backend).lacks
        return tuple(op for op in reduce_ops_of(target, scenario) if op in lacks)

    def _rounds_before_the_sum(self, scenario: Scenario) -> bool:
        """Return True if ranks round before the sum, so that even exact models depend on order."""
        target = _registered(scenario)
        if target is None:
            return False
        numerics = numerics_of(target, scenario)
        system = numerics.replayed(scenario, added_in=OWN_ORDERS[self.backend]).system
        # A division after the sum rounds the same sum in every order.
        if system.divide not in ("pre", "premul"):
            return False
        parts = scenario.topology.tp * scenario.topology.pp
        ranks, run = scenario.world.size // parts, scenario.run
        count = count_contributions(
            system.divide_by,
            rank_count=ranks,
            # 3 stands for counts that differ between steps, which are no power of two in some.
            micro_batches=3 if run.own_micro_batches else ranks * run.micro_batches,
            rows=3,
        )
        # Dividing by a power of two is exact.
        return count.bit_count() != 1

    def check(self, scenario: Scenario) -> None:
        """Check that a case can be judged here.

        Raises:
            EnvironmentProblem: The case cannot be judged.
        """
        why = self.why_left_out(scenario)
        if why:
            raise EnvironmentProblem(f"expected a case for backend {self.backend}, got one: {why}.")

    def is_own(self, scenario: Scenario) -> bool:
        """Return True if the case's order is the backend's own."""
        return scenario.world.order == OWN_ORDERS[self.backend]

    def relies_on_own(self, scenario: Scenario) -> bool:
        """Return True if a case's bits depend on the backend's own order."""
        # Two addends have only one order, and bounds hold for every order.
        return (
            processes_of(scenario) > 2
            and scenario.world.order_known
            and self.is_own(scenario)
            and scenario.model.name not in EXACT_MODELS
        )

    def order_of(self, scenario: Scenario) -> str | None:
        """Return the order in which ranks fold data; None if the backend adds."""
        return None if self.native or self.is_own(scenario) else scenario.world.order

    def note(self, scenario: Scenario) -> str:
        """Return a note on the order, and on who adds: the backend or the ranks."""
        order = scenario.world.order
        if self.order_of(scenario) is None and not scenario.world.order_known:
            return f"{self.backend} added in its own order, unknown to the judge"
        if self.is_own(scenario):
            return f"{self.backend} added in its own order, modelled as {order}"
        if self.native:
            return f"{self.backend} added in its own order, the oracle in order {order}"
        return f"{self.backend} moved the data, and every rank added it in order {order}"


def own_setup(backend: RealBackend, *, native: bool = False) -> Setup:
    """Return the setup for own workers on this machine.

    Raises:
        EnvironmentProblem: This machine has no such backend.
    """
    transport = find_transport(backend)
    transport.check()
    ranks_max = min(transport.processes_max or WORKERS_MAX, WORKERS_MAX)
    return Setup(backend=backend, native=native, ranks_max=ranks_max)


def _registered(scenario: Scenario) -> Target | None:
    name = scenario.system.target
    is_known = name in (*target_names(), *library_target_names())
    return find_target(name) if is_known else None


def judge_drifted(
    drift: OrderDrift, scenario: Scenario, setup: Setup, *, judge: Callable[[Scenario], CaseResult]
) -> CaseResult:
    """Judge a case by bounds, because the backend does not add as modelled."""
    why = why_order_matters(scenario)
    if why:
        # Bounds cannot judge this case, so report the drift alone.
        return _drifted(scenario, setup, str(drift), why=why)
    world = replace(scenario.world, order_known=False)
    result = judge(replace(scenario, world=world))
    note = (
        f"backend.order-drift: {setup.backend} does not add in the modelled order "
        f"{scenario.world.order!r}, so sums were judged by their proven bounds; "
        f"{'; '.join(drift.drifts)}"
    )
    return replace(result, notes=(*result.notes, note))


def _drifted(scenario: Scenario, setup: Setup, drift: str, *, why: str) -> CaseResult:
    """Return the result if neither the modelled order nor bounds can judge a case."""
    finding = Finding(
        check=Check.BACKEND_ORDER_DRIFT,
        message=f"{setup.backend} does not add in the modelled order {scenario.world.order!r}, so "
        f"the bits of this case are unknown, and with {why} it cannot be judged by bounds either; "
        "the system under test was not judged. Try --native with an exact model, or another "
        "world.order, which is folded",
        detail=drift,
    )
    error = f"{setup.backend} adds in an order of its own that is not {scenario.world.order!r}"
    return not_judged(scenario.name, error, finding)
