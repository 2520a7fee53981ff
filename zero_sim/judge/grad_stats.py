"""Comparison of reported norm and zeros with those of the reported gradients.

With an unknown order of addition, the bounds only imply an interval for the norm. But together the
ranks report the whole gradient, which has a single norm. Judges in separate processes exchange the
contributions of their parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero_sim.findings import describe as findings
from zero_sim.findings.compare import same_bits
from zero_sim.findings.records import Finding
from zero_sim.reference.gradient import root_of_squares


@dataclass(frozen=True, kw_only=True, slots=True)
class PartStats:
    """Contribution of an owned part to norm and zeros."""

    step: int
    param: str
    start: int
    """Offset in the flattened param."""
    squares: float
    """Sum of squares, in fp64."""
    terms: int
    zeros: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedStats:
    """Norm and zeros, as reported by a rank."""

    step: int
    rank: int
    """World rank."""
    norm: float | None
    zeros: int | None
    terms: int
    """Number of elements in the whole gradient, over all ranks."""


def check_measures(
    part_stats: Iterable[PartStats], reported: Iterable[ReportedStats]
) -> Iterator[Finding]:
    """Compare reported norm and zeros with the sums over all parts.

    Args:
        part_stats: Contributions of all parts. Steps with missing parts are not compared.
        reported: Reports of all ranks.
    """
    parts: dict[int, dict[tuple[str, int], PartStats]] = {}
    for stats in part_stats:
        # Keyed by position, so replicas of a part count once.
        parts.setdefault(stats.step, {})[stats.param, stats.start] = stats
    wholes = {step: _whole(seen.values()) for step, seen in parts.items()}
    for claimed in reported:
        whole = wholes.get(claimed.step)
        # A part is missing, so the sum of squares is too small.
        if whole is None or whole.terms != claimed.terms:
            continue
        if claimed.norm is not None and whole.norm is not None:
            got = torch.tensor(claimed.norm, dtype=torch.float32)  # On the CPU, like the whole's.
            if not same_bits(whole.norm, got):
                at = findings.norm(claimed.step, claimed.rank)
                at = replace(at, message=f"{at.message} from that of the reported gradients")
                yield findings.differing(at, whole.norm, got)
        if claimed.zeros is not None and claimed.zeros != whole.zeros:
            zeros = whole.zeros
            yield findings.misreported(
                "zeros", claimed.step, claimed.rank, expected=zeros, got=claimed.zeros
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Whole:
    """Sums over all parts of a step."""

    norm: Tensor | None  # 0D, fp32
    """None if its rounding depends on the order of addition."""
    zeros: int
    terms: int


def _whole(parts: Collection[PartStats]) -> _Whole:
    # A certified norm does not depend on the order of parts.
    terms = sum(stats.terms for stats in parts)
    norm, certified = root_of_squares(sum(stats.squares for stats in parts), terms=terms)
    return _Whole(
        norm=norm if certified else None,
        zeros=sum(stats.zeros for stats in parts),
        terms=terms,
    )
