"""Records of mutants and of what became of them."""

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
"""What kind of mistake it is, the most frequent in public bug trackers first: norms and clipping;
checkpoints; asynchronous lifetimes; divisors; params or ranks with nothing; accumulation; buckets;
stale views; dtypes; optimizer state; layout arithmetic; order of collectives; tied params; groups;
overflow; cost only."""

Flag = Literal[
    "DR", "S2", "AS", "NP", "PD", "SP", "K", "CK", "GA", "CL",
    "FZ", "TI", "B2", "PG", "MX", "ME", "IN", "NC", "Z2", "Z3",
]  # fmt: skip
"""What a case must have for the fault to show: ranks with different data; two steps; asynchronous
calls that complete late; ranks that do not divide; padding; a split param; copies of the state; a
checkpoint; accumulation; clipping; a frozen, unused or empty param or rank; a tied param; two
buckets; two param groups; two dtypes; experts; an overflow on one rank; a strided param; sharded
gradients (stage 2 or 3); sharded params (stage 3)."""

Kill = Literal["values", "contract", "race", "volume", "memory", "overlap", "refusal"]
"""What finds it: a comparison or an invariant of values; a refused or endless collective, or a rank
that raises; memory touched in flight; the log of collectives; bytes held; the degree of overlap; or
a valid case that the system refuses."""

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
    """What is changed, in a sentence."""
    seen_in: str
    """The public bug that it re-creates, `project#number`, or the class of bugs."""
    kill: Kill
    """What is expected to find it."""
    core: bool
    """Whether it belongs to the set that runs on every change."""
    plant: Plant

    @contextmanager
    def apply(self) -> Iterator[Patches]:
        """Break the system of this process, and mend it again.

        Before a world runs, never while one does, because rank threads call the edited functions.

        Yields:
            The patches; `armed` counts how often mutated code was called.

        Raises:
            MutantError: If the system is not what the mutant was written against.
        """
        patches = Patches()
        self.plant(patches)
        try:
            patches.install()
            yield patches
        finally:
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
    """Make a mutant of the function that plants it, whose docstring describes it.

    Args:
        id: Unique.
        kind: Its class.
        flags: Its flags, separated by spaces.
        seen_in: The public bug or class of bugs.
        kill: What is expected to find it.
        core: Whether it runs on every change.

    Raises:
        MutantError: If a flag is not known, the function has no docstring, or the system is not
            what the mutant was written against.
    """

    def make(plant: Plant) -> Mutant:
        named = tuple(flag for flag in FLAGS if flag in flags.split())
        if len(named) != len(flags.split()) or not plant.__doc__:
            raise MutantError(f"expected known flags and a docstring of {id}, got {flags!r}.")
        description = " ".join(plant.__doc__.split())
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
    """What became of one mutant in a campaign."""

    id: str
    killed: bool
    check: str = ""
    """What found it first."""
    cases: int = 0
    """Cases drawn up to the one that found it; all of them for a survivor."""
    judged: int = 0
    """Those that were judged: of cases that lack what its smallest case on record has, none before
    all others."""
    seconds: float = 0.0
    """Processor time of those that were judged."""
    armed: int = 0
    """How often mutated code was called."""
    size: Size | None = None
    """Of the smallest case that was found; None where it was not shrunk."""
    minimum: Size | None = None
    """Of the smallest case on record, where it was shrunk."""
    smallest: str = ""
    """The smallest case that was found, as TOML."""
    error: str = ""
    """Why the campaign could not go on: an error of the harness, never of the mutant."""
