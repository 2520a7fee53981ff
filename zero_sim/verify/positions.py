"""Where each element stands in the calls that reduce it: what most orders of addition depend on.

The reference knows no buffers; where the order model needs positions, it is told them as facts that
were observed on the running system.
"""

from __future__ import annotations

from collections.abc import Iterable

from zero_sim.errors import UsageError
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
    shard, kind = _told(place.shard, place), place.reduced_by
    if kind == "reduce_scatter_list":
        # Every rank's entry is a tensor of its own.
        return SumSite(kind="reduce_scatter_list", **_in_shard(place), ends_on=shard)
    return SumSite(
        kind=kind or "all_reduce",
        elems=_told(place.call_elems, place),
        offset=_told(place.call_offset, place),
        ends_on=0 if kind == "all_reduce" else shard,
        joined_elems=place.joined_elems,
        joined_offset=place.joined_offset,
    )


def _replica_site_of(place: Place) -> SumSite:
    return SumSite(kind="all_reduce", **_in_shard(place))


def _in_shard(place: Place) -> dict[str, int]:
    start = _told(place.shard_start, place)
    return {
        "elems": _told(place.shard_stop, place) - start,
        "offset": _told(place.flat_start, place) - start,
    }


def _told(value: int | None, place: Place) -> int:
    if value is None:
        raise UsageError(
            f"expected a target that tells where param {place.param!r} lies in the calls that "
            "reduce it, because the order of addition depends on that, but it does not. Try "
            'world.order = "linear".'
        )
    return value
