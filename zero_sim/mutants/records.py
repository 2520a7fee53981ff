"""Records of mutants and of their hunts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from zero_sim.errors import MutantError
from zero_sim.mutants.patching import Patches
from zero_sim.shrink import Size

FaultClass = Literal[
    "NORM", "CKPT", "ASYNC", "SCALE", "EMPTY", "ACCUM", "BUCKET", "ALIAS",
    "DTYPE", "OPTST", "LAYOUT", "ORDER", "TIED", "GROUP", "INF", "VOLUME",
]  # fmt: skip
"""Class of the fault, the most frequent in public bug trackers first: norms and clipping;
checkpoints; asynchronous lifetimes; divisors; empty params or ranks; accumulation; buckets;
stale views; dtypes; optimizer state; layout arithmetic; order of collectives; tied params; groups;
overflow; cost only."""

Flag = Literal[
    "DR", "S2", "AS", "NP", "PD", "SP", "K", "CK", "GA", "CL",
    "FZ", "TI", "B2", "PG", "MX", "ME", "IN", "NC", "Z2", "Z3",
]  # fmt: skip
"""Feature that a case needs to expose the fault: ranks with different data; two steps; asynchronous
calls that complete late; uneven division over ranks; padding; a split param; replicas of the state;
a checkpoint; accumulation; clipping; a frozen, unused or empty param or rank; a tied param; two
buckets; two param groups; two dtypes; experts; an overflow on one rank; a strided param; sharded
gradients (stage 2 or 3); sharded params (stage 3)."""

Kill = Literal["values", "contract", "race", "volume", "memory", "overlap", "refusal"]
"""Means of detection: a comparison or an invariant of values; a refused or endless collective, or a
rank that raises; memory touched in flight; the log of collectives; resident bytes; the degree of
overlap; or a valid case that the system refuses."""

FLAGS: tuple[Flag, ...] = get_args(Flag)
CLASSES: tuple[FaultClass, ...] = get_args(FaultClass)

Plant = Callable[[Patches], None]
"""Function that makes the edits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One seeded fault."""

    id: str
    kind: FaultClass
    flags: tuple[Flag, ...]
    description: str
    """The fault, in a sentence."""
    seen_in: str
    """The public bug that it recreates, `project#number`, or the class of bugs."""
    kill: Kill
    """Expected means of detection."""
    core: bool
    """True if the mutant belongs to the set that runs on every change."""
    plant: Plant

    @contextmanager
    def apply(self) -> Iterator[Patches]:
        """Break the system of this process, and repair it on exit.

        Apply it before a world runs, never during a run, because rank threads call the edited
        functions.

        Yields:
            The patches; `armed` counts how often mutated code was called.

        Raises:
            MutantError: If the system has changed since the mutant was written.
        """
        patches = Patches()
        self.plant(patches)
        try:
            patches.install()
            yield patches
        finally:
            # Also after a failed install, which may have edited some functions.
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
    """Return a decorator that makes a mutant of the function that plants it.

    The function's docstring becomes the description.

    Args:
        id: Unique id.
        kind: Class of the fault.
        flags: Flags, separated by spaces.
        seen_in: The public bug or class of bugs.
        kill: Expected means of detection.
        core: True to run it on every change.

    Raises:
        MutantError: If a flag is unknown, the function has no docstring, or the system has changed
            since the mutant was written.
    """

    def make(plant: Plant) -> Mutant:
        named = tuple(flag for flag in FLAGS if flag in flags.split())
        if len(named) != len(flags.split()) or not plant.__doc__:
            raise MutantError(f"expected known flags and a docstring of {id}, got {flags!r}.")
        description = " ".join(plant.__doc__.split())
        # Plant once now, so a refactoring that removes a fragment fails at import, not in a hunt.
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
class Trial:
    """Result of one mutant in a campaign."""

    id: str
    killed: bool
    check: str = ""
    """Id of the first check that failed."""
    cases: int = 0
    """Cases drawn, including the one that found the mutant; all drawn cases for a survivor."""
    judged: int = 0
    """Cases judged. Those without the features of the smallest recorded case are judged last."""
    seconds: float = 0.0
    """Processor time of the judged cases."""
    armed: int = 0
    """Number of calls of mutated code."""
    size: Size | None = None
    """Size of the smallest case found in this hunt; None if it was not shrunk."""
    minimum: Size | None = None
    """Size of the smallest recorded case; None if this hunt was not shrunk."""
    smallest: str = ""
    """The smallest case found in this hunt, as TOML."""
    error: str = ""
    """Reason why the hunt ended early: an error of the harness, never of the mutant."""
