"""States of a unit's memory, and the steps between them.

Every transition has a name and is checked, so a schedule that leaves one out is told which, and for
which params:

    gradients  EMPTY -fill-> FILLING -reduce-> REDUCING -finish-> REDUCED -reset-> EMPTY
                                 ^---------------------fill-----------|   (the next micro-batch)
    params     SHARDED -gather-> GATHERING -finish-> WHOLE -use-> IN USE -leave-> WHOLE
                  ^---------------------free-----------|
               SHARDED or WHOLE -update-> UPDATED SHARD -gather-> GATHERING

Where gradients are not sharded, their memory is kept through all of its states. Where params are
not sharded they are never SHARDED, and between an update and a gather whole params are old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, Literal

from zero_sim.errors import UsageError


class GradState(StrEnum):
    """What the memory of a unit's gradients holds."""

    EMPTY = "empty"
    """Nothing of this step."""
    FILLING = "filling"
    """This rank's own gradients, as far as they came."""
    REDUCING = "reducing"
    """A sum over ranks is in flight."""
    REDUCED = "reduced"
    """This rank's shard is the sum over all ranks that train."""


class ParamState(StrEnum):
    """What of a unit's params is in this rank's memory."""

    SHARDED = "sharded"
    """This rank's shard alone."""
    GATHERING = "gathering"
    """Whole memory that a gather in flight fills."""
    WHOLE = "whole"
    IN_USE = "in use"
    """Whole, and read by a module that runs."""
    UPDATED = "updated shard"
    """This rank's shard is new; whole memory, if it stays, has old values of the others."""


GradStep = Literal["fill", "reduce", "finish", "reset"]
ParamStep = Literal["gather", "finish", "use", "leave", "update", "free"]

_GRAD_STEPS: Final[Mapping[GradStep, tuple[tuple[GradState, ...], GradState]]] = {
    "fill": ((GradState.EMPTY, GradState.REDUCED), GradState.FILLING),
    "reduce": ((GradState.FILLING,), GradState.REDUCING),
    "finish": ((GradState.REDUCING,), GradState.REDUCED),
    "reset": ((GradState.FILLING, GradState.REDUCED), GradState.EMPTY),
}
_PARAM_STEPS: Final[Mapping[ParamStep, tuple[tuple[ParamState, ...], ParamState]]] = {
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
"""Each step with the states before it, and the state after it."""


def next_grad_state(state: GradState, step: GradStep, *, of: Callable[[], str]) -> GradState:
    """Return the state of a unit's gradients after a step.

    Args:
        state: Their state before it.
        step: Name of a transition.
        of: Names the unit, if there is an error.

    Raises:
        UsageError: If the step may not be taken in that state.
    """
    allowed, then = _GRAD_STEPS[step]
    if state not in allowed:
        raise _out_of_step(f"gradients of {of()}", state, step, steps=_GRAD_STEPS)
    return then


def next_param_state(state: ParamState, step: ParamStep, *, of: Callable[[], str]) -> ParamState:
    """Return the state of a unit's params after a step; arguments as `next_grad_state`.

    Raises:
        UsageError: If the step may not be taken in that state.
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
    left_out = [
        repr(other)
        for other, (before, then) in steps.items()
        if state in before and then in allowed
    ]
    why = f"{' or '.join(left_out)} was left out" if left_out else f"{step!r} came twice"
    wanted = " or ".join(map(str.upper, allowed))
    return UsageError(
        f"expected the {what} to be {wanted} for {step!r} but they are {state.upper()}: {why}."
    )
