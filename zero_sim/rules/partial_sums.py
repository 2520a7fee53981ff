"""Sums of a step's gradients that lack terms: of some micro-batches only, or of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zero_sim.reference import Again, Terms

LOCAL = Terms(is_local=True)


def partial_sums(again: Again) -> dict[str, Terms]:
    """Return the terms that a faulty system may add, the likeliest first.

    Args:
        again: The step.

    Returns:
        Terms by name, as in `the last micro-batch alone`.
    """
    replays = again.replays
    micros = max((len(replay.micro_grads) for replay in replays), default=0)
    some = {name: Terms(micros=each) for name, each in _some_of(micros)}
    if len(replays) == 1:
        return some
    found = {"this rank alone, not reduced": LOCAL, **some}
    for name, terms in some.items():
        found[f"{name}, of this rank, not reduced"] = replace(terms, is_local=True)
    if again.by().division.how != "none":
        local = {name: terms for name, terms in found.items() if terms.is_local}
        for name, terms in local.items():
            found[f"{name} and not divided"] = replace(terms, is_divided=False)
    return found


def _some_of(micros: int) -> Iterator[tuple[str, frozenset[int]]]:
    """Micro-batches that a system may keep of so many, the last one first."""
    if micros < 2:
        return
    words = {0: "the first micro-batch", micros - 1: "the last micro-batch"}
    for micro in reversed(range(micros)):
        yield f"{words.get(micro, f'micro-batch {micro}')} alone", frozenset({micro})
    for micro in range(micros) if micros > 2 else ():
        others = frozenset(range(micros)) - {micro}
        yield f"all micro-batches but {words.get(micro, str(micro))}", others
