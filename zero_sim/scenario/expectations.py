"""Rules about what is planned to go wrong in a case, and what is to be found then."""

from __future__ import annotations

from collections.abc import Iterator

from zero_sim.errors import Problem
from zero_sim.scenario.checks import Check
from zero_sim.scenario.fields import describe_value
from zero_sim.scenario.spec import FaultSpec, Scenario
from zero_sim.scenario.suggest import closest


def check_faults(scenario: Scenario) -> Iterator[Problem]:
    """Check the faults of a plan one by one."""
    for index, fault in enumerate(scenario.faults):
        path = f"faults[{index}]"
        yield from _check_rank(path, fault, world_size=scenario.world.size)
        yield from _check_call(path, fault)
        yield from _check_place(path, fault)


def _check_rank(path: str, fault: FaultSpec, *, world_size: int) -> Iterator[Problem]:
    # A count below 1 is reported as such; every index would be wrong with it.
    if world_size >= 1 and not 0 <= fault.rank < world_size:
        yield Problem(
            path=f"{path}.rank",
            message=f"expected an integer at least 0 and less than world.size = {world_size}, "
            f"got {describe_value(fault.rank)}.",
            suggestion=f"Try {world_size - 1 if fault.rank > 0 else 0}; ranks count from 0.",
        )


def _check_call(path: str, fault: FaultSpec) -> Iterator[Problem]:
    if fault.kind == "slow":
        said = (("call", fault.call != 0), ("at", fault.at != "call"))
        given = [*said, ("call_stop", fault.call_stop), ("collective", fault.collective)]
        for name, is_given in given:
            if is_given:
                yield Problem(
                    path=f"{path}.{name}",
                    message="a slow rank is slow in the whole run, got "
                    f"{describe_value(getattr(fault, name))}.",
                    suggestion="Leave it out.",
                )
        return
    if fault.at == "call" and fault.call_stop is not None:
        yield Problem(
            path=f"{path}.call_stop",
            message="only a call that is drawn has a range, got "
            f"{describe_value(fault.call_stop)}.",
            suggestion='Leave it out, or write at = "random".',
        )
    elif fault.at == "random" and (fault.call_stop is None or fault.call_stop <= fault.call):
        got = "nothing" if fault.call_stop is None else describe_value(fault.call_stop)
        yield Problem(
            path=f"{path}.call_stop",
            message=f"expected an integer more than call = {fault.call} to draw below, got {got}.",
            suggestion=f"Try {max(fault.call, 0) + 10}.",
        )


def _check_place(path: str, fault: FaultSpec) -> Iterator[Problem]:
    if fault.kind != "corrupt":
        for name, default in (("side", "send"), ("element", None), ("bit", None)):
            value = getattr(fault, name)
            if value != default:
                yield Problem(
                    path=f"{path}.{name}",
                    message=f"only 'corrupt' has one, got {describe_value(value)} "
                    f"with kind '{fault.kind}'.",
                    suggestion='Leave it out, or write kind = "corrupt".',
                )
        return


def check_finding(scenario: Scenario) -> Iterator[Problem]:
    """Check that what is to be found is a check that there is, or an area of them."""
    wanted = scenario.expect.finding
    known = (*Check, *dict.fromkeys(check.area for check in Check))
    if wanted is not None and wanted not in known:
        near = closest(wanted, known)
        yield Problem(
            path="expect.finding",
            message=f"expected a check or an area of checks, one of {', '.join(known)}; "
            f"got {describe_value(wanted)}.",
            suggestion=f"Did you mean '{near}'?" if near else "Try 'equality.grad', or 'equality'.",
        )
