"""States of a unit's memory, and the transitions between them.

Every transition has a name and is checked. If a schedule skips a transition, the error names it and
the params:

    gradients  EMPTY -fill-> FILLING -reduce-> REDUCING -finish-> REDUCED -reset-> EMPTY
                                 ^---------------------fill-----------|   (the next micro-batch)
    params     SHARDED -gather-> GATHERING -finish-> WHOLE -use-> IN USE -leave-> WHOLE
                  ^---------------------free-----------|
               SHARDED or WHOLE -update-> UPDATED SHARD -gather-> GATHERING

Resident gradients stay in memory in all states. Resident params are never SHARDED. Between an
update and the gather, their memory has old values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, Literal

from zero_sim.errors import UsageError


class GradState(StrEnum):
    """Contents of a unit's gradient memory."""

    EMPTY = "empty"
    """Nothing from this step."""
    FILLING = "filling"
    """This rank's own gradients that have arrived so far."""
    REDUCING = "reducing"
    """A sum over ranks is in flight."""
    REDUCED = "reduced"
    """This rank's shard is the sum over all training ranks."""


class ParamState(StrEnum):
    """State of a unit's params on this rank."""

    SHARDED = "sharded"
    """Only this rank's shard is in memory."""
    GATHERING = "gathering"
    """A gather in flight fills the unsharded memory."""
    WHOLE = "whole"
    IN_USE = "in use"
    """Unsharded, and read by a running module."""
    UPDATED = "updated shard"
    """This rank's shard is new. In resident memory, other ranks' shards have old values."""


GradStep = Literal["fill", "reduce", "finish", "reset"]
ParamStep = Literal["gather", "finish", "use", "leave", "update", "free"]

# Each step with the states allowed before it, and the state after it.
_GRAD_STEPS: Final[Mapping[GradStep, tuple[tuple[GradState, ...], GradState]]] = {
    "fill": ((GradState.EMPTY, GradState.REDUCED), GradState.FILLING),
    "reduce": ((GradState.FILLING,), GradState.REDUCING),
    "finish": ((GradState.REDUCING,), GradState.REDUCED),
    # Also from FILLING, because a step may be dropped before its reduction.
    "reset": ((GradState.FILLING, GradState.REDUCED), GradState.EMPTY),
}
_PARAM_STEPS: Final[Mapping[ParamStep, tuple[tuple[ParamState, ...], ParamState]]] = {
    # Also from WHOLE, because a rank without elements in a unit does not update it.
    "gather": (
        (ParamState.SHARDED, ParamState.WHOLE, ParamState.UPDATED),
        ParamState.GATHERING,
    ),
    "finish": ((ParamState.GATHERING,), ParamState.WHOLE),
    "use": ((ParamState.WHOLE,), ParamState.IN_USE),
    "leave": ((ParamState.IN_USE,), ParamState.WHOLE),
    "update": ((ParamState.SHARDED, ParamState.WHOLE), ParamState.UPDATED),
    "free": ((ParamState.WHOLE,), ParamState.SHARDED),
}


def next_grad_state(state: GradState, step: GradStep, *, of: Callable[[], str]) -> GradState:
    """Return the gradient state after a step.

    Args:
        state: State before the step.
        step: Name of a transition.
        of: Returns the unit's name, for an error.

    Raises:
        UsageError: If the step is not allowed in that state.
    """
    # `of` is a function, because only an error needs the name, and this runs often.
    allowed, then = _GRAD_STEPS[step]
    if state not in allowed:
        raise _out_of_step(f"gradients of {of()}", state, step, steps=_GRAD_STEPS)
    return then


def next_param_state(state: ParamState, step: ParamStep, *, of: Callable[[], str]) -> ParamState:
    """Return the param state after a step; arguments as `next_grad_state`.

    Raises:
        UsageError: If the step is not allowed in that state.
    """
    allowed, then = _PARAM_STEPS[step]
    if state not in allowed:
        raise _out_of_step(f"params of {of()}", state, step, steps=_PARAM_STEPS)
    return then


def _out_of_step(
    what: str,
    state: GradState | ParamState,
    step: GradStep | ParamStep,
    *,
    steps: Mapping[Any, tuple[tuple[Any, ...], Any]],
) -> UsageError:
    allowed = steps[step][0]
    # A step that leads from the present state to an allowed state is probably missing.
    left_out = [
        repr(other)
        for other, (before, then) in steps.items()
        if state in before and then in allowed
    ]
    why = f"{' or '.join(left_out)} is missing" if left_out else f"{step!r} came twice"
    wanted = " or ".join(map(str.upper, allowed))
    return UsageError(
        f"expected the {what} to be {wanted} for {step!r}, got {state.upper()}: {why}."
    )
