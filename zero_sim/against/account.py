"""Account of a difference: wrong ranks and elements, their pattern, and the call they came from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor

from zero_sim.against.measure import FLOOR, Baseline, Measurement
from zero_sim.against.native_dtypes import native
from zero_sim.against.points import Piece, Point, Sink, dtype_name
from zero_sim.against.runs import observe
from zero_sim.against.verdict import Comparison
from zero_sim.findings.compare import spans_of
from zero_sim.findings.records import BufferMap, MappedBucket, MappedPiece, MappedShard
from zero_sim.sim.call import IN_PLACE, Call
from zero_sim.sim.log import CollectiveRecord

SEARCHED_ELEMS = 16
"""Consecutive elements to look for in collectives' results."""
KEPT_CALLS = 512
"""Latest calls per rank in which to look for a tensor."""
# Largest relative difference at which two float64 values count as equal. Rounding within a step
# stays below 1e-12, and unrelated tensors do not agree in 16 elements by chance.
_SAME = 1e-9
# World sizes and micro-batches cause simple factors, such as 1/8.
_DENOMINATOR_MAX = 4096
# A factor this close to 1 is printed as its distance from 1.
_NEAR_ONE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """Collective that wrote a rank's tensor."""

    rank: int
    call: str
    """Description of the call with the script's line; empty if no call of the rank wrote it."""
    start: int = 0
    """Start of the tensor in the result, in elements."""
    factor: float = 1.0
    """Tensor divided by result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Facts about the first difference."""

    ranks: tuple[int, ...]
    """Ranks whose tensor or shard differs."""
    world_size: int
    is_alike: bool
    """True if all these ranks have the same wrong tensor."""
    differ_count: int
    elems: int
    spans: tuple[tuple[int, int], ...]
    """Half-open spans of differing flat elements."""
    element: int
    """Worst element, as a flat index."""
    expected: float
    got: float
    manners: tuple[str, ...]
    """Patterns of the wrong elements, such as "every wrong element is 0"."""
    is_unreduced: bool
    """True if ranks did not reduce this param's gradient, although its mean over ranks is right."""
    feeds: tuple[Feed, ...]
    beside: tuple[str, ...]
    """Other differing tensors at the same point."""
    later_count: int
    picture: BufferMap


def account_of(comparison: Comparison) -> Account | None:
    """Analyse the first difference in one more run; None if no tensor differs."""
    measurement, differences = comparison.measurement, comparison.verdict.differences
    if measurement is None or comparison.way is None or not differences:
        return None
    prepared, side, first = comparison.prepared, comparison.side, differences[0]
    expected, whole = measurement.compared(first.point)
    # 64 times the measured rounding, so that rounded elements do not count as wrong.
    bound = max(first.rounding * 64, FLOOR * 64) * float(expected.abs().max() or 1.0)
    # The rank with the largest error.
    rank, got = max(
        whole.candidates.items(), key=lambda item: float((item[1] - expected).abs().max())
    )
    differs = ((got - expected).abs() > bound).reshape(-1)
    element = int((got - expected).abs().reshape(-1).argmax())
    spans = spans_of(differs)
    # Elements have owners if all shards lie along the first dimension. Then the faulty ranks are
    # known.
    owners = _owners(measurement.kept.get(first.point, {}), expected.shape)
    if whole.kind == "replicated":
        # Each rank has its own replica, which may be right.
        off = {rank: (each - expected).abs() > bound for rank, each in whole.candidates.items()}
        ranks = tuple(rank for rank, each in off.items() if bool(each.any()))
    else:
        ranks = tuple(
            rank
            for rank, (start, stop) in owners.items()
            if any(a < stop and b > start for a, b in spans)
        )
    # Results of calls are only in memory during a run, so run once more with a probe.
    probe = _Probe(first.point)
    way = replace(comparison.way, sink=probe, called=probe.called)
    observe(side, way, seed=prepared.seed)
    elems = expected.numel()
    # Without owners, the picture shows the whole tensor on each rank.
    places = owners or dict.fromkeys(range(side.world_size), (0, elems))
    same_point = [each for each in differences[1:] if each.point[:2] == first.point[:2]]
    return Account(
        ranks=ranks,
        world_size=side.world_size,
        is_alike=all(torch.equal(each, got) for each in whole.candidates.values()),
        differ_count=int(differs.sum()),
        elems=elems,
        spans=spans,
        element=element,
        expected=float(expected.reshape(-1)[element]),
        got=float(got.reshape(-1)[element]),
        manners=tuple(_manners(prepared.baseline, first.point, expected, got, differs)),
        is_unreduced=_is_unreduced(measurement, first.point),
        feeds=tuple(probe.feeds[each] for each in ranks or (rank,) if each in probe.feeds),
        beside=tuple(each.point.name for each in same_point),
        later_count=len(differences) - 1 - len(same_point),
        picture=_picture(first.point.name, elems, places, spans=spans, ranks=ranks),
    )


