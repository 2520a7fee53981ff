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
class Tally:
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
class Told:
    """What a rank says of a whole step's gradient."""

    step: int
    rank: int
    """Rank in the world."""
    norm: float | None
    zeros: int | None
    terms: int
    """Elements that are measured, by all ranks together."""


def check_measures(tallies: Iterable[Tally], told: Iterable[Told]) -> Iterator[Finding]:
    """Compare what ranks say of each step with what was seen of it, where no part is missing.

    Args:
        tallies: What was seen of each part; copies of one part count once.
        told: What ranks say.
    """
    parts: dict[int, dict[tuple[str, int], Tally]] = {}
    for tally in tallies:
        parts.setdefault(tally.step, {})[tally.param, tally.start] = tally
    wholes = {step: _whole(seen.values()) for step, seen in parts.items()}
    for said in told:
        whole = wholes.get(said.step)
        if whole is None or whole.terms != said.terms:
            continue
        if said.norm is not None and whole.norm is not None:
            got = torch.tensor(said.norm, dtype=torch.float32)
            if not same_bits(whole.norm, got):
                at = findings.norm(said.step, said.rank)
                at = replace(at, message=f"{at.message} from that of the gradients that ranks show")
                yield findings.differing(at, whole.norm, got)
        if said.zeros is not None and said.zeros != whole.zeros:
            zeros = whole.zeros
            yield findings.said("zeros", said.step, said.rank, expected=zeros, got=said.zeros)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Whole:
    """What all parts that were seen come to."""

    norm: Tensor | None  # 0D, fp32
    """None where its rounding depends on the order in which squares are added."""
    zeros: int
    terms: int


def _whole(parts: Collection[Tally]) -> _Whole:
    terms = sum(tally.terms for tally in parts)
    norm, certified = root_of_squares(sum(tally.squares for tally in parts), terms=terms)
    return _Whole(
        norm=norm if certified else None,
        zeros=sum(tally.zeros for tally in parts),
        terms=terms,
    )
