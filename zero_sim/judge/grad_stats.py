"""The norm and the zeros of the gradients that ranks show, beside what they say these are.

Where the order of addition is not known, a bound leaves the norm some room; but ranks show all of
the gradient, part by part, and that has one norm. Where each rank is judged in a process of its
own, judges tell what their parts add to it.
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
    """What one part of a param adds to the measure of a step's gradient."""

    step: int
    param: str
    start: int
    """First of the flattened param's elements."""
    squares: float
    """Sum of squares, in fp64."""
    terms: int
    """Elements."""
    zeros: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedStats:
    """What a rank says of a whole step's gradient."""

    step: int
    rank: int
    """Rank in the world."""
    norm: float | None
    zeros: int | None
    terms: int
    """Elements that are measured, by all ranks together."""


def check_measures(
    part_stats: Iterable[PartStats], reported: Iterable[ReportedStats]
) -> Iterator[Finding]:
    """Compare what ranks say of each step with what was seen of it, where no part is missing.

    Args:
        part_stats: What was seen of each part; copies of one part count once.
        reported: What ranks say.
    """
    parts: dict[int, dict[tuple[str, int], PartStats]] = {}
    for stats in part_stats:
        parts.setdefault(stats.step, {})[stats.param, stats.start] = stats
    wholes = {step: _whole(seen.values()) for step, seen in parts.items()}
    for claimed in reported:
        whole = wholes.get(claimed.step)
        if whole is None or whole.terms != claimed.terms:
            continue
        if claimed.norm is not None and whole.norm is not None:
            got = torch.tensor(claimed.norm, dtype=torch.float32)  # On the CPU, as the whole's is.
            if not same_bits(whole.norm, got):
                at = findings.norm(claimed.step, claimed.rank)
                at = replace(at, message=f"{at.message} from that of the gradients that ranks show")
                yield findings.differing(at, whole.norm, got)
        if claimed.zeros is not None and claimed.zeros != whole.zeros:
            zeros = whole.zeros
            yield findings.misreported(
                "zeros", claimed.step, claimed.rank, expected=zeros, got=claimed.zeros
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Whole:
    """What all parts that were seen come to."""

    norm: Tensor | None  # 0D, fp32
    """None where its rounding depends on the order in which squares are added."""
    zeros: int
    terms: int


def _whole(parts: Collection[PartStats]) -> _Whole:
    terms = sum(stats.terms for stats in parts)
    norm, certified = root_of_squares(sum(stats.squares for stats in parts), terms=terms)
    return _Whole(
        norm=norm if certified else None,
        zeros=sum(stats.zeros for stats in parts),
        terms=terms,
    )
