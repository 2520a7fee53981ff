"""Verdict on a script: compare two of its runs, and decide if they agree up to rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zero_sim.against.dropout import unlike_masks
from zero_sim.against.measure import FLOOR, LIMIT, Baseline, Measurement
from zero_sim.against.points import LOCALISING, Point, Sink
from zero_sim.against.records import AgainstVerdict, Difference, inconclusive
from zero_sim.against.runs import FILL, Observed, Side, Way, observe
from zero_sim.against.trained import metrics_of, trained, trains_nothing
from zero_sim.errors import UsageError
from zero_sim.findings.draws import is_changed_draw
from zero_sim.replicas.rows import RowsLack
from zero_sim.replicas.shares import other_rows, wrongly_dealt

NOISY_RUNS = 2
"""Number of runs with rounding noise. With two, a one-element tensor exceeds ten times its measured
rounding by chance in 0.6 % of draws, and `LIMIT` in less than 1 of 10^8."""


@dataclass(kw_only=True, slots=True)
class Prepared:
    """The expected run: its tensors, and how much rounding alone changes each."""

    side: Side
    seed: int
    baseline: Baseline = field(default_factory=Baseline)
    observed: Observed
    rounding: dict[Point, float] = field(default_factory=dict)
    """Relative difference caused by rounding alone, by point."""
    failure: AgainstVerdict | None = None
    """Verdict if the run cannot serve as the expected run; None if it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A verdict, with the data to explain its first difference."""

    verdict: AgainstVerdict
    prepared: Prepared
    side: Side
    way: Way | None = None
    """Options with which the judged side was observed."""
    measurement: Measurement | None = None


def prepare(side: Side, *, seed: int, keeps_rows: bool = False, by_rank: bool = False) -> Prepared:
    """Run the expected side, and measure how much rounding changes its tensors.

    Args:
        side: Side assumed to be right, such as one rank.
        seed: Seed of schedules, and of random numbers without a seed in the script.
        keeps_rows: True to keep its rows, so that they can be dealt to other sides.
        by_rank: True if each rank has the same parts of tensors on all sides.
    """

    def run(side: Side) -> Prepared:
        baseline = Baseline(by_rank=by_rank)
        observed = observe(side, Way(sink=baseline, keeps_rows=keeps_rows), seed=seed)
        baseline.gathers = observed.gathers
        return Prepared(side=observed.side, seed=seed, baseline=baseline, observed=observed)

    prepared = run(side)
    side, observed = prepared.side, prepared.observed
    stopped = not prepared.baseline.pieces or observed.script.failure is not None
    if side.spare_gpus > side.settings.ranks_per_node and stopped:
        # Many examples refuse to run with one GPU, although one rank is enough.
        settings = replace(side.settings, gpus_per_node=side.spare_gpus)
        again = run(replace(side, settings=settings, spare_gpus=0))
        if again.baseline.pieces and len(again.observed.steps_of_ranks) == side.settings.world_size:
            prepared, observed = again, again.observed
    if observed.script.failure is not None:
        prepared.failure = _failed(prepared, observed)
    elif observed.replicas.findings:
        prepared.failure = _drifted(observed)
    elif observed.reasons:
        prepared.failure = _by_design(observed.reasons)
    else:
        prepared.failure = _measure_rounding(prepared)
    return prepared


def judge(
    prepared: Prepared,
    side: Side,
    *,
    feeds: bool = False,
    starts_alike: bool = False,
    all_read_all: bool = False,
) -> Comparison:
    """Run another side, and compare it with the prepared side.

    Args:
        prepared: Side assumed to be right.
        side: Side to judge.
        feeds: True to deal the rows of the prepared side's rank 0.
        starts_alike: True to start with the prepared side's param values.
        all_read_all: True if each rank should read all rows, as with tensor parallelism.
    """
    # The expected side may have needed CUDA on the CPU, or stubs. This side then needs them too.
    side = side.as_tried(prepared.side)
    if prepared.failure is not None:
        verdict = replace(prepared.failure, expected=prepared.side.text, got=side.text)
        return Comparison(verdict=verdict, prepared=prepared, side=side)
    measurement = Measurement(prepared.baseline)
    way = Way(
        sink=measurement,
        dealt=tuple(prepared.observed.rows) if feeds else None,
        start=prepared.baseline.start() if starts_alike else None,
        known=prepared.baseline.start_digests(),
    )
    got, steps = observe(side, way, seed=prepared.seed), None
    if any(isinstance(log.trouble, RowsLack) for log in got.rows):
        # Each rank reads as many rows as the one rank did, and no argument changes that.
        measurement = Measurement(prepared.baseline)
        way = replace(way, sink=measurement, splits=True)
        got = observe(got.side, way, seed=prepared.seed)
        # A script that ends after a number of rows takes fewer steps on more ranks.
        steps = min(prepared.observed.step_count, got.step_count)
    verdict = _without_tensors(prepared, got)
    rows = prepared.observed.rows, got.rows
    # Wrong rows explain all later differences, so check them first.
    if verdict is None and (reason := wrongly_dealt(*rows)):
        remedy = "Seed the samplers of all ranks alike, and let each rank read its share."
        verdict = AgainstVerdict(outcome="different", reason=reason, remedy=remedy)
    verdict = verdict or _own_params(got)
    if verdict is None and (other := other_rows(*rows, all_read_all=all_read_all, steps=steps)):
        verdict = inconclusive(*other)
    if verdict is None:
        measurement.finish(got.gathers)
        if steps is not None and steps < prepared.observed.step_count:
            measurement.keep_steps(steps)
        verdict = _judged(prepared, measurement, got)
    # Only the expected side may exceed a format's range, because its one rank counts everything.
    lost = got.integers.notes or prepared.observed.integers.notes
    drifts = () if got.replicas.findings else got.replicas.notes
    notes = (*verdict.notes, *lost, *got.reductions.notes, *drifts)
    verdict = replace(verdict, expected=prepared.side.text, got=got.side.text, notes=notes)
    return Comparison(
        verdict=verdict, prepared=prepared, side=got.side, way=way, measurement=measurement
    )


def _without_tensors(prepared: Prepared, got: Observed) -> AgainstVerdict | None:
    """Return a verdict without tensors: rows not dealt, a failed run, unlike masks, or drift."""
    for log in got.rows:
        if log.trouble is not None:
            reason, _, remedy = str(log.trouble).partition(". ")
            return inconclusive(f"The rows of one rank cannot be dealt: {reason}.", remedy)
    if got.script.failure is not None:
        error = getattr(got.script.failure, "error", None)
        if isinstance(error, UsageError):
            raise error  # A wrong command is no difference between the sides.
        return _failed(prepared, got)
    if reasons := {**got.reasons, **unlike_masks(prepared.observed.masks, got.masks)}:
        return _by_design(reasons)
    return _drifted(got) if got.replicas.findings else None


def _own_params(got: Observed) -> AgainstVerdict | None:
    """Return a verdict if ranks started a replaced param with different values."""
    for name in got.started[0] if got.started else ():
        if len({each.get(name) for each in got.started}) > 1:
            return inconclusive(
                f"{name} starts with different values on the ranks, so it may not be the same "
                "param.",
                "Use different names for params that ranks do not share, or broadcast them.",
            )
    return None


def _failed(prepared: Prepared, got: Observed) -> AgainstVerdict:
    """Return the verdict on a failed run. Native dtypes show if float64 caused the failure."""
    side = got.side
    # A failure in native dtypes, too, is the script's own.
    native = observe(side, Way(sink=Sink(), is_native=True), seed=prepared.seed).script
    by_float64 = native.failure is None
    failed = got.script if by_float64 else native
    ending = failed.failure.report if failed.failure else ""
    if got is not prepared.observed:
        # The expected side succeeded, so more ranks cause the failure.
        alone = " only in float64" if by_float64 else ""
        return AgainstVerdict(
            outcome="unsupported" if by_float64 else "different",
            reason=f"The run on {side.text} fails{alone}, but the run on {prepared.side.text} does "
            f"not: {failed.ending}",
            ending=ending,
        )
    if by_float64:
        return AgainstVerdict(
            outcome="unsupported",
            reason=f"The script fails only in float64, on {side.text}: {failed.ending}",
            remedy="Avoid code that reads the bytes of a float, or judge the engine with a target.",
            ending=ending,
        )
    return AgainstVerdict(
        outcome="script-fails",
        reason=f"The script fails on {side.text}: {failed.ending}",
        remedy=f"Make it run on {side.text} first, perhaps with --arguments-of-one.",
        ending=ending,
    )


def _drifted(observed: Observed) -> AgainstVerdict:
    reason, *ending, remedy = map(str.strip, observed.replicas.finding.splitlines())
    return AgainstVerdict(
        outcome="different",
        reason=reason[0].upper() + reason[1:],
        remedy=remedy,
        ending="\n".join(ending),
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


def _measure_rounding(prepared: Prepared) -> AgainstVerdict | None:
    """Measure how much rounding changes each tensor. Return a verdict if nothing is decidable."""
    if not prepared.baseline.pieces:
        return inconclusive(
            "Nothing was observed: no forward, no Optimizer.step and no checkpoint.",
            "Use torch.nn modules or a torch.optim.Optimizer, or judge the engine with a target.",
        )
    for index in range(NOISY_RUNS):
        # A new fill in each run, because values in unfilled memory must not matter.
        noisy, took_same_way = _run_again(prepared, noise_seed=index + 1, fill=(index + 2) / 8)
        if not took_same_way:
            return _irregular(prepared)
        for point, measured in noisy.measured.items():
            known = prepared.rounding.get(point, FLOOR)
            # The largest rounding in any noisy run.
            prepared.rounding[point] = max(known, measured.relative)
    decided = {point for point, rounding in prepared.rounding.items() if rounding * LIMIT < 1}
    starts = {p for p in prepared.rounding if p.step == 0 and p.moment == "forward"}
    # Initial params must not depend on rounding.
    return None if decided and starts <= decided else _irregular(prepared)


def _run_again(
    prepared: Prepared, *, fill: float, noise_seed: int | None = None
) -> tuple[Measurement, bool]:
    """Measure another run of the expected side. Also return True if it did the same operations."""
    measurement = Measurement(prepared.baseline, keep_above=float("inf"))
    way = Way(sink=measurement, noise_seed=noise_seed, fill=fill)
    again, first = observe(prepared.side, way, seed=prepared.seed), prepared.observed
    measurement.finish(again.gathers)
    return measurement, (
        again.script.failure is None
        and again.operations == first.operations
        and again.steps_of_ranks == first.steps_of_ranks
        and measurement.measured.keys() >= prepared.baseline.comparable
    )


def _irregular(prepared: Prepared) -> AgainstVerdict:
    """Find why one side's runs differ: unfilled memory, random numbers, or rounding."""
    side = prepared.side
    # Without noise, so only the fill and unseeded random numbers differ.
    again, took_same_way = _run_again(prepared, fill=7 / 8)
    differing = sorted(
        (point for point, each in again.measured.items() if each.relative),
        key=lambda point: (point.order, point.name),
    )
    if differing or not took_same_way:
        first = f" First at {differing[0].text}." if differing else ""
        # With the first run's fill, only random numbers can still differ.
        filled_alike, took_same_way = _run_again(prepared, fill=FILL)
        if took_same_way and not any(each.relative for each in filled_alike.measured.values()):
            reason = f"{side.text} computes with memory that was never filled.{first}"
            remedy = "Fill every tensor before it is read."
            return AgainstVerdict(outcome="different", reason=reason, remedy=remedy)
        remedy = "Seed all random numbers."
        return inconclusive(f"Two runs on {side.text} differ.{first}", remedy)
    return inconclusive(
        f"On {side.text} rounding decides which operations the script performs.",
        "Make branches depend on integers, or run fewer steps.",
    )


