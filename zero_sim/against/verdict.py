"""Judges a script against itself: whether two ways to run it compute the same, but for rounding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from zero_sim.against.measure import FLOOR, LIMIT, Baseline, Measured, Measurement
from zero_sim.against.points import LOCALISING, Point
from zero_sim.against.rows import first_row_difference
from zero_sim.against.runs import Observed, Side, Way, observe

Outcome = Literal["equal", "different", "script-fails", "inconclusive", "unsupported"]
EXIT_STATUS: dict[Outcome, int] = {
    "equal": 0,
    "different": 1,
    "script-fails": 2,
    "inconclusive": 3,
    "unsupported": 4,
}
NOISY_RUNS = 2
"""Runs with rounding noise. With two, a one-element tensor passes ten times rounding by chance in
0.6 % of draws, and the limit in fewer than one of 10^8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A tensor that differs by more than rounding."""

    point: Point
    measured: Measured
    rounding: float
    """Relative difference that rounding alone makes."""

    @property
    def multiple(self) -> float:
        """The difference as a multiple of rounding."""
        return self.measured.relative / self.rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainstVerdict:
    """The result of comparing two ways to run a script."""

    outcome: Outcome
    reason: str
    """One sentence; empty for `equal` and for differing tensors."""
    remedy: str = ""
    expected: str = ""
    """The side that is compared with, such as `1 rank`."""
    got: str = ""
    steps: int = 0
    differences: tuple[Difference, ...] = ()
    """All tensors that differ, in the order in which a fault reached them."""
    compared_count: int = 0
    largest_multiple: float = 0.0
    """Largest multiple of rounding of a tensor that decides the verdict."""
    unobserved: tuple[str, ...] = ()
    """Tensors whose shards could not be put together."""
    undecided: tuple[str, ...] = ()
    """Tensors that rounding alone changes wholly."""
    notes: tuple[str, ...] = ()
    ending: str = ""
    """Report of a run that failed."""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """Everything that the runs of one verdict left, for the account of a difference."""

    baseline: Baseline = field(default_factory=Baseline)
    measurement: Measurement | None = None
    expected: Observed | None = None
    got: Observed | None = None
    rounding: dict[Point, float] = field(default_factory=dict)


def compare(
    expected: Side,
    got: Side,
    *,
    seed: int = 0,
    feeds: bool = False,
    starts_alike: bool = False,
) -> tuple[AgainstVerdict, Comparison]:
    """Run a script both ways and judge the second by the first.

    Args:
        expected: The side that is taken to be right, such as one rank.
        got: The side that is judged.
        seed: Seed of both.
        feeds: True to deal the rows that the first side's rank 0 read to the second.
        starts_alike: True to let the second side's params start with the first side's values.
    """
    kept = Comparison()
    sides = {"expected": expected.text, "got": got.text}
    kept.expected = observe(expected, Way(sink=kept.baseline, keeps_rows=feeds), seed=seed)
    if kept.expected.script.failure is not None:
        return _failed_first(expected, kept, seed=seed, sides=sides), kept
    if kept.expected.reasons:
        return _refused(kept.expected.reasons, sides=sides), kept
    trouble = _measure_rounding(expected, kept, seed=seed, feeds=feeds)
    if trouble:
        return _inconclusive(*trouble, sides=sides), kept
    measurement = kept.measurement = Measurement(kept.baseline)
    dealt = kept.expected.rows[0] if feeds else None
    start = kept.baseline.start() if starts_alike else None
    kept.got = observe(got, Way(sink=measurement, dealt=dealt, start=start), seed=seed)
    if kept.got.script.failure is not None:
        return _failed_second(got, kept, seed=seed, sides=sides), kept
    rows = first_row_difference(kept.expected.rows, kept.got.rows)
    if rows is not None:
        remedy = (
            "Keep the global batch with --arguments-of-one, or let --feed deal the rows of one "
            "rank to all."
        )
        return _inconclusive(f"The data differ: {rows.text}.", remedy, sides=sides), kept
    measurement.finish()
    return _judged(kept, measurement, sides=sides), kept


def _failed_first(
    side: Side, kept: Comparison, *, seed: int, sides: Mapping[str, str]
) -> AgainstVerdict:
    """The side to compare with failed in float64; perhaps it fails without it, too."""
    assert kept.expected is not None
    native = observe(side, Way(sink=Baseline(), is_native=True), seed=seed).script
    if native.failure is not None:
        return AgainstVerdict(
            outcome="script-fails",
            reason=f"The script fails on {side.text}: {native.ending}",
            remedy=f"Make it run on {side.text} first; other arguments go to --arguments-of-one.",
            ending=native.failure.report,
            **sides,
        )
    failed = kept.expected.script
    return AgainstVerdict(
        outcome="unsupported",
        reason=f"The script fails in float64 alone, on {side.text}: {failed.ending}",
        remedy="Avoid what depends on the bytes of a float, or judge the engine with a target.",
        ending=failed.failure.report if failed.failure else "",
        **sides,
    )


def _failed_second(
    side: Side, kept: Comparison, *, seed: int, sides: Mapping[str, str]
) -> AgainstVerdict:
    assert kept.got is not None
    failed = kept.got.script
    native = observe(side, Way(sink=Baseline(), is_native=True), seed=seed).script
    outcome: Outcome = "different" if native.failure is not None else "unsupported"
    shown = native if native.failure is not None else failed
    where = "" if native.failure is not None else " in float64 alone"
    return AgainstVerdict(
        outcome=outcome,
        reason=f"{side.text} fail{where} and {sides['expected']} does not: {shown.ending}",
        ending=shown.failure.report if shown.failure else "",
        **sides,
    )


def _refused(reasons: Mapping[str, str], *, sides: Mapping[str, str]) -> AgainstVerdict:
    named = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return AgainstVerdict(
        outcome="unsupported",
        reason=f"The result depends on the number of ranks by design: {named}{more}.",
        remedy="Set dropout to 0, and replace BatchNorm by SyncBatchNorm or another norm.",
        **sides,
    )


def _inconclusive(reason: str, remedy: str, *, sides: Mapping[str, str]) -> AgainstVerdict:
    return AgainstVerdict(outcome="inconclusive", reason=reason, remedy=remedy, **sides)


def _measure_rounding(
    side: Side, kept: Comparison, *, seed: int, feeds: bool
) -> tuple[str, str] | None:
    """Measure what rounding does to each tensor; a reason and remedy if it cannot be told."""
    assert kept.expected is not None
    if not kept.baseline.pieces:
        return (
            "Nothing was observed: no forward, no Optimizer.step and no checkpoint.",
            "Use torch.nn modules or a torch.optim.Optimizer, or judge the engine with a target.",
        )
    for index in range(NOISY_RUNS):
        measurement = Measurement(kept.baseline, keep_above=float("inf"))
        noisy = observe(side, Way(sink=measurement, noise_seed=index + 1), seed=seed)
        measurement.finish()
        if (
            noisy.script.failure is not None
            or noisy.operations != kept.expected.operations
            or measurement.measured.keys() != kept.baseline.comparable
        ):
            return _irregular(side, kept, seed=seed)
        for point, measured in measurement.measured.items():
            kept.rounding[point] = max(kept.rounding.get(point, FLOOR), measured.relative)
    if all(value * LIMIT >= 1 for value in kept.rounding.values()):
        return _irregular(side, kept, seed=seed)
    return None


def _irregular(side: Side, kept: Comparison, *, seed: int) -> tuple[str, str]:
    """Why two runs of one side differ: they differ without noise, too, or rounding decides."""
    assert kept.expected is not None
    again = Measurement(kept.baseline)
    repeated = observe(side, Way(sink=again), seed=seed)
    again.finish()
    differing = [point for point, each in again.measured.items() if each.relative]
    if (
        differing
        or repeated.operations != kept.expected.operations
        or again.measured.keys() != kept.baseline.comparable
    ):
        first = f" First at {min(differing, key=_order).text}." if differing else ""
        return (
            f"Two runs on {side.text} are not the same.{first}",
            "Seed all random numbers, and fill every tensor before it is read.",
        )
    return (
        f"On {side.text} rounding decides which operations the script performs.",
        "Make branches depend on integers, or run fewer steps.",
    )


def _order(point: Point) -> tuple[tuple[int, int], str]:
    return point.order, point.name


def _judged(
    kept: Comparison, measurement: Measurement, *, sides: Mapping[str, str]
) -> AgainstVerdict:
    found: list[Difference] = []
    largest = 0.0
    decided: set[str] = set()
    for point, measured in measurement.measured.items():
        rounding = kept.rounding.get(point, FLOOR)
        if rounding * LIMIT < 1:
            decided.add(point.name)
        if point.moment not in LOCALISING:
            largest = max(largest, measured.relative / rounding)
        if measured.relative > LIMIT * rounding:
            found.append(Difference(point=point, measured=measured, rounding=rounding))
    found.sort(key=lambda each: _order(each.point))
    unobserved = _names(measurement.unobserved)
    undecided = sorted(
        {
            point.name
            for point, value in kept.rounding.items()
            if value * LIMIT >= 1 and point.name not in decided
        }
    )
    common = {
        "steps": max(kept.got.steps_of_ranks, default=0) if kept.got else 0,
        "compared_count": len(measurement.measured),
        "unobserved": unobserved,
        "undecided": tuple(undecided),
        "largest_multiple": largest,
        **sides,
    }
    if any(each.point.moment not in LOCALISING for each in found):
        return AgainstVerdict(outcome="different", reason="", differences=tuple(found), **common)
    trained = _trained(kept.baseline)
    left = [name for name in trained if name not in decided]
    if not measurement.measured or left:
        reason = (
            f"No tensor of {left[0]} could be decided, and of {len(left) - 1} more params."
            if left
            else "No tensor could be compared."
        )
        remedy = "Print the param, or shard it by DTensor, so its places are known."
        return AgainstVerdict(outcome="inconclusive", reason=reason, remedy=remedy, **common)
    notes = ()
    if found:
        notes = (
            f"{len({each.point.name for each in found})} gradients differ and no param does, such "
            f"as {found[0].point.text}: perhaps they are scaled otherwise.",
        )
    return AgainstVerdict(outcome="equal", reason="", notes=notes, **common)


def _names(points: Sequence[Point] | set[Point]) -> tuple[str, ...]:
    return tuple(sorted({point.name for point in points}))


def _trained(baseline: Baseline) -> list[str]:
    """Names of params that a step updates; of the model's if it has names for them."""
    names = {point.name for point in baseline.pieces if point.moment == "param"}
    used = {point.name for point in baseline.pieces if point.moment in ("forward", "evaluation")}
    return sorted(names & used or names)
