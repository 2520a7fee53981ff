"""Check of start values drawn by the system: ranks and modules must draw different numbers.

[Note: chance]
Two draws count as equal if their first values agree bit for bit: 2 values in fp32, 6 in bf16 or
fp16. An fp32 value has 24 random bits, a 16-bit value at least 8. So independent draws agree with
probability below 2^-47. Shorter parts are not compared. Parts that begin with repeated values, or
with -1, 0 or 1, are not compared either, because constants and identity matrices are not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.targets import Place

# 2 x 24 or 6 x 8 random bits: 48 bits each; see [Note: chance].
_NEEDED = {torch.float32: 2}
_NEEDED_16_BITS = 6


def check_drawn(
    values: Mapping[str, Tensor], places: Mapping[int, Sequence[Place]], *, step: int
) -> Iterator[Finding]:
    """Check that no two params, and no two ranks' parts, begin with equal draws.

    Args:
        values: Start values of whole params.
        places: Owned places by rank.
        step: The next step, for findings.
    """
    # Whole params and each rank's parts, because ranks may draw their shards with the same seed.
    parts: list[tuple[str, int, int, int | None]] = [
        (name, 0, value.numel(), None) for name, value in values.items()
    ]
    for rank, owned in places.items():
        parts += [(place.param, place.start, place.stop, rank) for place in owned]
    first: dict[tuple[torch.dtype, bytes], tuple[str, int, str]] = {}
    for name, start, stop, rank in parts:
        head = values[name].reshape(-1)[start:stop] if name in values else torch.empty(0)
        head = head[: _NEEDED.get(head.dtype, _NEEDED_16_BITS)]
        if not _is_drawn(head):
            continue
        on = "" if rank is None else f" of rank {rank}"
        words = f"param {name!r}[{start}:{stop}]{on}"
        # Compare bits, not numbers, because the probability above counts random bits.
        key = head.dtype, head.view(torch.uint8).cpu().numpy().tobytes()
        other, begin, others_words = first.setdefault(key, (name, start, words))
        # A param and its first part start at the same element, so they must agree.
        if (other, begin) != (name, start):
            yield Finding(
                check=Check.INVARIANT_START,
                step=step,
                rank=rank,
                param=name,
                offset_in_param=start,
                message=f"{words} begins with the values of {others_words}, so both were drawn "
                "with the same random numbers",
            )


def _is_drawn(head: Tensor) -> bool:
    """Return True if there are enough distinct values, none of them -1, 0 or 1."""
    distinct = set(head.tolist())
    needed = _NEEDED.get(head.dtype, _NEEDED_16_BITS)
    return len(distinct) == needed and not distinct & {-1.0, 0.0, 1.0}
