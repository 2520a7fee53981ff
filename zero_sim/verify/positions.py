"""Where each element stands in the call that reduced it: what a ring's order depends on.

The reference knows no buffers; where the order model needs positions, it is told them as facts that
were observed on the running system.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zero_sim.reference import RingSpan
from zero_sim.targets import Place


def ring_spans(
    places: Iterable[Place], *, world_size: int, replica_count: int
) -> dict[str, list[RingSpan]]:
    """The ring position of every element of every param.

    Args:
        places: What the ranks of one replica own, each element once.
        world_size: Number of ranks.
        replica_count: Number of replicas, whose shards are summed by a second all-reduce.

    Returns:
        By param, spans of its flattened elements with the rank on which their sum ends.
    """
    spans: dict[str, list[RingSpan]] = {}
    for place in places:
        spans.setdefault(place.param, []).extend(_spans_of(place, world_size, replica_count))
    return spans


def _spans_of(place: Place, world_size: int, replica_count: int) -> Iterator[RingSpan]:
    if place.reduced_by == "all_reduce":
        for start, stop, ends_on in _chunks(place, place.call_offset, place.call_elems, world_size):
            yield RingSpan(start=start, stop=stop, chunk=ends_on)
        return
    # A reduce-scatter's sum ends on its destination; the shard then goes round the replicas.
    shard_elems = place.shard_stop - place.shard_start
    offset = place.flat_start - place.shard_start
    for start, stop, ends_on in _chunks(place, offset, shard_elems, replica_count):
        yield RingSpan(start=start, stop=stop, chunk=place.shard, replica_chunk=ends_on)


def _chunks(
    place: Place, offset: int, call_elems: int, rank_count: int
) -> Iterator[tuple[int, int, int]]:
    """Cut a place by the chunks of an all-reduce; each ends on the rank before its own number."""
    chunk_elems = -(-call_elems // rank_count)
    start = place.start
    while start < place.stop:
        here = offset + start - place.start
        chunk = here // chunk_elems
        stop = min(place.stop, start + (chunk + 1) * chunk_elems - here)
        yield start, stop, (chunk - 1) % rank_count
        start = stop
