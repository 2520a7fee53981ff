"""Builds the buffer map of a finding from the places that ranks report.

The map only contains integers and names. `zero_sim.report` draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple

from zero_sim.findings.compare import SPANS_MAX
from zero_sim.findings.records import BufferMap, Finding, MappedBucket, MappedPiece, MappedShard
from zero_sim.targets import Place

PIECES_MAX = 512
"""Largest number of pieces in a map. If there are more, it shows those around the difference."""

DIFFER_MAX = 512
"""Largest number of marked spans in a map."""

Span = tuple[int, int]


def build_buffer_map(
    first: Finding, *, found: Sequence[Finding], places: Mapping[int, Sequence[Place]]
) -> BufferMap | None:
    """Return the buffer map of a finding.

    Args:
        first: The finding to show.
        found: All findings of its check, including `first`. The map marks all their differences.
        places: Places by rank, for the ranks that share the finding's param. Ranks as in findings.

    Returns:
        None if no rank reports a flat buffer that contains the finding.
    """
    # In rank order, so that the map does not depend on the order of reports.
    owned = [
        located
        for rank in sorted(places)
        for place in places[rank]
        for located in _locate(rank, place)
    ]
    inside = _buffer_of(first, owned)
    if not inside:
        return None
    # A param may have parts in other buffers, too. Their differences are not marked here.
    own, elsewhere = _spans_by_param(inside), _spans_by_param(set(owned).difference(inside))
    outside = {name: _without(spans, own.get(name, ())) for name, spans in elsewhere.items()}
    whole = _whole_map(inside)
    pieces, elems = whole.pieces, whole.elems
    found = [finding for finding in found if _flat([finding], pieces, outside)]
    differ = _flat(found, pieces, outside)
    # All differences lie in other buffers.
    if not differ:
        return None
    # Center on the finding itself, or on any difference if it lies outside all pieces.
    start, stop = _window(pieces, differ=_flat([first], pieces, outside) or differ, elems=elems)
    # No window meets an empty bucket or shard at an end, so a whole map must not filter.
    is_whole = (start, stop) == (0, elems)
    return replace(
        whole,
        check=first.check,
        start=start,
        stop=stop,
        buckets=tuple(b for b in whole.buckets if is_whole or _meets(b, start, stop)),
        shards=tuple(s for s in whole.shards if is_whole or _meets(s, start, stop)),
        pieces=tuple(p for p in pieces if is_whole or _meets(p, start, stop)),
        padding=_cut(whole.padding, start, stop),
        unowned=_cut(whole.unowned, start, stop),
        differ=_cut(differ, start, stop)[:DIFFER_MAX],
        differ_cut=len(_cut(differ, start, stop)) > DIFFER_MAX
        # Findings keep at most SPANS_MAX spans, so a finding with that many may have more.
        or any(len(finding.differ_spans) == SPANS_MAX for finding in found),
        differ_ranks=tuple(sorted({f.rank for f in found if f.rank is not None})),
    )


def map_buffer(places: Mapping[int, Sequence[Place]]) -> BufferMap:
    """Return the map of flat buffer 0, without a finding.

    Args:
        places: Places by rank, for the ranks that share the buffer. At least one has an offset.
    """
    return _whole_map(
        [
            located
            for rank, owned in sorted(places.items())
            for place in owned
            for located in _locate(rank, place)
            if place.buffer == 0
        ]
    )


class _Located(NamedTuple):
    """A place with a reported position in the flat buffer."""

    rank: int
    place: Place
    flat_start: int
    bucket: int
    shard: int
    shard_start: int
    shard_stop: int


def _buffer_of(first: Finding, owned: Sequence[_Located]) -> list[_Located]:
    """Return all places in the flat buffer that contains the first differing element."""
    of_param = [each for each in owned if each.place.param == first.param]
    offset = first.offset_in_param or 0
    holding = [each for each in of_param if each.place.start <= offset < each.place.stop]
    # An unowned element has no place, so fall back to the buffer with the rest of its param.
    at = next(iter(holding or of_param), None)
    if at is None:
        return []
    inside = [each for each in owned if each.place.buffer == at.place.buffer]
    spans = sorted((bucket.start, bucket.stop) for bucket in _buckets(inside))
    if any(stop > start for (_, stop), (start, _) in pairwise(spans)):
        # Buckets overlap if offsets restart in each, so treat this bucket as a buffer.
        return [each for each in inside if each.bucket == at.bucket]
    return inside


def _whole_map(inside: Sequence[_Located]) -> BufferMap:
    pieces, buckets = _pieces(inside), _buckets(inside)
    padding, unowned = _gaps([each.place for each in inside], pieces, buckets)
    elems = max(bucket.stop for bucket in buckets)
    return BufferMap(
        buffer=inside[0].place.buffer,
        elems=elems,
        start=0,
        stop=elems,
        buckets=tuple(buckets),
        shards=tuple(_shards(inside)),
        pieces=tuple(pieces),
        padding=tuple(padding),
        unowned=tuple(unowned),
        differ=(),
        differ_cut=False,
        differ_ranks=(),
    )


def _spans_by_param(located: Iterable[_Located]) -> dict[str, list[Span]]:
    """Return merged spans by param."""
    spans: dict[str, list[Span]] = {}
    for each in located:
        spans.setdefault(each.place.param, []).append((each.place.start, each.place.stop))
    return {param: _merged(of_param) for param, of_param in spans.items()}


def _locate(rank: int, place: Place) -> Iterator[_Located]:
    reported = (place.flat_start, place.bucket, place.shard, place.shard_start, place.shard_stop)
    # Positions are optional in the protocol. A place that lacks any of them cannot be drawn.
    known = [value for value in reported if value is not None]
    if len(known) == len(reported):
        yield _Located(rank, place, *known)


def _pieces(inside: Iterable[_Located]) -> list[MappedPiece]:
    spans = {
        # A set, because replicas report the same piece.
        (
            at.flat_start,
            at.flat_start + at.place.stop - at.place.start,
            at.place.param,
            at.place.start,
        )
        for at in inside
    }
    return [
        MappedPiece(param=param, start=start, stop=stop, param_start=param_start)
        for start, stop, param, param_start in sorted(spans)
        if start < stop
    ]


def _buckets(inside: Iterable[_Located]) -> list[MappedBucket]:
    spans: dict[int, Span] = {}
    for at in inside:
        start, stop = at.place.bucket_start, at.place.bucket_stop
        # Without reported bounds, take the bounds of all reported shards.
        if start is None or stop is None:
            start, stop = at.shard_start, at.shard_stop
        known = spans.get(at.bucket, (start, stop))
        spans[at.bucket] = (min(start, known[0]), max(stop, known[1]))
    return [MappedBucket(index=i, start=a, stop=b) for i, (a, b) in sorted(spans.items())]


def _shards(inside: Iterable[_Located]) -> list[MappedShard]:
    # Replicas report the same shard, so a shard may have several ranks.
    ranks: dict[tuple[int, int, int, int], list[int]] = {}
    for at in inside:
        holders = ranks.setdefault((at.shard_start, at.shard_stop, at.bucket, at.shard), [])
        if at.rank not in holders:
            holders.append(at.rank)
    return [
        MappedShard(index=shard, bucket=bucket, ranks=tuple(ranks[key]), start=start, stop=stop)
        for key in sorted(ranks)
        for start, stop, bucket, shard in [key]
    ]


def _gaps(
    places: Sequence[Place], pieces: Sequence[MappedPiece], buckets: Sequence[MappedBucket]
) -> tuple[list[Span], list[Span]]:
    """Return the spans outside all pieces: padding, then elements without an owner."""
    covered = _merged((piece.start, piece.stop) for piece in pieces)
    gaps = _without(_merged((bucket.start, bucket.stop) for bucket in buckets), covered)
    reported = [
        (place.padding_start, place.bucket_stop)
        for place in places
        if place.padding_start is not None and place.bucket_stop is not None
    ]
    # Unless all places report their padding, no gap can be blamed on a missing owner.
    padding = _merged(reported) if len(reported) == len(places) else gaps
    return padding, _without(gaps, padding)


def _flat(
    found: Iterable[Finding],
    pieces: Sequence[MappedPiece],
    outside: Mapping[str, Sequence[Span]],
) -> list[Span]:
    """Return the differing spans in this buffer, as offsets in it."""
    of_param: dict[str, list[MappedPiece]] = {}
    for piece in pieces:
        of_param.setdefault(piece.param, []).append(piece)
    return _merged(
        chain.from_iterable(
            _place_span(span, of_param[finding.param])
            for finding in found
            if finding.param in of_param
            for span in _without(finding.differ_spans, outside.get(finding.param, ()))
        )
    )


def _place_span(span: Span, pieces: Sequence[MappedPiece]) -> list[Span]:
    found: list[Span] = []
    left = [span]
    for piece in pieces:
        shift = piece.start - piece.param_start
        stop = piece.param_start + piece.stop - piece.start
        start, end = max(span[0], piece.param_start), min(span[1], stop)
        if start < end:
            found.append((start + shift, end + shift))
            left = _without(left, [(start, end)])
    # Elements without an owner: place them as if the param were contiguous.
    shift = pieces[0].start - pieces[0].param_start
    return found + [(start + shift, stop + shift) for start, stop in left if start + shift >= 0]


def _window(pieces: Sequence[MappedPiece], *, differ: Sequence[Span], elems: int) -> Span:
    if len(pieces) <= PIECES_MAX:
        return 0, elems
    # Center on the piece with the first difference.
    at = sum(piece.start <= differ[0][0] for piece in pieces) - 1
    low = max(0, min(at - PIECES_MAX // 2, len(pieces) - PIECES_MAX))
    high = low + PIECES_MAX
    start = 0 if low == 0 else pieces[low].start
    return start, elems if high == len(pieces) else pieces[high - 1].stop


def _meets(part: MappedBucket | MappedShard | MappedPiece, start: int, stop: int) -> bool:
    return part.start < stop and start < part.stop


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    # Sorted, so touching or overlapping spans are neighbours.
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Return spans minus holes; both sorted and disjoint."""
    found: list[Span] = []
    first = 0
    for begin, stop in spans:
        start = begin
        # Spans are sorted, so a hole before this span is before all later spans, too.
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        for hole_start, hole_stop in holes[first:]:
            if hole_start >= stop:
                break
            if start < hole_start:
                found.append((start, hole_start))
            start = max(start, hole_stop)
        if start < stop:
            found.append((start, stop))
    return found


def _cut(spans: Iterable[Span], start: int, stop: int) -> tuple[Span, ...]:
    cut = ((max(a, start), min(b, stop)) for a, b in spans)
    return tuple((a, b) for a, b in cut if a < b)
