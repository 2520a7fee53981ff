"""Two buffers that two ranks pass in exchanged order, as far as their place in storage betrays it.

Ranks that hold the same flat buffer pass the same place of it to a symmetric collective. One that
passes another place may have a right to; but where it passes elsewhere just the place that the
other one passed here, the two were exchanged, and the sums of both are wrong without any error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zero_sim.sim.call import Call
from zero_sim.sim.callsite import site_of
from zero_sim.sim.failures import ContractViolation

_SIGHTINGS_MAX = 64
"""Collectives remembered per group; a program in which ranks' places always differ forgets old ones
instead of growing."""

_Offset = tuple[int, int, int]
"""Address and size of a storage in bytes, and the offset in it in elements; size 0 is no view."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sighting:
    """One entry of one collective in which the ranks' places differed."""

    like: tuple[object, ...]
    offsets: tuple[_Offset, ...]
    sites: tuple[tuple[str, int], ...]
    sequence: int


class SwapWatch:
    """The collectives of one group in which the ranks passed different places."""

    def __init__(self) -> None:
        self._sightings: deque[_Sighting] = deque(maxlen=_SIGHTINGS_MAX)

    def check(
        self, calls: Sequence[Call], *, ranks: Sequence[int], sequence: int, what: str
    ) -> None:
        """Compare a collective with the earlier ones; to be called where the places differ.

        Args:
            calls: The members' calls, in group-rank order.
            ranks: World ranks of the group.
            sequence: The collective's number in its group.
            what: The collective's group and number, for the message.

        Raises:
            ContractViolation: Two ranks exchanged two places between this collective and one
                before.
        """
        sites = tuple([(call.file, call.line) for call in calls])
        for tensors in zip(*map(_symmetric, calls), strict=True):
            seen = _Sighting(
                like=(calls[0].kind, tensors[0].dtype, tensors[0].numel()),
                offsets=tuple([_offset_of(tensor) for tensor in tensors]),
                sites=sites,
                sequence=sequence,
            )
            self._compare(seen, ranks=ranks, what=what)

    def _compare(self, seen: _Sighting, *, ranks: Sequence[int], what: str) -> None:
        if len({offset[2] for offset in seen.offsets}) == 1:
            return
        for earlier in self._sightings:
            if earlier.like != seen.like:
                continue
            if earlier.offsets == seen.offsets:
                return
            pair = _exchanged(earlier.offsets, seen.offsets)
            if pair is not None:
                raise _violation(earlier, seen, pair, ranks=ranks, what=what)
        self._sightings.append(seen)


def _symmetric(call: Call) -> Sequence[Tensor]:
    return call.outputs if call.kind == "all_gather" else call.inputs


def _offset_of(tensor: Tensor) -> _Offset:
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    # A tensor that is its whole storage has no place in it that could be exchanged.
    is_view = size > tensor.numel() * tensor.element_size()
    return storage.data_ptr(), size if is_view else 0, int(tensor.storage_offset())


def _exchanged(before: Sequence[_Offset], now: Sequence[_Offset]) -> tuple[int, int] | None:
    """Two members of which one went from offset x to y where the other went from y to x."""
    moves: dict[tuple[int, int, int], int] = {}
    for member, (old, new) in enumerate(zip(before, now, strict=True)):
        if old[:2] != new[:2] or not old[1] or old[2] == new[2]:
            continue
        other = moves.get((old[1], new[2], old[2]))
        if other is not None:
            return other, member
        moves.setdefault((old[1], old[2], new[2]), member)
    return None


def _violation(
    earlier: _Sighting, seen: _Sighting, pair: tuple[int, int], *, ranks: Sequence[int], what: str
) -> ContractViolation:
    kind, dtype, numel = seen.like
    lines = [
        f"swapped buffers in {what}: {kind} of {numel} elements of {dtype}; two ranks passed the "
        f"same two parts of their storage in exchanged order:"
    ]
    lines += [
        f"  rank {ranks[member]}: offset {sighting.offsets[member][2]} in #{sighting.sequence} at "
        f"{site_of(*sighting.sites[member])}"
        for member in pair
        for sighting in (earlier, seen)
    ]
    lines.append(
        "The sums would be wrong without any error. Make both ranks pass their buffers in one "
        "order."
    )
    return ContractViolation(
        "\n".join(lines), aspect="swapped-buffers", rank=ranks[pair[1]], other_rank=ranks[pair[0]]
    )
