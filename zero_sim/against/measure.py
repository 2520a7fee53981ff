"""Keeps what one run observed, and measures how far another run is from it.

[Note: tensors that need not be kept]
Params of replicas are equal on all ranks, and those that a forward uses are those that the step
before left. A tensor that has the bits of one that is kept already is kept once. Of a run that is
measured only tensors that differ are kept.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero_sim.against.gathers import GatherLog, gathered
from zero_sim.against.points import LOCALISING, Moment, Piece, Point, Sink
from zero_sim.against.whole import Whole, relative_difference, whole_of
from zero_sim.replicas.rows import digest_of

FLOOR = 2.0**-52
"""Relative rounding that each tensor is granted: one unit in the last place of float64."""
LIMIT = 2.0**14.5
"""Multiple of rounding above which a tensor differs: half of the 29 bits of float64 beyond
float32, so a script's own rounding and its faults lie on both sides at equal distance."""


_STATE_DICT = re.compile(r"\bstate\.\d+\.")
"""Names of an optimizer's state in its state_dict, within a checkpoint."""


class Baseline(Sink):
    """Keeps the tensors of the run that others are compared with.

    Args:
        by_rank: True if a rank has the same part of each tensor in all runs, so tensors that differ
            among ranks are compared rank by rank. Else nobody knows which places they have.
    """

    def __init__(self, *, by_rank: bool = False) -> None:
        self.gathers = GatherLog()
        """Gathers of the run."""
        self._by_rank = by_rank
        self._alike: dict[Point, bool] = {}
        self.pieces: dict[Point, dict[int, Piece]] = defaultdict(dict)
        self._latest: dict[str, Piece] = {}
        self._wholes: dict[Point, Whole | None] = {}

    def wants(self, point: Point) -> bool:
        """All points; a later observation of one replaces the earlier."""
        return True

    def forget(self) -> None:
        """Forget all tensors."""
        for each in (self.pieces, self._latest, self._wholes):
            each.clear()

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Keep a piece."""
        others = self.pieces[point]
        known = (each.values for each in (self._latest.get(point.name), *others.values()) if each)
        same = next((each for each in known if torch.equal(each, piece.values)), None)
        values = piece.values.clone() if same is None else same
        others[rank] = self._latest[point.name] = replace(piece, values=values)

    def whole(self, point: Point) -> Whole | None:
        """The whole tensor at a point; None if its shards cannot be put together."""
        if point not in self._wholes:
            self._wholes[point] = whole_of(self.pieces[point]) if point in self.pieces else None
        return self._wholes[point]

    def start(self, *moments: Moment) -> dict[str, Tensor]:
        """Params at their first forward, or their first of some moments, by name."""
        found: dict[str, Tensor] = {}
        for point in sorted(self.pieces):
            if point.moment in (moments or ("forward",)) and point.name not in found:
                tensor = self.expected(point)
                if tensor is not None:
                    found[point.name] = tensor
        return found

    def start_digests(self) -> dict[str, str]:
        """Digests of params at their first forward, by name; empty if compared rank by rank."""
        starts = {} if self._by_rank else self.start("forward", "evaluation")
        return {name: digest_of(values) for name, values in starts.items()}

    @property
    def comparable(self) -> set[Point]:
        """Points whose whole tensor is known."""
        return {point for point in self.pieces if self.expected(point) is not None}

    def expected(self, point: Point, rank: int | None = None) -> Tensor | None:
        """The tensor to compare a rank's with; None if the places of its elements are not known."""
        whole = self.whole(point)
        if whole is None:
            return None
        lowest = whole.candidates[min(whole.candidates)]
        if whole.kind == "replicated" and not self.is_alike(point):
            own = lowest if rank is None else whole.candidates.get(rank)
            return own if self._by_rank else None
        return lowest

    def is_alike(self, point: Point) -> bool:
        """True if all ranks have the same values of a tensor that is not sharded."""
        if point not in self._alike:
            whole = self.whole(point)
            values = [] if whole is None else list(whole.candidates.values())
            self._alike[point] = all(torch.equal(each, values[0]) for each in values)
        return self._alike[point]


