"""A campaign of small changes of a system's code: how many of them drawn cases find.

Who judges an optimizer of their own sees how much of its code is held by what zero-sim checks: a
change that no case finds is one that they could make by mistake.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass

import torch

from zero_sim.backends import WorldPool
from zero_sim.backends.hands import share_out
from zero_sim.fuzz.strategies import scenarios
from zero_sim.mutants.campaign import Budget, hunt
from zero_sim.mutants.changes import Change
from zero_sim.mutants.records import ChangeTrial, Trial
from zero_sim.mutants.swapping import Changed, Loaded
from zero_sim.targets import import_target

OWN_MODULES = (
    "zero_sim.layout.plan",
    "zero_sim.layout.planner",
    "zero_sim.layout.request",
    "zero_sim.layout.span",
    "zero_sim.zero.buffer",
    "zero_sim.zero.collectives",
    "zero_sim.zero.data_parallel",
    "zero_sim.zero.division",
    "zero_sim.zero.fp8",
    "zero_sim.zero.groups",
    "zero_sim.zero.model",
    "zero_sim.zero.norm",
    "zero_sim.zero.optimizer",
    "zero_sim.zero.overlap",
    "zero_sim.zero.scaler",
    "zero_sim.zero.step_count",
)
"""What is changed where nobody says what: the project's own system, without its checkpoints."""
_CHUNK_CHANGES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutating:
    """What a campaign changes, and how long it looks for it."""

    modules: tuple[str, ...] = OWN_MODULES
    target: str = "zero_sim"
    """Registered, or `module:name`; has to run the modules' code."""
    cases_max: int = 60
    """Cases that a change may survive."""
    seed: int = 0
    """Of the cases, and of which changes are tried."""


def choose_changes(mutating: Mutating, *, count: int) -> tuple[list[Change], int]:
    """Choose changes of the modules at random, each at most once.

    Args:
        mutating: The campaign.
        count: How many; all where there are not so many.

    Returns:
        They, in source order, and how many there are in all.

    Raises:
        UsageError: There is no such target, or a module has no source, or is none.
    """
    # First, as it is what finds modules in the current folder.
    import_target(mutating.target)
    every = Loaded(mutating.modules).changes()
    chosen = random.Random(mutating.seed).sample(range(len(every)), min(count, len(every)))
    return [every[index] for index in sorted(chosen)], len(every)


def try_changes(
    changes: Sequence[Change], *, mutating: Mutating, jobs: int = 1
) -> Iterator[ChangeTrial]:
    """Make changes, one at a time, and draw cases until one finds it; yield each as it ends.

    Args:
        changes: Of `choose_changes`.
        mutating: The campaign.
        jobs: Processes; 1 for this one. One that dies costs the few changes that it was given.
    """
    if jobs == 1:
        yield from _try_all(changes, mutating)
        return
    chunks = [
        changes[start : start + _CHUNK_CHANGES] for start in range(0, len(changes), _CHUNK_CHANGES)
    ]
    tasks = [(chunk, mutating) for chunk in chunks]
    for place, done in share_out(_try_chunk, tasks, jobs=jobs):
        yield from _tried(done, chunks[place])


def _tried(done: Future[list[ChangeTrial]], changes: Sequence[Change]) -> Sequence[ChangeTrial]:
    try:
        return done.result()
    except BrokenExecutor:
        error = "the process ended at this change or at one that it was given with; try --jobs 1"
        return [
            ChangeTrial(change=one, trial=Trial(id=one.id, killed=False, error=error))
            for one in changes
        ]


def _try_chunk(changes: Sequence[Change], mutating: Mutating) -> list[ChangeTrial]:
    torch.set_num_threads(1)
    return list(_try_all(changes, mutating))


def _try_all(changes: Sequence[Change], mutating: Mutating) -> Iterator[ChangeTrial]:
    target = import_target(mutating.target)
    loaded, cases = Loaded(mutating.modules), scenarios(target)
    budget = Budget(cases_max=mutating.cases_max, seed=mutating.seed)
    with WorldPool() as pool:
        for change in changes:
            broken = Changed(loaded, change)
            trial = hunt(broken, pool=pool, budget=budget, cases=cases, target=target)
            yield ChangeTrial(change=change, trial=trial)
