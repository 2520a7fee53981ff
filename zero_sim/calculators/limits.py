"""Limits: bytes per rank by number of ranks, and their limit as ranks grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zero_sim.calculators.counted import Model, Stage, counted_model
from zero_sim.calculators.footprint import footprint_of

PARAMS = 10**10
"""Default number of params in the table: 160 GB on one device, in bf16 or fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitRow:
    """Bytes per rank with a sharding, for several numbers of ranks."""

    name: str
    unsharded: int
    """Bytes on one device, between two steps."""
    by_ranks: Mapping[int, int]
    """Bytes per rank, by number of ranks."""
    limit: int
    """Bytes per rank with infinitely many ranks."""

    def as_dict(self) -> dict[str, object]:
        """Return the row for JSON."""
        return {
            "name": self.name,
            "unsharded": self.unsharded,
            "bytes_by_ranks": {str(ranks): count for ranks, count in self.by_ranks.items()},
            "limit": self.limit,
        }


def limit_rows(
    model: Model, *, ranks: Sequence[int], stages: Sequence[Stage], has_masters: bool = True
) -> list[LimitRow]:
    """Return a row for each stage, and an fp32 row in which only the moments are sharded.

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
    # Stage 1 shards masters and moments, so without masters it shards only the moments.
    plain = counted_model(model.elems, dtype="fp32")
    moments = _row("fp32, moments alone", plain, ranks=ranks, stage=1, has_masters=False)
    return [*rows, moments]


def _row(
    name: str, model: Model, *, ranks: Sequence[int], stage: Stage, has_masters: bool
) -> LimitRow:
    def bytes_each(count: int, at: Stage = stage) -> Fraction:
        """Return bytes per param on each of `count` ranks."""
        # A param per rank, so that no padding disturbs the limit.
        (size,) = model.sizes
        one = replace(model, sizes=(replace(size, elems=count),))
        one = one.with_choice(ranks=count, stage=at, redundancy=1)
        footprint = footprint_of(
            one.laid_out(), scenario=one.scenario, rank=0, has_masters=has_masters
        )
        return Fraction(footprint.total, count)

    # bytes(N) = kept + sharded / N, so 2 * bytes(2) - bytes(1) = kept. Fractions keep it exact.
    limit = 2 * bytes_each(2) - bytes_each(1)
    return LimitRow(
        name=name,
        unsharded=round(bytes_each(1, at=0) * model.elems),
        by_ranks={count: round(bytes_each(count) * model.elems) for count in ranks},
        limit=round(limit * model.elems),
    )
