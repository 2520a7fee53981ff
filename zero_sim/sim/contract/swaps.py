"""Detection of two buffers that two ranks pass in exchanged order, by their storage offsets.

Ranks with the same flat buffer pass the same part of it to a symmetric collective. Passing another
part can be right. But if two ranks passed each other's parts in two collectives, their buffers were
exchanged, and the sums of both are wrong without any error.
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
"""Number of remembered collectives per group. If ranks' offsets always differ, old ones are
forgotten."""

_Offset = tuple[int, int, int]
"""Address and size of a storage in bytes, and offset in elements. Size 0: not a view."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sighting:
    """One entry of a collective in which the ranks' offsets differed."""

    # Kind, dtype and elements: only equal ones can be exchanged.
    like: tuple[object, ...]
    offsets: tuple[_Offset, ...]
    sites: tuple[tuple[str, int], ...]
    sequence: int


class SwapWatch:
    """Collectives of one group in which the ranks passed different offsets."""

    def __init__(self) -> None:
        self._sightings: deque[_Sighting] = deque(maxlen=_SIGHTINGS_MAX)

    def check(
        self, calls: Sequence[Call], *, ranks: Sequence[int], sequence: int, what: str
    ) -> None:
        """Compare a collective with earlier ones. Called if the ranks' offsets differ.

        Args:
            calls: The members' calls, in group-rank order.
            ranks: World ranks of the group.
            sequence: The collective's number in its group.
            what: The collective's group and number, for the message.

        Raises:
            ContractViolation: Two ranks exchanged two parts between this collective and an earlier
                one.
        """
        # Entry by entry: `tensors` has one tensor of each member.
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
        # Other entries of the call differed, but not this one.
        if len({offset[2] for offset in seen.offsets}) == 1:
            return
        for earlier in self._sightings:
            if earlier.like != seen.like:
                continue
                # Constant offsets, for example of ranks with different layouts, are consistent.
            if earlier.offsets == seen.offsets:
                return
            pair = _exchanged(earlier.offsets, seen.offsets)
            if pair is not None:
                raise _violation(earlier, seen, pair, ranks=ranks, what=what)
        self._sightings.append(seen)


def _symmetric(call: Call) -> Sequence[Tensor]:
    # The tensors with the same elements on all ranks: an all-gather's inputs are shards.
    return call.outputs if call.kind == "all_gather" else call.inputs


def _offset_of(tensor: Tensor) -> _Offset:
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    # A tensor that is its whole storage has no offset that could be exchanged.
    is_view = size > tensor.numel() * tensor.element_size()
    return storage.data_ptr(), size if is_view else 0, int(tensor.storage_offset())


def _exchanged(before: Sequence[_Offset], now: Sequence[_Offset]) -> tuple[int, int] | None:
    """Return two members, one that moved from offset x to y and one from y to x; else None."""
    moves: dict[tuple[int, int, int], int] = {}
    for member, (old, new) in enumerate(zip(before, now, strict=True)):
        # Skip members with another storage, no view, or no move.
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
