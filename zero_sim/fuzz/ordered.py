"""Capabilities of a target in a certain summation order, or in an unknown order."""

from __future__ import annotations

from dataclasses import replace

from zero_sim.errors import UsageError
from zero_sim.scenario.conditions import UNBOUNDED_MODELS
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.targets import UNKNOWN, Capabilities

# Settings that cases with an unknown order cannot have; see `why_order_matters`.
_NEEDS_ORDER = ("reload", "reload.async_steps", "topology.tp", "topology.pp")


def within_order(able: Capabilities, order: str | None) -> Capabilities:
    """Return a target's capabilities in a certain order.

    Args:
        able: The target's capabilities.
        order: Name of the order, or `unknown`; None for all declared orders.

    Raises:
        UsageError: The target does not declare this order.
    """
    if order not in (None, UNKNOWN, *able.known_orders):
        names = ", ".join((*able.known_orders, UNKNOWN))
        raise UsageError(f"expected --order to be one of {names}, got {order!r}.")
    if order != UNKNOWN and (order or able.orders != (UNKNOWN,)):
        return able if order is None else replace(able, orders=(order,))  # pyrefly: ignore
    return replace(
        able,
        orders=(UNKNOWN,),
        models=tuple(name for name in able.models if name not in (*UNBOUNDED_MODELS, "tp-block")),
        optimizers=tuple(name for name in able.optimizers if name not in WHOLE_PARAM_OPTIMIZERS),
        follows=tuple(path for path in able.follows if path not in _NEEDS_ORDER),
    )
