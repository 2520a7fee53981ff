"""Kept tensors of one run, and the distance of another run from them.

[Note: tensors that need not be kept]
Params of replicas are equal on all ranks, and the params of a forward are those of the step before.
So a tensor with the same bits as a kept one is stored once. For a measured run, only tensors that
differ are kept.
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
"""Relative rounding granted to each tensor: one unit in the last place of float64."""
LIMIT = 2.0**14.5
"""Multiple of rounding above which a tensor differs. Half of the 29 bits by which float64 exceeds
float32, so that the script's own rounding and its faults have the same distance from it."""


# Names of optimizer state in a checkpoint's optimizer state_dict, by param number.
_STATE_DICT = re.compile(r"\bstate\.\d+\.")


class Baseline(Sink):
    """Tensors of the run that other runs are compared with.

    Args:
        by_rank: True if a rank has the same part of each tensor in all runs, so that tensors that
            differ among ranks can be compared rank by rank. Otherwise their places are unknown.
    """

    def __init__(self, *, by_rank: bool = False) -> None:
        self.gathers = GatherLog()
        """Log of the run's gathers."""
        self._by_rank = by_rank
        self._alike: dict[Point, bool] = {}
        self.pieces: dict[Point, dict[int, Piece]] = defaultdict(dict)
        self._latest: dict[str, Piece] = {}
        self._wholes: dict[Point, Whole | None] = {}

    def wants(self, point: Point) -> bool:
        """Return True: all points are kept, and a later observation replaces an earlier one."""
        return True

    def forget(self) -> None:
        """Forget all tensors."""
        for each in (self.pieces, self._latest, self._wholes):
            each.clear()

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Keep a piece."""
        # Compared with the point's other ranks, and with the name's last value; see the note above.
        others = self.pieces[point]
        known = (each.values for each in (self._latest.get(point.name), *others.values()) if each)
        same = next((each for each in known if torch.equal(each, piece.values)), None)
        values = piece.values.clone() if same is None else same
        others[rank] = self._latest[point.name] = replace(piece, values=values)

    def whole(self, point: Point) -> Whole | None:
        """Return the whole tensor at a point; None if its shards cannot be assembled."""
        if point not in self._wholes:
            self._wholes[point] = whole_of(self.pieces[point]) if point in self.pieces else None
        return self._wholes[point]

    def start(self, *moments: Moment) -> dict[str, Tensor]:
        """Return params at their first forward, or at the first of some moments, by name."""
        found: dict[str, Tensor] = {}
        for point in sorted(self.pieces):
            # Sorted by step, so the first one is the earliest.
            if point.moment in (moments or ("forward",)) and point.name not in found:
                tensor = self.expected(point)
                if tensor is not None:
                    found[point.name] = tensor
        return found

    def start_digests(self) -> dict[str, str]:
        """Return digests of params at their first forward, by name; empty if compared by rank."""
        starts = {} if self._by_rank else self.start("forward", "evaluation")
        return {name: digest_of(values) for name, values in starts.items()}

    @property
    def comparable(self) -> set[Point]:
        """Points with a known whole tensor."""
        return {point for point in self.pieces if self.expected(point) is not None}

    def expected(self, point: Point, rank: int | None = None) -> Tensor | None:
        """Return the tensor to compare a rank's with; None if its elements' places are unknown."""
        whole = self.whole(point)
        if whole is None:
            return None
        lowest = whole.candidates[min(whole.candidates)]
        # Unequal values of an unsharded tensor, such as a gradient before its reduction.
        if whole.kind == "replicated" and not self.is_alike(point):
            own = lowest if rank is None else whole.candidates.get(rank)
            return own if self._by_rank else None
        return lowest

    def is_alike(self, point: Point) -> bool:
        """Return True if all ranks have the same values of a tensor that is not sharded."""
        if point not in self._alike:
            whole = self.whole(point)
            values = [] if whole is None else list(whole.candidates.values())
            self._alike[point] = all(torch.equal(each, values[0]) for each in values)
        return self._alike[point]


def _all_same(ranks: Mapping[int, float], kept: Mapping[int, Piece]) -> bool:
    """Return True if all ranks have the same differing tensor."""
    values = [piece.values for piece in kept.values()]
    return len(kept) == len(ranks) and all(torch.equal(each, values[0]) for each in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Distance of a run's tensor from the baseline's."""

    kind: str
    """`replicated` or `sharded`."""
    relative: float
    """Largest difference divided by the largest expected value, over all ranks."""
    reduced_relative: float | None = None
    """The same for the mean over ranks; None unless a gradient differs among them."""


