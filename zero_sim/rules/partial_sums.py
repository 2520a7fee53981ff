"""Sums of a step's gradients that lack terms: of some micro-batches only, or of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zero_sim.reference import Again, Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialSum:
    """A sum that lacks terms."""

    name: str
    """Terms that it has, as in `the last micro-batch alone`."""
    micros: frozenset[int] | None = None
    """Micro-batches that it has; None for all."""
    is_local: bool = False
    """True if it is of one rank, that of the observer."""
    is_divided: bool = True
    """True if it is divided as the whole sum would be."""

    def terms(self, rank: int) -> Terms:
        """Return its terms as a rank has them.

        Args:
            rank: The observer.
        """
        own = rank if self.is_local else None
        return Terms(micros=self.micros, rank=own, is_divided=self.is_divided)


def partial_sums(again: Again) -> list[PartialSum]:
    """Return the partial sums that a faulty system may have, the likeliest first.

    Args:
        again: The step.
    """
    replays = again.replays
    micros = max((len(replay.micro_grads) for replay in replays), default=0)
    found = [PartialSum(name=name, micros=some) for name, some in _some_of(micros)]
    if len(replays) > 1:
        local = PartialSum(name="this rank alone, not reduced", is_local=True)
        found = [local, *found, *(_local(each) for each in found)]
        if again.by().division.how != "none":
            found += [_not_divided(each) for each in found if each.is_local]
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


def _local(partial: PartialSum) -> PartialSum:
    return replace(partial, name=f"{partial.name}, of this rank, not reduced", is_local=True)


def _not_divided(partial: PartialSum) -> PartialSum:
    return replace(partial, name=f"{partial.name} and not divided", is_divided=False)
