"""Check of start values drawn by the system: ranks and modules must draw different numbers.

[Note: chance]
Two draws count as one if their first values agree bit for bit: 2 values of fp32, or 6 of 16 bits. A
value of fp32 has 24 random bits and one of 16 bits at least 8, so independent draws agree with
probability below 2^-47. Shorter parts are not compared. Neither are first values that no generator
produces: equal values, and -1, 0 and 1, as in zeros, ones and identity matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.targets import Place

# 2 values of 24 random bits, or 6 of at least 8 bits: 48 bits each; see [Note: chance].
_NEEDED = {torch.float32: 2}
_NEEDED_16_BITS = 6


def check_drawn(
    values: Mapping[str, Tensor], places: Mapping[int, Sequence[Place]], *, step: int
) -> Iterator[Finding]:
    """Check that no two params, and no parts of different ranks, begin with the same draws.

    Args:
        values: Start values of whole params.
        places: Places that each rank owns.
        step: The next step, for findings.
    """
    # Besides whole params, the parts of each rank: if ranks draw their shards with one seed, these
    # begin alike.
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
        # Compare bits, not numbers: the bound on chance counts random bits.
        key = head.dtype, head.view(torch.uint8).cpu().numpy().tobytes()
        other, begin, others_words = first.setdefault(key, (name, start, words))
        # The start of a param is the start of its first part, too; that is no repetition.
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
    """Return True if the values are numerous and distinct enough for a generator's output."""
    distinct = set(head.tolist())
    needed = _NEEDED.get(head.dtype, _NEEDED_16_BITS)
    return len(distinct) == needed and not distinct & {-1.0, 0.0, 1.0}
