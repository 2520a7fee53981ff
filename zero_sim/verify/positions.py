"""Where each element stands in the calls that reduce it: what most orders of addition depend on.

The reference knows no buffers; where the order model needs positions, it is told them as facts that
were observed on the running system.
"""

from __future__ import annotations

from collections.abc import Iterable

from zero_sim.reference import SumSite, SumSpan
from zero_sim.targets import Place


def sum_spans(places: Iterable[Place], *, replica_count: int) -> dict[str, list[SumSpan]]:
    """Where every element of every param stands in the sums over the ranks.

    Args:
        places: What the ranks of one replica own, each element once.
        replica_count: Number of replicas, whose shards are summed by a second all-reduce.

    Returns:
        By param, spans of its flattened elements.
    """
    spans: dict[str, list[SumSpan]] = {}
    for place in places:
        spans.setdefault(place.param, []).append(
            SumSpan(
                start=place.start,
                stop=place.stop,
                site=_site_of(place),
                replica_site=_replica_site_of(place) if replica_count > 1 else None,
            )
        )
    return spans


def _site_of(place: Place) -> SumSite:
    if place.reduced_by == "reduce_scatter_list":
        # Every rank's entry is a tensor of its own.
        return SumSite(
            kind=place.reduced_by,
            elems=place.shard_stop - place.shard_start,
            offset=place.flat_start - place.shard_start,
            ends_on=place.shard,
        )
    return SumSite(
        kind=place.reduced_by,
        elems=place.call_elems,
        offset=place.call_offset,
        ends_on=0 if place.reduced_by == "all_reduce" else place.shard,
        joined_elems=place.joined_elems,
        joined_offset=place.joined_offset,
    )


def _replica_site_of(place: Place) -> SumSite:
    return SumSite(
        kind="all_reduce",
        elems=place.shard_stop - place.shard_start,
        offset=place.flat_start - place.shard_start,
    )
