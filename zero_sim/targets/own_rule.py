"""Update rules that a target gives to the reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed import distributed_c10d as c10d

from zero_sim.errors import ProtocolError
from zero_sim.reference import OwnRule, Rules
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.answers import shown
from zero_sim.targets.declared import OWN_RULES, numerics_of
from zero_sim.targets.protocol import Target

_ARGUMENTS = {
    "reference_step": ("param", "grad", "state", "settings"),
    "reference_optimizer": ("named_params", "scenario"),
    "reference_state": ("optimizer", "named_params"),
}


def rules_of(target: Target, scenario: Scenario, *, added_in: str | None = None) -> Rules:
    """Return the rules with which the reference replays a target's case.

    `added_in` is the order in which the backend adds; None for the case's order.

    Raises:
        ProtocolError: A declaration has another type.
    """
    numerics = numerics_of(target, scenario)
    rules = numerics.rules(scenario, added_in=added_in)
    own = None
    if scenario.optimizer.name == "own":
        own = own_rule_of(target, scenario, elementwise=numerics.elementwise)
    # A case in a pair takes its steps from the run in the other layout: see `recorded`.
    if (rule := getattr(target, "layout_rule", None)) is not None:
        own = rule(scenario) or own
    return replace(rules, own=own)


def own_rule_of(target: Target, scenario: Scenario, *, elementwise: bool = False) -> OwnRule | None:
    """Return a target's update rule; None if it has none.

    Raises:
        ProtocolError: The target has two rules, or its rule takes other arguments.
    """
    found = [name for name in OWN_RULES if getattr(target, name, None) is not None]
    if not found:
        return None
    if len(found) == 2:
        raise ProtocolError(
            f"expected {' or '.join(OWN_RULES)} of target {target.name!r}, got both. Remove one."
        )
    # Reports name the rule, because nothing checks it.
    name, of = found[0], f"{found[0]} of target {target.name!r}"
    rule = _callable(target, name)
    read = getattr(target, "reference_state", None)
    return OwnRule(
        name=of,
        scenario=scenario,
        step=rule if name == "reference_step" else None,
        build=rule if name == "reference_optimizer" else None,
        read_state=None if read is None else _callable(target, "reference_state"),
        elementwise=elementwise,
        alone=no_process_group,
    )


@contextmanager
def no_process_group() -> Generator[None]:
    """Hide every process group; `torch.distributed.is_initialized()` returns False within."""
    # This affects the whole process. It is safe for ranks in threads, because only one thread runs
    # at a time, and the code within never passes the baton.
    world = c10d._world
    c10d._world = c10d._World()
    try:
        yield
    finally:
        c10d._world = world


def _callable(target: Target, name: str) -> Callable[..., Any]:
    rule, arguments = getattr(target, name), _ARGUMENTS[name]
    words = f"a function {name}({', '.join(arguments)})"
    if not callable(rule):
        raise ProtocolError(
            f"expected {name!r} of target {target.name!r} to be {words}, got {shown(rule)}."
        )
    # Bind by position, so users may choose argument names.
    try:
        inspect.signature(rule).bind(*arguments)
    except TypeError as error:
        raise ProtocolError(
            f"expected {name!r} of target {target.name!r} to be {words}, got a function "
            f"with {inspect.signature(rule)}: {error}."
        ) from None
    except ValueError:
        pass  # Not written in Python. A wrong call raises later.
    return rule
