"""Tensors kept from one run, and their distances to the tensors of another run.

[Note: tensors that need not be kept]
Replicas have equal params, and a forward uses the params that the last step left. So a tensor with
the same bits as a kept tensor is not stored again. A measured run only keeps tensors that differ.
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
"""Relative rounding granted to each tensor: one unit in float64's last place."""
LIMIT = 2.0**14.5
"""Multiple of float64's rounding above which a tensor differs. float32's rounding is 2^29 times as
large, so the limit is in the middle, on a logarithmic scale."""


# Names of optimizer state in a checkpoint contain the param number.
_STATE_DICT = re.compile(r"\bstate\.\d+\.")


class Baseline(Sink):
    """Tensors of the expected run.

    Args:
        by_rank: True if a rank has the same part of each tensor in all runs. Then tensors that
            differ among ranks are compared rank by rank. Otherwise they are not compared.
    """

    def __init__(self, *, by_rank: bool = False) -> None:
        self.gathers = GatherLog()
        """The run's gathers."""
        self._by_rank = by_rank
        self._alike: dict[Point, bool] = {}
        self.pieces: dict[Point, dict[int, Piece]] = defaultdict(dict)
        self._latest: dict[str, Piece] = {}
        self._wholes: dict[Point, Whole | None] = {}

    def wants(self, point: Point) -> bool:
        """Return True, because all points are kept. A later observation replaces an earlier one."""
        return True

    def forget(self) -> None:
        """Forget all tensors."""
        for each in (self.pieces, self._latest, self._wholes):
            each.clear()

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Keep a piece."""
        # Compare with the other ranks, and with the name's last value; see the note above.
        others = self.pieces[point]
        known = (each.values for each in (self._latest.get(point.name), *others.values()) if each)
        same = next((each for each in known if torch.equal(each, piece.values)), None)
        values = piece.values.clone() if same is None else same
        others[rank] = self._latest[point.name] = replace(piece, values=values)

    def whole(self, point: Point) -> Whole | None:
        """Return the unsharded tensor at a point; None if its shards cannot be assembled."""
        if point not in self._wholes:
            self._wholes[point] = whole_of(self.pieces[point]) if point in self.pieces else None
        return self._wholes[point]

    def start(self, *moments: Moment) -> dict[str, Tensor]:
        """Return each param's first value, by name: at a forward, or at the given moments."""
        found: dict[str, Tensor] = {}
        for point in sorted(self.pieces):
            # Points sort by step, so the first is the earliest.
            if point.moment in (moments or ("forward",)) and point.name not in found:
                tensor = self.expected(point)
                if tensor is not None:
                    found[point.name] = tensor
        return found

    def start_digests(self) -> dict[str, str]:
        """Return digests of initial params by name; empty if runs are compared by rank."""
        starts = {} if self._by_rank else self.start("forward", "evaluation")
        return {name: digest_of(values) for name, values in starts.items()}

    @property
    def comparable(self) -> set[Point]:
        """Points with a tensor to compare with."""
        return {point for point in self.pieces if self.expected(point) is not None}

    def expected(self, point: Point, rank: int | None = None) -> Tensor | None:
        """Return the tensor to compare a rank's tensor with; None if there is none."""
        whole = self.whole(point)
        if whole is None:
            return None
        lowest = whole.candidates[min(whole.candidates)]
        # Ranks differ in an unsharded tensor, such as a gradient before its reduction.
        if whole.kind == "replicated" and not self.is_alike(point):
            own = lowest if rank is None else whole.candidates.get(rank)
            return own if self._by_rank else None
        return lowest

    def is_alike(self, point: Point) -> bool:
        """Return True if all ranks have equal copies of a tensor."""
        if point not in self._alike:
            whole = self.whole(point)
            values = [] if whole is None else list(whole.candidates.values())
            self._alike[point] = all(torch.equal(each, values[0]) for each in values)
        return self._alike[point]