def _all_same(ranks: Mapping[int, float], kept: Mapping[int, Piece]) -> bool:
    """True if all ranks have one tensor that differs from the baseline's."""
    values = [piece.values for piece in kept.values()]
    return len(kept) == len(ranks) and all(torch.equal(each, values[0]) for each in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """How far a run's tensor is from the baseline's."""

    kind: str
    """`replicated` or `sharded`."""
    relative: float
    """Largest difference over the largest value expected, of all ranks."""
    reduced_relative: float | None = None
    """For gradients that differ among ranks: the same for their mean."""


class Measurement(Sink):
    """Measures one run against a baseline while it runs.

    Args:
        baseline: What it is compared with.
        keep_above: Relative difference above which a rank's tensor is kept.
    """

    def __init__(self, baseline: Baseline, *, keep_above: float = FLOOR * LIMIT) -> None:
        self.measured: dict[Point, Measured] = {}
        self.kept: dict[Point, dict[int, Piece]] = defaultdict(dict)
        self.unobserved: set[Point] = set()
        """Points whose shards could not be put together."""
        self.left_out: set[Point] = set()
        """Points that are not compared, because one run ended before them."""
        self._baseline = baseline
        self._keep_above = keep_above
        self._joined: dict[Point, tuple[Tensor, Whole]] = {}
        """Expected and got, flat, for shards whose places only gathers show."""
        self._ranks: dict[Point, dict[int, float]] = defaultdict(dict)

    def forget(self) -> None:
        """Forget all tensors."""
        for each in (self.measured, self.kept, self.unobserved, self._joined, self._ranks):
            each.clear()

    def wants(self, point: Point) -> bool:
        """Points that the baseline has."""
        return point in self._baseline.pieces

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Measure a piece, or keep it until all ranks have theirs."""
        expected = self._baseline.expected(point, rank)
        ranks, kept = self._ranks[point], self.kept[point]
        # An earlier backward of the step may have had all of it.
        ranks.pop(rank, None)
        kept.pop(rank, None)
        is_whole = not piece.shards and not piece.is_partial
        if expected is not None and is_whole and piece.values.shape == expected.shape:
            ranks[rank] = relative_difference(piece.values, expected)
        if rank not in ranks or ranks[rank] > self._keep_above:
            kept[rank] = replace(piece, values=piece.values.clone())

    def finish(self, gathers: GatherLog) -> None:
        """Put shards together, after a run and its gathers."""
        for point in {*self._ranks, *self.kept}:
            if point.moment == "state" or _STATE_DICT.search(point.name):
                self._drop_unused(point)
            ranks, kept = self._ranks.get(point, {}), self.kept.get(point, {})
            if kept and set(kept) - set(ranks):
                self._measure_shards(point, kept, gathers)
            else:
                if any(piece.is_buffer for piece in kept.values()) and not _all_same(ranks, kept):
                    self.unobserved.add(point)
                    continue
                reduced = self._of_mean(point, ranks, kept)
                self.measured[point] = Measured(
                    kind="replicated", relative=max(ranks.values()), reduced_relative=reduced
                )

    @property
    def absent(self) -> list[str]:
        """Params that the baseline has at its end and no rank of this run does."""
        met = {*self._ranks, *self.kept, *self.measured, *self.unobserved}
        return sorted(
            point.name
            for point, pieces in self._baseline.pieces.items()
            if point.moment == "end"
            and point not in met
            and not any(piece.is_buffer for piece in pieces.values())
        )

    def is_alike(self, point: Point) -> bool:
        """True if all ranks have one tensor at a point that differs, or its shards."""
        ranks = self._ranks.get(point, {})
        return not ranks or _all_same(ranks, self.kept.get(point, {}))

    def compared(self, point: Point) -> tuple[Tensor, Whole]:
        """The expected tensor, and those that ranks have at a point that differs."""
        if point in self._joined:
            return self._joined[point]
        whole, expected = whole_of(self.kept[point]), self._baseline.expected(point)
        assert whole is not None
        assert expected is not None
        if self._baseline.is_alike(point):
            return expected, whole
        # Of ranks whose tensors differ, the one that is farthest from its own.
        known = {rank: self._baseline.expected(point, rank) for rank in whole.candidates}
        rank, expected = max(
            ((rank, own) for rank, own in known.items() if own is not None),
            key=lambda item: relative_difference(whole.candidates[item[0]], item[1]),
        )
        return expected, replace(whole, candidates={rank: whole.candidates[rank]})

    def keep_steps(self, count: int) -> None:
        """Leave out what was observed after a number of steps, and checkpoints."""
        for point in self._baseline.pieces:
            if point.step >= count or point.moment in ("saved", "loaded"):
                self.left_out.add(point)
                self.measured.pop(point, None)

    def _drop_unused(self, point: Point) -> None:
        # Sharded optimizers give a rank that owns none of a group's params an empty slot. A rank
        # that owns a param and does not update its state has a wrong param, too.
        ranks, kept = self._ranks.get(point, {}), self.kept.get(point, {})
        unused = {rank for rank, piece in kept.items() if not piece.values.any()} & set(ranks)
        if any(ranks[rank] <= self._keep_above for rank in ranks if rank not in unused):
            for rank in unused:
                del ranks[rank], kept[rank]

    def _measure_shards(self, point: Point, kept: Mapping[int, Piece], gathers: GatherLog) -> None:
        expected, whole = self._baseline.expected(point), whole_of(kept)
        shapes = {each.shape for each in whole.candidates.values()} if whole is not None else set()
        if expected is None or whole is None or shapes != {expected.shape}:
            pair = gathered(
                point.name.partition(":")[0],
                expected=self._baseline.pieces[point],
                expected_log=self._baseline.gathers,
                got=kept,
                got_log=gathers,
            )
            if pair is None:
                self.unobserved.add(point)
                return
            expected, joined = pair
            whole = Whole(kind="sharded", candidates={0: joined})
            self._joined[point] = expected, whole
        relative = max(relative_difference(each, expected) for each in whole.candidates.values())
        self.measured[point] = Measured(kind=whole.kind, relative=relative)
        if relative <= self._keep_above:
            self._joined.pop(point, None)
        if relative <= self._keep_above or point in self._joined:
            self.kept.pop(point)

    def _of_mean(
        self, point: Point, ranks: Mapping[int, float], kept: Mapping[int, Piece]
    ) -> float | None:
        """How far the mean over ranks is off, if a gradient differs among them."""
        expected = self._baseline.expected(point)
        if point.moment not in LOCALISING or len(kept) < len(ranks) or expected is None:
            return None
        if not self._baseline.is_alike(point):
            return None
        values = [piece.values for piece in kept.values()]
        if len(values) < 2 or _all_same(ranks, kept):
            return None
        return relative_difference(torch.stack(values).mean(0), expected)
