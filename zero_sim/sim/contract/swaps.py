"""Detection of swapped buffers: two ranks pass the same two parts of a buffer in opposite order.

In an all-reduce, for example, ranks with equal flat buffers usually pass equal parts. A different
part may be right. But if two ranks pass each other's part in two collectives, their buffers are
swapped: both sums are wrong, without any error from NCCL.
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
"""Limit on remembered collectives per group, because ranks' offsets may always differ."""

_Offset = tuple[int, int, int]
"""(storage address, storage bytes, offset in elements). 0 bytes if the tensor is no view."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sighting:
    """An entry of a collective in which the ranks' offsets differed."""

    # (kind, dtype, elements). Only equal entries can be swapped.
    like: tuple[object, ...]
    offsets: tuple[_Offset, ...]
    sites: tuple[tuple[str, int], ...]
    sequence: int


class SwapWatch:
    """A group's collectives in which the ranks passed different offsets."""

    def __init__(self) -> None:
        self._sightings: deque[_Sighting] = deque(maxlen=_SIGHTINGS_MAX)

    def check(
        self, calls: Sequence[Call], *, ranks: Sequence[int], sequence: int, what: str
    ) -> None:
        """Compare a collective with earlier collectives. Called if the ranks' offsets differ.

        Raises:
            ContractViolation: Two ranks swapped their parts between two collectives.
        """
        # `tensors` has a tensor of each member.
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
        # Other entries of the call differed, but not this entry.
        if len({offset[2] for offset in seen.offsets}) == 1:
            return
        for earlier in self._sightings:
            if earlier.like != seen.like:
                continue
            # Constant offsets are fine: ranks may have different layouts.
            if earlier.offsets == seen.offsets:
                return
            pair = _exchanged(earlier.offsets, seen.offsets)
            if pair is not None:
                raise _violation(earlier, seen, pair, ranks=ranks, what=what)
        self._sightings.append(seen)


def _symmetric(call: Call) -> Sequence[Tensor]:
    # Tensors with the same elements on all ranks; an all-gather's inputs are shards.
    return call.outputs if call.kind == "all_gather" else call.inputs


def _offset_of(tensor: Tensor) -> _Offset:
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    # If a tensor is its whole storage, there is no other part to swap.
    is_view = size > tensor.numel() * tensor.element_size()
    return storage.data_ptr(), size if is_view else 0, int(tensor.storage_offset())


def _exchanged(before: Sequence[_Offset], now: Sequence[_Offset]) -> tuple[int, int] | None:
    """Return two members that moved from offset x to y, and from y to x; None without."""
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
        f"same two parts of their storage in opposite order:"
    ]
    lines += [
        f"  rank {ranks[member]}: offset {sighting.offsets[member][2]} in #{sighting.sequence} at "
        f"{site_of(*sighting.sites[member])}"
        for member in pair
        for sighting in (earlier, seen)
    ]
    lines.append(
        "The sums would be wrong without any error. Make both ranks pass their buffers in the "
        "same order."
    )
    return ContractViolation(
        "\n".join(lines), aspect="swapped-buffers", rank=ranks[pair[1]], other_rank=ranks[pair[0]]
    )
