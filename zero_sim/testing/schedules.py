"""Exploration of all schedules of a small program."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zero_sim.errors import UsageError
from zero_sim.host.arguments import check_kind, unrun_function, unrun_result
from zero_sim.sim.failures import WorldFailure
from zero_sim.sim.log import EventLog
from zero_sim.sim.schedule import Choosing, Schedule
from zero_sim.sim.world.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class ExploredFailure:
    """A program's failure, with the data that repeats it."""

    error: Exception
    """Exception from the world or the check."""
    choices: tuple[int, ...]
    """Choices that repeat it: `World(schedule=Choices(choices))`."""
    turns: tuple[int, ...]
    """Turns that repeat it: `World(schedule=Replay(turns))`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exploration:
    """Result of running a program under many schedules."""

    runs: int
    interleavings: int
    """Number of different orders of calls, waits and data movement."""
    complete: bool
    """True if every schedule was run."""
    failures: tuple[ExploredFailure, ...]


class _Following:
    """A recipe that follows given choices and records the number of choices at each pick."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self._schedule = Choosing(choices)

    def fresh(self) -> Schedule:
        """Return a schedule for the next run, to which `choices` then refers."""
        self._schedule = Choosing(self._choices)
        return self._schedule

    def choices(self) -> tuple[int, ...]:
        """Return the choice at each pick of the run."""
        taken = self._choices[: len(self._schedule.widths)]
        # Picks beyond the given choices took the first ready rank.
        return (*taken, *(0 for _ in self._schedule.widths[len(taken) :]))

    def following(self) -> tuple[int, ...] | None:
        """Return the next schedule's choices, depth first; None after the last schedule."""
        # Advance the last pick with a further choice. Later picks start again at 0.
        choices, widths = self.choices(), self._schedule.widths
        for position in reversed(range(len(choices))):
            if choices[position] + 1 < widths[position]:
                return (*choices[:position], choices[position] + 1)
        return None


def explore(
    program: Callable[[int], Any],
    world_size: int,
    *,
    runs_max: int = 1000,
    check: Callable[[list[Any]], object] | None = None,
    **world_args: Any,
) -> Exploration:
    """Run a program under every schedule, depth first, up to a number of runs.

    The ranks that can run at a pick must only depend on earlier picks. This holds if ranks share
    nothing but torch.distributed. The number of schedules grows fast, so use few ranks with few
    calls.

        result = explore(program, 3)
        assert result.complete and not result.failures

    Args:
        program: As for `World.run`.
        world_size: Number of ranks.
        runs_max: Most runs, at least 1. If more schedules remain, the result is not `complete`.
        check: Function of each run's results. It raises or returns False if they are wrong, and
            returns None or True if they are right.
        **world_args: Other arguments of `World`, except `schedule`.

    Returns:
        The number of runs, and every failure with the choices and turns that repeat it.

    Raises:
        UsageError: `runs_max` is below 1, `check` is no plain function, `schedule` is given, or an
            argument of `World` is out of range.
    """
    check_kind("runs_max", runs_max, "an integer")
    if runs_max < 1:
        raise UsageError(f"expected runs_max to be at least 1, got {runs_max}.")
    _check_check(check)
    if "schedule" in world_args:
        raise UsageError(
            "expected no schedule, because explore runs all of them, got "
            f"{world_args['schedule']!r}. Remove it, or run one schedule with World(schedule=...)."
        )
    failures: list[ExploredFailure] = []
    seen: set[int] = set()
    choices: tuple[int, ...] | None = ()
    runs = 0
    # Share a world between runs, so its ranks stay warm.
    with World(world_size, **world_args) as world:
        while choices is not None and runs < runs_max:
            recipe = _Following(choices)
            world.configure(schedule=recipe)
            error = _error_of(world, program, check)
            runs += 1
            seen.add(_interleaving(world.log))
            if error is not None:
                turns = tuple(world.log.turns)
                failures.append(ExploredFailure(error=error, choices=recipe.choices(), turns=turns))
            choices = recipe.following()
    return Exploration(
        runs=runs,
        interleavings=len(seen),
        complete=choices is None,
        failures=tuple(failures),
    )


def _check_check(check: Any) -> None:
    remedy = "Pass a function of the results that raises or returns False if they are wrong"
    if check is not None and not callable(check):
        raise UsageError(f"expected check to be a function, got {check!r}. {remedy}.")
    kind = None if check is None else unrun_function(check)
    if kind is not None:
        # Calling it returns a coroutine or generator. These are true, so every run would pass.
        raise UsageError(f"expected check to run when it is called, got {kind}. {remedy}.")


def _error_of(
    world: World, program: Callable[[int], Any], check: Callable[[list[Any]], object] | None
) -> Exception | None:
    try:
        results = world.run(program)
    except WorldFailure as failure:
        return failure
    try:
        returned = None if check is None else check(results)
        # Coroutines are true. `bool` belongs to the check, because a tensor with several elements
        # raises.
        if returned is not None and (unrun_result(returned) or not bool(returned)):
            return AssertionError(
                f"expected check to return None or True, got {returned!r} for the results "
                f"{reprlib.repr(results)}."
            )
    except Exception as error:  # noqa: BLE001  Any exception from a check is the run's failure.
        return error
    return None


def _interleaving(log: EventLog) -> int:
    # Without the tick, which differs between otherwise equal schedules.
    return hash(tuple(moment[1:] for moment in log.moments))
