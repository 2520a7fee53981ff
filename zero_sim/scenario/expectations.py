"""Rules about what is planned to go wrong in a case, and what is to be found then."""

from __future__ import annotations

import re
from collections.abc import Iterator

from zero_sim.errors import Problem
from zero_sim.scenario.fields import describe_value
from zero_sim.scenario.spec import FaultSpec, Scenario

_BITS_MAX = 64
_CHECK = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+(-[a-z0-9]+)*)?")


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
    if fault.call < 0:
        yield Problem(
            path=f"{path}.call",
            message=f"expected an integer at least 0, got {describe_value(fault.call)}.",
            suggestion="Try 0; calls count from 0.",
        )
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
    if fault.element is not None and fault.element < 0:
        yield Problem(
            path=f"{path}.element",
            message=f"expected an integer at least 0, got {describe_value(fault.element)}.",
            suggestion="Leave it out to draw one.",
        )
    if fault.bit is not None and not 0 <= fault.bit < _BITS_MAX:
        yield Problem(
            path=f"{path}.bit",
            message=f"expected an integer at least 0 and less than {_BITS_MAX}, "
            f"got {describe_value(fault.bit)}.",
            suggestion="Leave it out to draw one.",
        )


def check_finding(scenario: Scenario) -> Iterator[Problem]:
    """Check that what is to be found is written as checks are named."""
    wanted = scenario.expect.finding
    if wanted is not None and not _CHECK.fullmatch(wanted):
        yield Problem(
            path="expect.finding",
            message="expected the name of a check, as reports show it, or of its family, "
            f"got {describe_value(wanted)}.",
            suggestion="Try 'equality.grad', or 'equality'.",
        )