class Measurement(Sink):
    """Distances of one run from a baseline, measured while it runs.

    Args:
        baseline: Run to compare with.
        keep_above: Relative difference above which a rank's tensor is kept.
    """

    def __init__(self, baseline: Baseline, *, keep_above: float = FLOOR * LIMIT) -> None:
        self.measured: dict[Point, Measured] = {}
        self.kept: dict[Point, dict[int, Piece]] = defaultdict(dict)
        self.unobserved: set[Point] = set()
        """Points whose shards could not be assembled."""
        self.left_out: set[Point] = set()
        """Points that are not compared because one run ended before them."""
        self._baseline = baseline
        self._keep_above = keep_above
        self._joined: dict[Point, tuple[Tensor, Whole]] = {}
        """Expected and got tensors, flat, of shards whose places are known only from gathers."""
        self._ranks: dict[Point, dict[int, float]] = defaultdict(dict)

    def forget(self) -> None:
        """Forget all tensors."""
        for each in (self.measured, self.kept, self.unobserved, self._joined, self._ranks):
            each.clear()

    def wants(self, point: Point) -> bool:
        """Return True for points of the baseline."""
        return point in self._baseline.pieces

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Measure a piece, or keep it until all ranks have theirs."""
        expected = self._baseline.expected(point, rank)
        ranks, kept = self._ranks[point], self.kept[point]
        # A step may have several backwards, of which the last one counts.
        ranks.pop(rank, None)
        kept.pop(rank, None)
        is_whole = not piece.shards and not piece.is_partial
        if expected is not None and is_whole and piece.values.shape == expected.shape:
            ranks[rank] = relative_difference(piece.values, expected)
        if rank not in ranks or ranks[rank] > self._keep_above:
            kept[rank] = replace(piece, values=piece.values.clone())

    def finish(self, gathers: GatherLog) -> None:
        """Assemble shards, after the run and its gathers have ended."""
        for point in {*self._ranks, *self.kept}:
            if point.moment == "state" or _STATE_DICT.search(point.name):
                # State, also within a saved optimizer.
                self._drop_unused(point)
            ranks, kept = self._ranks.get(point, {}), self.kept.get(point, {})
            # Some rank's piece could not be compared alone: these are shards.
            if kept and set(kept) - set(ranks):
                self._measure_shards(point, kept, gathers)
            else:
                # Buffers that differ by rank, such as running means, cannot be compared.
                if any(piece.is_buffer for piece in kept.values()) and not _all_same(ranks, kept):
                    self.unobserved.add(point)
                    continue
                # A gradient before its reduction differs on each rank, although the mean may be
                # right.
                reduced = self._of_mean(point, ranks, kept)
                self.measured[point] = Measured(
                    kind="replicated", relative=max(ranks.values()), reduced_relative=reduced
                )

    @property
    def absent(self) -> list[str]:
        """Params at the baseline's end that no rank of this run has."""
        met = {*self._ranks, *self.kept, *self.measured, *self.unobserved}
        return sorted(
            point.name
            for point, pieces in self._baseline.pieces.items()
            if point.moment == "end"
            and point not in met
            and not any(piece.is_buffer for piece in pieces.values())
        )

    def is_alike(self, point: Point) -> bool:
        """Return True if all ranks have the same tensor at a point, or shards of it."""
        ranks = self._ranks.get(point, {})
        return not ranks or _all_same(ranks, self.kept.get(point, {}))

    def compared(self, point: Point) -> tuple[Tensor, Whole]:
        """Return the expected tensor and the ranks' tensors at a point that differs."""
        if point in self._joined:
            return self._joined[point]
        whole, expected = whole_of(self.kept[point]), self._baseline.expected(point)
        assert whole is not None
        assert expected is not None
        if self._baseline.is_alike(point):
            return expected, whole
        # If ranks' tensors differ, compare the one with the largest distance.
        known = {rank: self._baseline.expected(point, rank) for rank in whole.candidates}
        rank, expected = max(
            ((rank, own) for rank, own in known.items() if own is not None),
            key=lambda item: relative_difference(whole.candidates[item[0]], item[1]),
        )
        return expected, replace(whole, candidates={rank: whole.candidates[rank]})

    def keep_steps(self, count: int) -> None:
        """Exclude checkpoints, and observations after a number of steps."""
        for point in self._baseline.pieces:
            # Checkpoints as well, because they are saved after more steps on one side.
            if point.step >= count or point.moment in ("saved", "loaded"):
                self.left_out.add(point)
                self.measured.pop(point, None)

    def _drop_unused(self, point: Point) -> None:
        # Sharded optimizers give a rank that owns no param of a group an empty slot. This hides no
        # fault: a rank that owns a param and does not update its state has a wrong param as well.
        ranks, kept = self._ranks.get(point, {}), self.kept.get(point, {})
        unused = {rank for rank, piece in kept.items() if not piece.values.any()} & set(ranks)
        if any(ranks[rank] <= self._keep_above for rank in ranks if rank not in unused):
            for rank in unused:
                del ranks[rank], kept[rank]

    def _measure_shards(self, point: Point, kept: Mapping[int, Piece], gathers: GatherLog) -> None:
        expected, whole = self._baseline.expected(point), whole_of(kept)
        shapes = {each.shape for each in whole.candidates.values()} if whole is not None else set()
        # Placements that do not fit together: gathers may show the places instead.
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
        # Only tensors that differ stay in memory.
        if relative <= self._keep_above:
            self._joined.pop(point, None)
        if relative <= self._keep_above or point in self._joined:
            self.kept.pop(point)

    def _of_mean(
        self, point: Point, ranks: Mapping[int, float], kept: Mapping[int, Piece]
    ) -> float | None:
        """Return the relative error of the mean over ranks, if a gradient differs among them."""
        expected = self._baseline.expected(point)
        if point.moment not in LOCALISING or len(kept) < len(ranks) or expected is None:
            return None
        if not self._baseline.is_alike(point):
            return None
        values = [piece.values for piece in kept.values()]
        if len(values) < 2 or _all_same(ranks, kept):
            return None
        # [ranks, ...] to the mean, as an averaging reduction would compute it.
        return relative_difference(torch.stack(values).mean(0), expected)