def _all_same(ranks: Mapping[int, float], kept: Mapping[int, Piece]) -> bool:
    """Return True if every rank differs, and all have the same tensor."""
    values = [piece.values for piece in kept.values()]
    return len(kept) == len(ranks) and all(torch.equal(each, values[0]) for each in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Distance between a tensor and the expected tensor."""

    kind: str
    """`replicated` or `sharded`."""
    relative: float
    """Largest difference on any rank, divided by the largest expected value."""
    reduced_relative: float | None = None
    """Same for the mean over ranks; None unless ranks differ in a gradient."""


class Measurement(Sink):
    """Distances of a run's tensors from a baseline, measured while it runs.

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
        """Points that only one side reached, because the other took fewer steps."""
        self._baseline = baseline
        self._keep_above = keep_above
        self._joined: dict[Point, tuple[Tensor, Whole]] = {}
        """Expected and got elements, flat, of shards that only gathers could place."""
        self._ranks: dict[Point, dict[int, float]] = defaultdict(dict)

    def forget(self) -> None:
        """Forget all tensors."""
        for each in (self.measured, self.kept, self.unobserved, self._joined, self._ranks):
            each.clear()

    def wants(self, point: Point) -> bool:
        """Return True for points in the baseline."""
        return point in self._baseline.pieces

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Measure a whole tensor at once. Keep a shard until all ranks have theirs."""
        expected = self._baseline.expected(point, rank)
        ranks, kept = self._ranks[point], self.kept[point]
        # A step may have several backwards. The last one counts.
        ranks.pop(rank, None)
        kept.pop(rank, None)
        is_whole = not piece.shards and not piece.is_partial
        if expected is not None and is_whole and piece.values.shape == expected.shape:
            ranks[rank] = relative_difference(piece.values, expected)
        if rank not in ranks or ranks[rank] > self._keep_above:
            kept[rank] = replace(piece, values=piece.values.clone())

    def finish(self, gathers: GatherLog) -> None:
        """Assemble and measure shards, once the run and its gathers have ended."""
        for point in {*self._ranks, *self.kept}:
            if point.moment == "state" or _STATE_DICT.search(point.name):
                # In memory or in a checkpoint.
                self._drop_unused(point)
            ranks, kept = self._ranks.get(point, {}), self.kept.get(point, {})
            # If a piece could not be compared by itself, these are shards.
            if kept and set(kept) - set(ranks):
                self._measure_shards(point, kept, gathers)
            else:
                # Buffers may differ by rank, as running means do. They cannot be compared.
                if any(piece.is_buffer for piece in kept.values()) and not _all_same(ranks, kept):
                    self.unobserved.add(point)
                    continue
                # Ranks differ in a gradient before its reduction, although its mean may be right.
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
        """Return True if all ranks have the same tensor, or its shards, at a point."""
        ranks = self._ranks.get(point, {})
        return not ranks or _all_same(ranks, self.kept.get(point, {}))

    def compared(self, point: Point) -> tuple[Tensor, Whole]:
        """Return expected and got tensors at a point that differs."""
        if point in self._joined:
            return self._joined[point]
        whole, expected = whole_of(self.kept[point]), self._baseline.expected(point)
        assert whole is not None
        assert expected is not None
        if self._baseline.is_alike(point):
            return expected, whole
        # If the baseline's ranks differ too, compare the rank with the largest distance.
        known = {rank: self._baseline.expected(point, rank) for rank in whole.candidates}
        rank, expected = max(
            ((rank, own) for rank, own in known.items() if own is not None),
            key=lambda item: relative_difference(whole.candidates[item[0]], item[1]),
        )
        return expected, replace(whole, candidates={rank: whole.candidates[rank]})

    def keep_steps(self, count: int) -> None:
        """Exclude checkpoints, and all points after a number of steps."""
        for point in self._baseline.pieces:
            # Checkpoints, because the side with more steps saves them later.
            if point.step >= count or point.moment in ("saved", "loaded"):
                self.left_out.add(point)
                self.measured.pop(point, None)

    def _drop_unused(self, point: Point) -> None:
        # Sharded optimizers leave zero state on ranks that own no part of a param. Skipping it is
        # safe, because an owner that does not update its state has a wrong param, too.
        ranks, kept = self._ranks.get(point, {}), self.kept.get(point, {})
        unused = {rank for rank, piece in kept.items() if not piece.values.any()} & set(ranks)
        if any(ranks[rank] <= self._keep_above for rank in ranks if rank not in unused):
            for rank in unused:
                del ranks[rank], kept[rank]

    def _measure_shards(self, point: Point, kept: Mapping[int, Piece], gathers: GatherLog) -> None:
        expected, whole = self._baseline.expected(point), whole_of(kept)
        shapes = {each.shape for each in whole.candidates.values()} if whole is not None else set()
        # If the shards do not fit together, gathers may show their places.
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
        """Return the relative error of the mean over ranks, if they differ in a gradient."""
        expected = self._baseline.expected(point)
        if point.moment not in LOCALISING or len(kept) < len(ranks) or expected is None:
            return None
        if not self._baseline.is_alike(point):
            return None
        values = [piece.values for piece in kept.values()]
        if len(values) < 2 or _all_same(ranks, kept):
            return None
        # Over [ranks, ...], like an averaging reduction.
        return relative_difference(torch.stack(values).mean(0), expected)