def _owners(pieces: Mapping[int, Piece], shape: torch.Size) -> dict[int, tuple[int, int]]:
    """Return each rank's flat span; empty unless tensors are only sharded along dimension 0."""
    if not len(shape) or any([dim for dim, _, _ in each.shards] != [0] for each in pieces.values()):
        return {}
    is_flat = any(piece.is_flat for piece in pieces.values())
    row_elems = 1 if is_flat else math.prod(shape[1:])
    # Keyed by position in the shard group, because replicas have the same shard.
    sizes = {each.shards[0][1]: each.values.shape[0] * row_elems for each in pieces.values()}
    stops = dict(zip(sorted(sizes), accumulate(sizes[each] for each in sorted(sizes)), strict=True))
    places = {rank: piece.shards[0][1] for rank, piece in sorted(pieces.items())}
    return {rank: (stops[place] - sizes[place], stops[place]) for rank, place in places.items()}


def _manners(
    baseline: Baseline, point: Point, expected: Tensor, got: Tensor, differs: Tensor
) -> list[str]:
    wrong, right = got.reshape(-1)[differs], expected.reshape(-1)[differs]
    found: list[str] = []
    if not bool(wrong.any()):
        found.append("every wrong element is 0")
    factor = _factor(wrong, right)
    if factor is not None:
        found.append(f"every wrong element is {factor} times the expected one")
    # A missing or early copy leaves the last step's value.
    before = baseline.expected(point._replace(step=point.step - 1))
    if before is not None and before.shape == expected.shape:
        old = before.reshape(-1)[differs]
        if _close(wrong, old) and not _close(right, old):
            found.append(f"it is stale: the value of step {point.step}")
    if expected.numel() > 2 and wrong.numel() > 1:
        found += [
            f"the elements are shifted by {shift}"
            # A wrong shard offset shifts elements by one.
            for shift in (1, -1)
            if _close(wrong, expected.reshape(-1).roll(shift)[differs])
        ]
    return found


def _factor(wrong: Tensor, right: Tensor) -> str | None:
    """Return the factor common to all wrong elements, as a fraction if it is simple."""
    if not bool(right.all()) or not bool(wrong.any()):
        # A zero has no ratio. All zeros are reported elsewhere.
        return None
    ratios = wrong / right
    middle = float(ratios.median())
    if not bool(((ratios - middle).abs() <= _SAME * abs(middle)).all()):
        return None
    # Factors such as 2, 1/4 or 3/2 point to a world size or micro-batch count.
    simple = Fraction(middle).limit_denominator(_DENOMINATOR_MAX)
    is_simple = abs(float(simple) - middle) <= _SAME * abs(middle)
    if wrong.numel() < 2 and not (is_simple and 1 in (simple.numerator, simple.denominator)):
        return None  # One element is a multiple of any other, so only 1/n and n have a meaning.
    if is_simple and simple != 1:
        return str(simple)
    return f"1 {middle - 1:+.3g}" if abs(middle - 1) < _NEAR_ONE else f"{middle:.9g}"


def _close(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= _SAME * other.abs().max()).all())