def _judged(prepared: Prepared, measurement: Measurement, got: Observed) -> AgainstVerdict:
    found: list[Difference] = []
    largest = 0.0
    decided: set[str] = set()
    unjudged: set[str] = set()
    rows = prepared.observed.rows, got.rows
    # Metrics may depend on evaluation rows, so a difference in one is listed as not observed.
    metrics = metrics_of(prepared.baseline, measurement.measured, rows)
    for point, measured in measurement.measured.items():
        rounding = prepared.rounding.get(point, FLOOR)
        is_off = measured.relative > LIMIT * rounding
        # Otherwise LIMIT times rounding exceeds the values themselves.
        if rounding * LIMIT < 1:
            decided.add(point.name)
        if point in metrics and is_off:
            unjudged.add(point.name)
            continue
        if point.moment not in LOCALISING:
            largest = max(largest, measured.relative / rounding)
        elif measured.reduced_relative is not None and (
            measured.reduced_relative <= LIMIT * rounding
        ):
            continue  # Not reduced yet. Optimizer.step may do it.
        if is_off:
            found.append(Difference(point=point, measured=measured, rounding=rounding))
    # The earliest difference is nearest to the cause.
    found.sort(key=_by_size)
    deciding = {p for p in prepared.rounding if p.moment not in LOCALISING}
    # Points that only the expected run reached count as not observed.
    unknown = (measurement.unobserved | deciding) - measurement.measured.keys()
    # Steps that one side did not take are no gap.
    unknown -= measurement.left_out
    unjudged |= {p.name for p in unknown if p.moment not in LOCALISING}
    judged = {point.name for point in measurement.measured} - unjudged
    # Wrong starts explain all differences, so check them first. Without differences, check that
    # enough was compared.
    verdict = _by_starts(measurement, found, got)
    if verdict is None and any(each.point.moment not in LOCALISING for each in found):
        verdict = AgainstVerdict(outcome="different", differences=tuple(found))
    verdict = verdict or _lacks(prepared, measurement, decided)
    if verdict is None:
        such = "gradients differ but no param does, perhaps because they are scaled, such as"
        notes = [f"{len(found)} {such} {each.point.text}." for each in found[:1]]
        verdict = AgainstVerdict(outcome="equal", notes=tuple(notes))
    return replace(
        verdict,
        steps=got.step_count,
        compared_count=len(measurement.measured),
        unobserved=tuple(sorted(unjudged)),
        undecided=tuple(sorted(judged - decided)),
        largest_multiple=largest,
    )


