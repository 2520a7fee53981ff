"""Limits: bytes of a rank by number of ranks, and the amount that they approach as ranks grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zero_sim.calculators.counted import Model, Stage, counted_model
from zero_sim.calculators.footprint import footprint_of

PARAMS = 10**10
"""Params of the table if none are given: 160 GB on one device, in bf16 as in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitRow:
    """One way to shard, on several numbers of ranks."""

    name: str
    unsharded: int
    """Bytes on one device, between two steps."""
    by_ranks: Mapping[int, int]
    """Bytes of one rank by number of ranks."""
    limit: int
    """Bytes that these approach."""

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "name": self.name,
            "unsharded": self.unsharded,
            "bytes_by_ranks": {str(ranks): count for ranks, count in self.by_ranks.items()},
            "limit": self.limit,
        }


def limit_rows(
    model: Model, *, ranks: Sequence[int], stages: Sequence[Stage], has_masters: bool = True
) -> list[LimitRow]:
    """A row for each stage, and one for the moments alone with everything in fp32.

    Args:
        model: A counted model.
        ranks: Numbers of ranks.
        stages: ZeRO stages.
        has_masters: True if the optimizer steps fp32 copies of the params.
    """
    rows = [
        _row(f"stage {stage}", model, ranks=ranks, stage=stage, has_masters=has_masters)
        for stage in stages
    ]
    # Stage 1 shards masters and moments. Without masters these are the moments alone.
    plain = counted_model(model.elems, dtype="fp32")
    moments = _row("fp32, moments alone", plain, ranks=ranks, stage=1, has_masters=False)
    return [*rows, moments]


def _row(
    name: str, model: Model, *, ranks: Sequence[int], stage: Stage, has_masters: bool
) -> LimitRow:
    def bytes_each(count: int, at: Stage = stage) -> Fraction:
        """Bytes of a param on each of so many ranks, without padding: a param a rank."""
        (size,) = model.sizes
        one = replace(model, sizes=(replace(size, elems=count),))
        one = one.with_choice(ranks=count, stage=at, redundancy=1)
        footprint = footprint_of(
            one.laid_out(), scenario=one.scenario, rank=0, has_masters=has_masters
        )
        return Fraction(footprint.total, count)

    # Bytes are kept + sharded / N, so that two numbers of ranks give both terms.
    limit = 2 * bytes_each(2) - bytes_each(1)
    return LimitRow(
        name=name,
        unsharded=round(bytes_each(1, at=0) * model.elems),
        by_ranks={count: round(bytes_each(count) * model.elems) for count in ranks},
        limit=round(limit * model.elems),
    )
