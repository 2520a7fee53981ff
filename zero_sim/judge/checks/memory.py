"""Memory of a rank: between two steps, and within the one that is recorded."""

from __future__ import annotations

from collections.abc import Iterator

from zero_sim.cost.memory import bytes_held, check_memory
from zero_sim.findings.records import Finding
from zero_sim.judge.checks.shown import Shown
from zero_sim.targets.adapt import PARTS


def check_rank_memory(shown: Shown) -> Iterator[Finding]:
    """Compare the memory that a rank holds with the form that its target declares."""
    notes, group = shown.notes, shown.group
    held = shown.engine.held_bytes()
    if notes.own_bytes is not None:
        yield from check_memory(held, notes.own_bytes, step=shown.step, rank=shown.rank)
        return
    owed = bytes_held(
        notes.sizes,
        scenario=group.scenario,
        rank=shown.rank,
        # What state an element has was compared with the reference before.
        stored=sum(
            part.master.numel() * sum(value.dim() > 0 for value in part.state.values())
            for part in shown.parts
        ),
    )
    if PARTS in group.unobserved:
        del owed["state"]  # How much of it an element has only parts tell.
    yield from check_memory(held, owed, step=shown.step, rank=shown.rank)
    if notes.memory is not None:
        yield from notes.memory.findings()
