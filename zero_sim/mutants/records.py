"""Records of mutants and their hunts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from zero_sim.errors import MutantError
from zero_sim.mutants.patching import Patches
from zero_sim.shrink import Size

FaultClass = Literal[
    "NORM",  # Norms and clipping.
    "CKPT",  # Checkpoints.
    "ASYNC",  # Asynchronous lifetimes.
    "SCALE",  # Divisors.
    "EMPTY",  # Empty params or ranks.
    "ACCUM",  # Accumulation.
    "BUCKET",
    "ALIAS",  # Stale views.
    "DTYPE",
    "OPTST",  # Optimizer state.
    "LAYOUT",  # Layout arithmetic.
    "ORDER",  # Order of collectives.
    "TIED",  # Tied params.
    "GROUP",
    "INF",  # Overflow.
    "VOLUME",  # Cost only.
]
"""Class of the fault, most frequent in public bug trackers first."""

Flag = Literal[
    "DR",  # Ranks with different data.
    "S2",  # Two steps.
    "AS",  # Asynchronous calls that complete late.
    "NP",  # Uneven division over ranks.
    "PD",  # Padding.
    "SP",  # A split param.
    "K",  # Replicas.
    "CK",  # A checkpoint.
    "GA",  # Gradient accumulation.
    "CL",  # Clipping.
    "FZ",  # A frozen, unused or empty param or rank.
    "TI",  # A tied param.
    "B2",  # Two buckets.
    "PG",  # Two param groups.
    "MX",  # Two dtypes.
    "ME",  # Experts.
    "IN",  # An overflow on one rank.
    "NC",  # A strided param.
    "Z2",  # Sharded gradients (stage 2 or 3).
    "Z3",  # Sharded params (stage 3).
]
"""Feature that a case needs to expose the fault."""

Kill = Literal[
    "values",  # A comparison or an invariant.
    "contract",  # A refused or endless collective, or a rank that raises.
    "race",  # Memory touched in flight.
    "volume",  # The log of collectives.
    "memory",  # Resident bytes.
    "overlap",  # The degree of overlap.
    "refusal",  # The system refuses a valid case.
]
"""Means of detection."""

FLAGS: tuple[Flag, ...] = get_args(Flag)
CLASSES: tuple[FaultClass, ...] = get_args(FaultClass)

Plant = Callable[[Patches], None]
"""Function that adds the edits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A seeded fault."""

    id: str
    kind: FaultClass
    flags: tuple[Flag, ...]
    description: str
    """The fault as a sentence."""
    seen_in: str
    """Public bug that the mutant recreates, `project#number`, or class of bugs."""
    kill: Kill
    """Expected means of detection."""
    core: bool
    """True if the mutant runs on every change."""
    plant: Plant

    @contextmanager
    def apply(self) -> Iterator[Patches]:
        """Break the system in this process, and repair it on exit.

        Apply it before a world runs, because rank threads call the edited functions.

        Yields:
            The patches. Their `armed` counts calls of mutated code.

        Raises:
            MutantError: The system has changed since the mutant was written.
        """
        patches = Patches()
        self.plant(patches)
        try:
            patches.install()
            yield patches
        finally:
            # A failed install may have edited some functions too.
            patches.restore()


def mutant(
    id: str,
    kind: FaultClass,
    flags: str = "",
    *,
    seen_in: str,
    kill: Kill = "values",
    core: bool = False,
) -> Callable[[Plant], Mutant]:
    """Return a decorator that turns a planting function into a mutant.

    The function's docstring becomes the description.

    Args:
        id: Unique id.
        kind: Class of the fault.
        flags: Flags, separated by spaces.
        seen_in: Public bug or class of bugs.
        kill: Expected means of detection.
        core: True to run the mutant on every change.

    Raises:
        MutantError: A flag is unknown, the function has no docstring, or the system has changed
            since the mutant was written.
    """

    def make(plant: Plant) -> Mutant:
        named = tuple(flag for flag in FLAGS if flag in flags.split())
        if len(named) != len(flags.split()) or not plant.__doc__:
            raise MutantError(f"expected known flags and a docstring of {id}, got {flags!r}.")
        description = " ".join(plant.__doc__.split())
        # Plant now, so that a refactoring that removes a fragment fails at import, not in a hunt.
        try:
            plant(Patches())
        except MutantError as error:
            raise MutantError(f"mutant {id} no longer fits the system: {error}") from None
        return Mutant(
            id=id, kind=kind, flags=named, description=description, seen_in=seen_in, kill=kill,
            core=core, plant=plant,
        )  # fmt: skip

    return make


@dataclass(frozen=True, kw_only=True, slots=True)
class HuntResult:
    """Result of a hunt."""

    id: str
    killed: bool
    check: str = ""
    """First check that failed."""
    cases: int = 0
    """Number of drawn cases, until the mutant was found or the budget was spent."""
    judged: int = 0
    """Number of judged cases. Cases that lack features of the smallest recorded case come last."""
    seconds: float = 0.0
    """CPU time of judging."""
    armed: int = 0
    """Calls of mutated code."""
    size: Size | None = None
    """Size of the smallest case in this hunt; None if nothing was shrunk."""
    minimum: Size | None = None
    """Size of the smallest recorded case; None if nothing was shrunk."""
    smallest: str = ""
    """Smallest case in this hunt, as TOML."""
    error: str = ""
    """Error of the harness that ended the hunt; empty if there was no error."""