def _by_size(each: Difference) -> tuple[object, ...]:
    """Sort key: time, then size. Sizes are rounded as printed, so that equal factors tie."""
    return each.point.order, -float(f"{each.measured.relative:.1e}"), each.point.name


def _by_starts(
    measurement: Measurement, found: Sequence[Difference], got: Observed
) -> AgainstVerdict | None:
    """Return a verdict if params have unexpected names or initial values."""
    if absent := measurement.absent:
        return inconclusive(
            f"No param of {got.side.text} is named {absent[0]}, so equal names may belong to "
            "different params.",
            "Give the params of each rank the names that they have on one rank.",
        )
    starts = [each.point for each in found if each.point[:2] == (0, "forward")]
    if not starts or found[0].point != starts[0]:
        return None
    drawn: list[Point] = []
    for point in starts:
        expected, whole = measurement.compared(point)
        # If ranks differ, a broadcast is missing. This is a real difference, not another draw.
        if not measurement.is_alike(point):
            continue
        if any(is_changed_draw(expected, each) for each in whole.candidates.values()):
            return None
        drawn.append(point)
    if not drawn:
        return None
    return inconclusive(
        f"{len(starts)} params start with different values on {got.side.text}, such as "
        f"{drawn[0].name}: perhaps ranks draw different random numbers.",
        "Start all ranks with the params of one rank: --start-of-one.",
    )


def _lacks(
    prepared: Prepared, measurement: Measurement, decided: set[str]
) -> AgainstVerdict | None:
    """Return a verdict if the equal tensors do not prove enough."""
    left = [name for name in trained(prepared.baseline) if name not in decided]
    if left or not measurement.measured:
        reason = "No tensor could be compared."
        if left:
            more = f", nor of {len(left) - 1} other params" if len(left) > 1 else ""
            reason = f"No tensor of the param {left[0]} could be decided{more}."
        return inconclusive(
            reason,
            "Shard it with DTensor, so the places of its elements are known, or use whole params.",
        )
    if trains_nothing(prepared.baseline):
        return inconclusive(
            f"Every gradient is zero on {prepared.side.text}, so a wrong reduction would change "
            "nothing.",
            "Check the loss, or give the script other data.",
        )
    return None