def _is_unreduced(measurement: Measurement, point: Point) -> bool:
    name = point.name.partition(":")[0]
    return any(
        each.name == name
        # A forward uses params that the last step computed from gradients.
        and each.step == point.step - (point.moment == "forward")
        and measured.reduced_relative is not None
        and measured.reduced_relative <= _SAME < measured.relative
        for each, measured in measurement.measured.items()
    )


class _Probe(Sink):
    """Search for the source of a tensor among collectives, when the tensor is observed."""

    def __init__(self, point: Point) -> None:
        self.feeds: dict[int, Feed] = {}
        self._point = point
        self._calls: dict[int, deque[tuple[CollectiveRecord, Sequence[Tensor]]]] = {}

    def wants(self, point: Point) -> bool:
        """Return True for the probed point."""
        return point == self._point

    def forget(self) -> None:
        """Forget all calls, because the script runs again with other settings."""
        self.feeds.clear()
        self._calls.clear()

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Keep a call with the tensors it writes."""
        written = call.inputs if call.kind in IN_PLACE else call.outputs
        calls = self._calls.setdefault(record.rank, deque(maxlen=KEPT_CALLS))
        if written:
            # With the script's dtype, because all tensors are stored in float64 here.
            calls.append((record._replace(dtype=dtype_name(native(written[0]))), written))

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Search a rank's calls for the tensor, latest first."""
        feed = Feed(rank=rank, call="")
        for record, tensors in reversed(self._calls.get(rank, ())):
            match = next(filter(None, (_match(piece.values, each) for each in tensors)), None)
            if match is not None:
                # Calls by torch's C++ code (DDP's reducer) have no native dtype, so show none.
                call = record.text.replace("(float64, ", "(")
                feed = replace(feed, call=call, start=match[0], factor=match[1])
                break
        self.feeds[rank] = feed


def _match(tensor: Tensor, result: Tensor) -> tuple[int, float] | None:
    """Return a tensor's start in a result, and tensor divided by result; None if not found."""
    if not result.is_floating_point() or not result.untyped_storage().nbytes():
        return None
    wanted, held = tensor.reshape(-1), result.detach().to(torch.float64).reshape(-1)
    if wanted.numel() < 2 or held.numel() < wanted.numel() or not bool(wanted.any()):
        return None
    # Search for the window around the largest element, which is the least likely to be padding.
    count = min(wanted.numel(), SEARCHED_ELEMS)
    start = max(0, min(int(wanted.abs().argmax()), wanted.numel() - count))
    part = wanted[start : start + count]
    largest = int(part.abs().argmax())
    # All windows at once: [positions, count].
    windows = held.unfold(0, count, 1)
    factors = windows[:, largest] / part[largest]
    off = (windows - factors[:, None] * part).abs()
    # A window may be a multiple, because a script may scale before or after the call.
    fits = (off <= _SAME * windows.abs().amax(1, keepdim=True)).all(1) & (factors != 0)
    places = fits.nonzero().reshape(-1)
    if not len(places) or int(places[0]) < start:
        return None
    return int(places[0]) - start, 1 / float(factors[places[0]])


def _picture(
    param: str,
    elems: int,
    owners: Mapping[int, tuple[int, int]],
    *,
    spans: Sequence[tuple[int, int]],
    ranks: Sequence[int],
) -> BufferMap:
    """Return a buffer map of the tensor with its shards and differing spans."""
    shards: dict[tuple[int, int], list[int]] = {}
    for rank, span in owners.items():
        shards.setdefault(span, []).append(rank)
    return BufferMap(
        check="against",
        buffer=0,
        elems=elems,
        start=0,
        stop=elems,
        buckets=(MappedBucket(index=0, start=0, stop=elems),),
        shards=tuple(
            MappedShard(index=index, bucket=0, ranks=tuple(held), start=start, stop=stop)
            for index, ((start, stop), held) in enumerate(sorted(shards.items()))
        ),
        pieces=(MappedPiece(param=param, start=0, stop=elems, param_start=0),),
        padding=(),
        unowned=(),
        differ=tuple(spans),
        differ_cut=False,
        differ_ranks=tuple(ranks),
    )
