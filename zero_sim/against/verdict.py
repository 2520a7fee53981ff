"""Judges a script against itself: whether two ways to run it compute the same, but for rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from zero_sim.against.dropout import unlike_masks
from zero_sim.against.measure import FLOOR, LIMIT, Baseline, Measured, Measurement
from zero_sim.against.points import LOCALISING, Point
from zero_sim.against.rows import first_row_difference
from zero_sim.against.runs import Observed, Side, Way, observe
from zero_sim.against.shares import wrongly_dealt
from zero_sim.against.trained import metrics_of, trained, trains_nothing
from zero_sim.errors import UsageError

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
OTHER_DRAWS = 0.1
"""Relative difference above which params may be other random numbers. A fault may be less."""


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
class Prepared:
    """The side that is taken to be right: what it computed, and what rounding does to it."""

    side: Side
    seed: int
    baseline: Baseline = field(default_factory=Baseline)
    observed: Observed
    rounding: dict[Point, float] = field(default_factory=dict)
    """Relative difference that rounding alone makes, by point."""
    failure: AgainstVerdict | None = None
    """The verdict if it cannot be compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A verdict, and what is left for the account of a difference."""

    verdict: AgainstVerdict
    prepared: Prepared
    side: Side
    way: Way | None = None
    """How the judged side was observed."""
    measurement: Measurement | None = None


def prepare(side: Side, *, seed: int, keeps_rows: bool = False, by_rank: bool = False) -> Prepared:
    """Run the side that others are compared with, and measure what rounding does to it.

    Args:
        side: The side that is taken to be right, such as one rank.
        seed: Seed of schedules and of random numbers that the script does not seed.
        keeps_rows: True if its rows are to be dealt to others.
        by_rank: True if ranks of the sides that are judged have the same parts of tensors.
    """
    baseline = Baseline(by_rank=by_rank)
    observed = observe(side, Way(sink=baseline, keeps_rows=keeps_rows), seed=seed)
    side = observed.side
    stopped = not baseline.pieces or observed.script.failure is not None
    if side.spare_gpus > side.settings.ranks_per_node and stopped:
        # Examples often refuse a machine with one GPU, which is no property of one rank.
        settings = replace(side.settings, gpus_per_node=side.spare_gpus)
        other, again = replace(side, settings=settings, spare_gpus=0), Baseline(by_rank=by_rank)
        retried = observe(other, Way(sink=again, keeps_rows=keeps_rows), seed=seed)
        if again.pieces and len(retried.steps_of_ranks) == side.settings.world_size:
            side, baseline, observed = retried.side, again, retried
    prepared = Prepared(side=side, seed=seed, baseline=baseline, observed=observed)
    if observed.script.failure is not None:
        prepared.failure = _failed_first(prepared)
    elif observed.replicas.findings:
        prepared.failure = _drifted(observed)
    elif observed.reasons:
        prepared.failure = _by_design(observed.reasons)
    else:
        trouble = _measure_rounding(prepared)
        if trouble is not None:
            reason, remedy = trouble
            prepared.failure = AgainstVerdict(outcome="inconclusive", reason=reason, remedy=remedy)
    return prepared


def judge(
    prepared: Prepared,
    side: Side,
    *,
    feeds: bool = False,
    starts_alike: bool = False,
    all_read_all: bool = False,
) -> Comparison:
    """Run another side and judge it by the prepared one.

    Args:
        prepared: The side that is taken to be right.
        side: The side that is judged.
        feeds: True to deal it the rows that rank 0 of the prepared side read.
        starts_alike: True to let its params start with the values of the prepared side.
        all_read_all: True if each rank is meant to read all rows, as with tensor parallelism.
    """
    side = side.as_tried(prepared.side)
    names = {"expected": prepared.side.text, "got": side.text}
    if prepared.failure is not None:
        verdict = replace(prepared.failure, **names)
        return Comparison(verdict=verdict, prepared=prepared, side=side)
    got, way, measurement = _observe_second(prepared, side, feeds=feeds, starts_alike=starts_alike)
    names["got"] = got.side.text
    steps = None
    if way.splits:
        # A script that ends after so many rows takes fewer steps on more ranks.
        steps = min(max(each.steps_of_ranks, default=0) for each in (prepared.observed, got))
    verdict = _without_tensors(prepared, got, all_read_all=all_read_all, steps=steps)
    if verdict is None:
        measurement.finish(expected_log=prepared.observed.gathers, got_log=got.gathers)
        if steps is not None and steps < max(prepared.observed.steps_of_ranks, default=0):
            measurement.keep_steps(steps)
        verdict = _judged(prepared, measurement, got)
    # One rank counts what all ranks count together, so it may lose integers that they do not.
    lost = got.integers.notes or prepared.observed.integers.notes
    drifts = () if got.replicas.findings else got.replicas.notes
    notes = (*verdict.notes, *lost, *got.reductions.notes, *drifts)
    verdict = replace(verdict, **names, notes=notes)
    return Comparison(
        verdict=verdict, prepared=prepared, side=got.side, way=way, measurement=measurement
    )


def _observe_second(
    prepared: Prepared, side: Side, *, feeds: bool, starts_alike: bool
) -> tuple[Observed, Way, Measurement]:
    measurement = Measurement(prepared.baseline)
    way = Way(
        sink=measurement,
        dealt=tuple(prepared.observed.rows) if feeds else None,
        start=prepared.baseline.start() if starts_alike else None,
        known=prepared.baseline.start_digests(),
    )
    got = observe(side, way, seed=prepared.seed)
    if any(log.lacks_rows for log in got.rows):
        # Each rank reads as many rows as one rank does, which no argument of the script changes.
        measurement = Measurement(prepared.baseline)
        way = replace(way, sink=measurement, splits=True)
        got = observe(got.side, way, seed=prepared.seed)
    return got, way, measurement


def _without_tensors(
    prepared: Prepared, got: Observed, *, all_read_all: bool, steps: int | None
) -> AgainstVerdict | None:
    """The verdict, if the run failed, replicas differ or the data do; None to compare tensors."""
    trouble = next((log.trouble for log in got.rows if log.trouble), "")
    if trouble:
        reason, _, remedy = trouble.partition(". ")
        return AgainstVerdict(
            outcome="inconclusive",
            reason=f"The rows of one rank cannot be dealt: {reason}.",
            remedy=remedy,
        )
    if got.script.failure is not None:
        return _failed_second(prepared, got)
    if reasons := {**got.reasons, **unlike_masks(prepared.observed.masks, got.masks)}:
        return _by_design(reasons)
    if got.replicas.findings:
        return _drifted(got)
    if wrong_rows := wrongly_dealt(prepared.observed.rows, got.rows):
        return AgainstVerdict(
            outcome="different",
            reason=wrong_rows,
            remedy="Let samplers of all ranks draw one order, with one seed, and share it out.",
        )
    if own := _own_params(got):
        return AgainstVerdict(
            outcome="inconclusive",
            reason=f"{own} starts with other values on each rank, so it may be another param on "
            "each.",
            remedy="Give params that ranks do not share names of their own, or broadcast them.",
        )
    if rows := first_row_difference(
        prepared.observed.rows, got.rows, all_read_all=all_read_all, steps=steps
    ):
        return AgainstVerdict(
            outcome="inconclusive",
            reason=f"The data differ: {rows.text}.",
            remedy=rows.remedy,
        )
    return None


def _own_params(got: Observed) -> str:
    """A param to be started alike that had other values on each rank; empty for none."""
    for name in got.started[0] if got.started else ():
        if len({each.get(name) for each in got.started}) > 1:
            return name
    return ""


def _failed_first(prepared: Prepared) -> AgainstVerdict:
    """The side failed in float64; perhaps it fails without it, too."""
    side = prepared.side
    native = observe(side, Way(sink=Baseline(), is_native=True), seed=prepared.seed).script
    if native.failure is not None:
        return AgainstVerdict(
            outcome="script-fails",
            reason=f"The script fails on {side.text}: {native.ending}",
            remedy=f"Make it run on {side.text} first, perhaps with --arguments-of-one.",
            ending=native.failure.report,
        )
    failed = prepared.observed.script
    return AgainstVerdict(
        outcome="unsupported",
        reason=f"The script fails in float64 alone, on {side.text}: {failed.ending}",
        remedy="Avoid what depends on the bytes of a float, or judge the engine with a target.",
        ending=failed.failure.report if failed.failure else "",
    )


def _failed_second(prepared: Prepared, got: Observed) -> AgainstVerdict:
    side = got.side
    error = getattr(got.script.failure, "error", None)
    if isinstance(error, UsageError):
        raise error  # Of how the script is run, which is no difference between the sides.
    native = observe(side, Way(sink=Baseline(), is_native=True), seed=prepared.seed).script
    failed = got.script if native.failure is None else native
    where = " in float64 alone" if native.failure is None else ""
    return AgainstVerdict(
        outcome="unsupported" if native.failure is None else "different",
        reason=f"The run on {side.text} fails{where}, and that on {prepared.side.text} does not: "
        f"{failed.ending}",
        ending=failed.failure.report if failed.failure else "",
    )


def _drifted(observed: Observed) -> AgainstVerdict:
    reason, *lines = observed.replicas.finding.splitlines()
    ending = "\n".join(line.removeprefix("  ") for line in lines[:-1])
    return AgainstVerdict(
        outcome="different",
        reason=reason[0].upper() + reason[1:],
        remedy=lines[-1].strip(),
        ending=ending,
    )


def _by_design(reasons: Mapping[str, str]) -> AgainstVerdict:
    named = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    remedies = []
    if any("mask" in reason for reason in reasons.values()):
        remedies.append("Set dropout to 0, for example by an argument of the script.")
    if any("mean of its own rows" in reason for reason in reasons.values()):
        remedies.append("Replace BatchNorm by SyncBatchNorm or another norm.")
    return AgainstVerdict(
        outcome="unsupported",
        reason=f"The result depends on the number of ranks by design: {named}{more}.",
        remedy=" ".join(remedies),
    )


def _measure_rounding(prepared: Prepared) -> tuple[str, str] | None:
    """Measure what rounding does to each tensor; a reason and remedy if it decides too much."""
    baseline = prepared.baseline
    if not baseline.pieces:
        return (
            "Nothing was observed: no forward, no Optimizer.step and no checkpoint.",
            "Use torch.nn modules or a torch.optim.Optimizer, or judge the engine with a target.",
        )
    for index in range(NOISY_RUNS):
        measurement = Measurement(baseline, keep_above=float("inf"))
        way = Way(sink=measurement, noise_seed=index + 1, fill=(index + 2) / 8)
        noisy = observe(prepared.side, way, seed=prepared.seed)
        log = prepared.observed.gathers
        measurement.finish(expected_log=log, got_log=noisy.gathers)
        if noisy.script.failure is not None or not _took_same_way(prepared, noisy, measurement):
            return _irregular(prepared)
        for point, measured in measurement.measured.items():
            known = prepared.rounding.get(point, FLOOR)
            prepared.rounding[point] = max(known, measured.relative)
    first = [
        value
        for point, value in prepared.rounding.items()
        if point.step == 0 and point.moment == "forward"
    ]
    # Rounding does not change the params that a script starts with.
    if max(first, default=0) * LIMIT >= 1 or all(
        value * LIMIT >= 1 for value in prepared.rounding.values()
    ):
        return _irregular(prepared)
    return None


def _took_same_way(prepared: Prepared, other: Observed, measurement: Measurement) -> bool:
    """True if another run of the prepared side took the same operations and observed the same."""
    return (
        other.operations == prepared.observed.operations
        and other.steps_of_ranks == prepared.observed.steps_of_ranks
        and measurement.measured.keys() >= prepared.baseline.comparable
    )


def _irregular(prepared: Prepared) -> tuple[str, str]:
    """Why two runs of one side differ: they differ without noise, too, or rounding decides."""
    side = prepared.side
    again = Measurement(prepared.baseline)
    repeated = observe(side, Way(sink=again, fill=7 / 8), seed=prepared.seed)
    again.finish(expected_log=prepared.observed.gathers, got_log=repeated.gathers)
    differing = [point for point, each in again.measured.items() if each.relative]
    if differing or not _took_same_way(prepared, repeated, again):
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


def _judged(prepared: Prepared, measurement: Measurement, got: Observed) -> AgainstVerdict:
    found: list[Difference] = []
    largest = 0.0
    decided: set[str] = set()
    rows = prepared.observed.rows, got.rows
    metrics = metrics_of(prepared.baseline, measurement.measured, rows)
    unjudged: set[str] = set()
    for point, measured in measurement.measured.items():
        rounding = prepared.rounding.get(point, FLOOR)
        if rounding * LIMIT < 1:
            decided.add(point.name)
        if point in metrics and measured.relative > LIMIT * rounding:
            unjudged.add(point.name)
            continue
        if point.moment not in LOCALISING:
            largest = max(largest, measured.relative / rounding)
        elif measured.reduced_relative is not None and (
            measured.reduced_relative <= LIMIT * rounding
        ):
            continue  # Not reduced yet, as before a reduction within Optimizer.step.
        if measured.relative > LIMIT * rounding:
            found.append(Difference(point=point, measured=measured, rounding=rounding))
    found.sort(key=lambda each: (each.point.order, -each.measured.relative, each.point.name))
    deciding = {p for p in prepared.rounding if p.moment not in LOCALISING}
    unknown = (measurement.unobserved | deciding) - measurement.measured.keys()
    unknown -= measurement.left_out
    unjudged |= {p.name for p in unknown if p.moment not in LOCALISING}
    names = {point.name for point in measurement.measured} - unjudged
    equal = AgainstVerdict(
        outcome="equal",
        reason="",
        steps=max(got.steps_of_ranks, default=0),
        compared_count=len(measurement.measured),
        unobserved=tuple(sorted(unjudged)),
        undecided=tuple(sorted(names - decided)),
        largest_multiple=largest,
    )
    if (unlike := _other_params(measurement, found, got)) is not None:
        return replace(equal, outcome="inconclusive", reason=unlike[0], remedy=unlike[1])
    if any(each.point.moment not in LOCALISING for each in found):
        return replace(equal, outcome="different", differences=tuple(found))
    if (lack := _lacks(prepared, measurement, decided)) is not None:
        return replace(equal, outcome="inconclusive", reason=lack[0], remedy=lack[1])
    notes = ()
    if found:
        notes = (
            f"{len({each.point.name for each in found})} gradients differ and no param does, such "
            f"as {found[0].point.text}: perhaps they are scaled otherwise.",
        )
    return replace(equal, notes=notes)


def _other_params(
    measurement: Measurement, found: Sequence[Difference], got: Observed
) -> tuple[str, str] | None:
    """Reason and remedy, if params have other names or start with other values on all ranks."""
    if absent := measurement.absent:
        return (
            f"No param of {got.side.text} is named {absent[0]}, so params of one name may be "
            "different ones.",
            "Give the params of each rank the names that they have on one rank.",
        )
    if found and found[0].point.step == 0 and found[0].point.moment == "forward":
        starts = [each for each in found if each.point.order == found[0].point.order]
        alike = [
            each
            for each in starts
            if each.measured.relative > OTHER_DRAWS and measurement.is_alike(each.point)
        ]
        if alike:
            return (
                f"{len(starts)} params start with other values on {got.side.text}, such as "
                f"{alike[0].point.name}: perhaps ranks draw other random numbers.",
                "Start all ranks with the params of one rank: --start-of-one.",
            )
    return None


def _lacks(
    prepared: Prepared, measurement: Measurement, decided: set[str]
) -> tuple[str, str] | None:
    """Reason and remedy, if what is equal proves too little."""
    left = [name for name in trained(prepared.baseline) if name not in decided]
    if not measurement.measured or left:
        reason = "No tensor could be compared."
        if left:
            more = f", nor of {len(left) - 1} other params" if len(left) > 1 else ""
            reason = f"No tensor of the param {left[0]} could be decided{more}."
        return (
            reason,
            "Shard it by DTensor, so the places of its elements are known, or use whole params.",
        )
    if trains_nothing(prepared.baseline):
        return (
            f"Every gradient is zero on {prepared.side.text}, so a wrong reduction would change "
            "nothing.",
            "Check the loss, or give the script other data.",
        )
    return None
