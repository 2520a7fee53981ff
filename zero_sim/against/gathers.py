"""Shard places that only the script knows, learned from its gathers.

An optimizer may hold a rank's part of a flat buffer, cut in any way. When the script gathers the
updated parts, an element's position in the result is its place. A param's state has the same
places.

[Note: the same gather on both sides]
The k-th gather of a step gathers the same buffer on any number of ranks. So k and the position in
the result identify an element. Padding at the end depends on the world size, so it is not
compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_sim.against.points import Piece
from zero_sim.sim.call import Call
from zero_sim.sim.dispatch import has_own_dispatch
from zero_sim.sim.log import CollectiveRecord

PADDING_MAX = 512
"""Padding elements that are always allowed at the end of a gather's result."""
_KINDS = frozenset({"all_gather", "all_gather_list"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A stretch of consecutive elements in a rank's tensor and in a gather's result."""

    gather: int
    """Index among the rank's gathers in a step."""
    position: int
    """Start in the result, in elements."""
    offset: int
    """Start in the flattened tensor, in elements."""
    numel: int


class GatherLog:
    """Shard places learned from one run's gathers."""

    def __init__(self) -> None:
        self.places: dict[str, dict[int, tuple[Stretch, ...]]] = defaultdict(dict)
        """Stretches by rank, for each param without a module."""
        self._counts: dict[tuple[int, int], int] = defaultdict(int)
        self._found: dict[tuple[int, int, str], list[Stretch]] = defaultdict(list)

    def called(
        self,
        record: CollectiveRecord,
        call: Call,
        *,
        step: int,
        params: Mapping[str, Tensor],
    ) -> None:
        """Search a gather's contribution for values of optimizer params without a module.

        It must be called before data moves. `step` counts the rank's optimizer steps so far.
        """
        if record.kind not in _KINDS:
            return
        rank = record.rank
        # Rank r's contribution of n elements lies at r * n in the result.
        place = record.group_ranks.index(rank)
        for contribution in call.inputs:
            index = self._counts[rank, step]
            # Count integers as well, so that indices agree on both sides.
            self._counts[rank, step] += 1
            if not contribution.is_floating_point():
                continue
            flat = contribution.detach().reshape(-1).to(torch.float64)
            for name, param in params.items():
                if has_own_dispatch(type(param)):
                    continue  # A DTensor declares its places.
                self._search(flat, param, rank=rank, step=step, name=name, index=index, place=place)

    def _search(
        self,
        flat: Tensor,
        param: Tensor,
        *,
        rank: int,
        step: int,
        name: str,
        index: int,
        place: int,
    ) -> None:
        own = param.detach().reshape(-1).to(torch.float64)
        known = self.places[name].get(rank, ())
        # An earlier gather, perhaps of an earlier step, has placed all elements.
        if sum(each.numel for each in known) == own.numel():
            return
        # Either may be a part of the other.
        found = _overlap(flat, own)
        if found is None:
            return
        in_flat, in_own, numel = found
        stretch = Stretch(
            gather=index, position=place * flat.numel() + in_flat, offset=in_own, numel=numel
        )
        stretches = self._found[rank, step, name]
        stretches.append(stretch)
        # Keep the step in which most elements were found.
        if sum(each.numel for each in stretches) > sum(each.numel for each in known):
            self.places[name][rank] = tuple(stretches)


def _overlap(flat: Tensor, own: Tensor) -> tuple[int, int, int] | None:
    """Find the shorter of two vectors in the longer; None if not found or all zero."""
    is_part = flat.numel() <= own.numel()
    short, long = (flat, own) if is_part else (own, flat)
    if not short.numel() or not bool(short.any()):
        return None
    # Only try positions of the largest element, because it is rare among the others.
    mark = int(short.abs().argmax())
    for at in (long == short[mark]).nonzero().reshape(-1).tolist():
        start = at - mark
        inside = 0 <= start <= long.numel() - short.numel()
        if inside and torch.equal(long[start : start + short.numel()], short):
            return (0, start, short.numel()) if is_part else (start, 0, short.numel())
    return None


def gathered(
    name: str,
    *,
    expected: Mapping[int, Piece],
    expected_log: GatherLog,
    got: Mapping[int, Piece],
    got_log: GatherLog,
) -> tuple[Tensor, Tensor] | None:
    """Return flat expected and got elements with equal places; None if places are unknown."""
    wanted = _joined(name, expected, expected_log)
    came = _joined(name, got, got_log)
    if wanted is None or came is None or not set(wanted) <= set(came):
        return None
    pairs: list[tuple[Tensor, Tensor]] = []
    for index, values in sorted(wanted.items()):
        other = came[index]
        # Skip places without a piece of the expected run.
        present = ~values.isnan()
        # Sizes may be padded to a multiple of ranks or alignment, more in large buffers.
        padding = max(PADDING_MAX, values.numel() // 8)
        if not 0 <= other.numel() - values.numel() <= padding:
            return None  # Too long for padding, so another tensor was gathered.
        other = other[: values.numel()]
        if bool((present & other.isnan()).any()):
            return None
        pairs.append((values[present], other[present]))
    if not pairs:
        return None
    return torch.cat([one for one, _ in pairs]), torch.cat([other for _, other in pairs])


def _joined(name: str, pieces: Mapping[int, Piece], log: GatherLog) -> dict[int, Tensor] | None:
    """Return the gathers' results, rebuilt from the pieces; NaN at places without a piece."""
    places = log.places.get(name, {})
    if not set(pieces) <= set(places):
        return None
    stretches: list[tuple[Stretch, Tensor]] = []
    for rank, piece in pieces.items():
        flat = piece.values.reshape(-1)
        for each in places[rank]:
            # State may be smaller than its param, for example if it is factored or per row.
            if each.offset + each.numel > flat.numel():
                return None
            stretches.append((each, flat[each.offset : each.offset + each.numel]))
    results: dict[int, Tensor] = {}
    for index in {each.gather for each, _ in stretches}:
        numel = max(each.position + each.numel for each, _ in stretches if each.gather == index)
        results[index] = torch.full((numel,), torch.nan, dtype=torch.float64)
    for each, values in stretches:
        results[each.gather][each.position : each.position + each.numel] = values
    return results
