"""Where each element stands in the call that reduced it: what a ring's order depends on.

The reference knows no buffers; where the order model needs positions, it is told them as facts that
were observed on the running system.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zero_sim.reference import RingSpan
from zero_sim.targets import Place


def ring_spans(places: Iterable[Place], *, world_size: int) -> dict[str, list[RingSpan]]:
    """The ring position of every element of every param.

    Args:
        places: What all ranks own, each element once.
        world_size: Size of the group that reduced.

    Returns:
        By param, spans of its flattened elements with the group rank on which their sum ends.
    """
    spans: dict[str, list[RingSpan]] = {}
    for place in places:
        spans.setdefault(place.param, []).extend(_spans_of(place, world_size))
    return spans


def _spans_of(place: Place, world_size: int) -> Iterator[RingSpan]:
    chunk_elems = -(-place.call_elems // world_size)
    start = place.start
    while start < place.stop:
        offset = place.call_offset + start - place.start
        chunk = offset // chunk_elems
        stop = min(place.stop, start + (chunk + 1) * chunk_elems - offset)
        # A reduce-scatter's chunk ends on its destination; an all-reduce's on the rank before.
        ends_on = chunk if place.reduced_by == "reduce_scatter" else (chunk - 1) % world_size
        yield RingSpan(start=start, stop=stop, chunk=ends_on)
        start = stop
