"""Comparison of two runs of a script in the script's own dtypes.

float64 repairs precision faults, such as a reduction in bfloat16. In native precision no limit
separates all faults from rounding, so a large difference is only a warning.

[Note: measured false alarms]
Runs with rounding noise show how much rounding changes each tensor. Each noisy run is also judged
by the others, as if it were the judged run. The share that causes a warning is the rate of false
alarms for this script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_sim.against.measure import Baseline, Measurement
from zero_sim.against.points import LOCALISING, Point
from zero_sim.against.runs import Side, Way, observe
from zero_sim.script.record import ScriptRun

NOISY_RUNS = 6
LIMIT = 8.0
"""Multiple of the largest measured rounding above which a tensor causes a warning."""
# Relative rounding above which a tensor has no correct digit, so it is not compared.
_UNDECIDED = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionReport:
    """Result of the comparison in native dtypes."""

    trouble: str = ""
    """Reason why nothing was compared; empty if tensors were."""
    compared_count: int = 0
    above: Mapping[Point, tuple[float, str]] = field(default_factory=dict)
    """Multiple of rounding and dtype for each tensor above the limit, earliest first."""
    false_runs: int = 0
    """Noisy runs that cause a warning when the others judge them."""
    false_points: int = 0
    """Tensors in noisy runs that cause a warning then."""

    @property
    def text(self) -> str:
        """The comparison in one or two sentences."""
        if self.trouble:
            return f"precision: not compared, because {self.trouble}."
        rate = (
            f"of {NOISY_RUNS} runs with only rounding noise, {self.false_runs} would cause a "
            f"warning ({self.false_points} of {NOISY_RUNS * self.compared_count:,} tensors)"
        )
        if not self.above:
            return (
                f"precision: in the script's own dtypes {self.compared_count:,} tensors are within "
                f"{LIMIT:.0f} times rounding; {rate}."
            )
        point, (multiple, dtype) = next(iter(self.above.items()))
        return (
            f"warning of precision: in the script's own dtypes {len(self.above):,} of "
            f"{self.compared_count:,} tensors are off by more than {LIMIT:.0f} times rounding, "
            f"first at {point.text} ({dtype}, {multiple:.3g} times). Look for a reduction or a "
            f"cast in a narrower dtype. False alarms: {rate}."
        )


def measure_precision(
    expected: Side,
    got: Side,
    *,
    seed: int,
    feeds: bool = False,
    splits: bool = False,
    starts_alike: bool = False,
) -> PrecisionReport:
    """Run both sides in native dtypes, and the expected side again with rounding noise.

    Args as for `prepare` and `judge`; `splits` is True to split each dealt batch among ranks.
    """
    baseline = Baseline()
    way = Way(sink=baseline, is_native=True, keeps_rows=feeds)
    plain = observe(expected, way, seed=seed)
    baseline.gathers = plain.gathers
    if plain.script.failure is not None:
        return PrecisionReport(
            trouble=f"{expected.text} fails in its own dtypes: {plain.script.ending}"
        )

    def relative(side: Side, **options: Any) -> tuple[dict[Point, float], ScriptRun]:
        """Return relative differences by point, without `LOCALISING` moments."""
        # Only distances matter, so keep no tensor.
        measurement = Measurement(baseline, keep_above=float("inf"))
        observed = observe(side, Way(sink=measurement, is_native=True, **options), seed=seed)
        measurement.finish(observed.gathers)
        measured = measurement.measured.items()
        differs = {p: each.relative for p, each in measured if p.moment not in LOCALISING}
        return differs, observed.script

    runs: list[Mapping[Point, float]] = []
    for index in range(NOISY_RUNS):
        differs, script = relative(expected, noise_seed=index + 1)
        # Branches depend on float values, so tensors of the runs do not correspond.
        if script.failure is not None or (runs and differs.keys() != runs[0].keys()):
            return PrecisionReport(trouble="rounding decides which operations the script performs")
        runs.append(differs)
    dealt = tuple(plain.rows) if feeds else None
    start = baseline.start() if starts_alike else None
    differs, script = relative(got, dealt=dealt, splits=splits, start=start)
    if script.failure is not None:
        return PrecisionReport(trouble=f"{got.text} fail in their own dtypes: {script.ending}")
    return _report(baseline, runs, differs)


def _report(
    baseline: Baseline, runs: Sequence[Mapping[Point, float]], got: Mapping[Point, float]
) -> PrecisionReport:
    above: dict[Point, tuple[float, str]] = {}
    compared = false_points = 0
    false_runs: set[int] = set()
    for point in sorted(got, key=lambda each: (each.order, each.name)):
        noise = [run[point] for run in runs if point in run]
        dtype = next(iter(baseline.pieces[point].values())).dtype
        # Even a tensor that no noise changed has one rounding of its dtype.
        floor = _epsilon(dtype)
        # A tensor that a noisy run lacks has no measured rounding.
        if len(noise) < len(runs) or max(noise) > _UNDECIDED:
            continue
        compared += 1
        multiple = got[point] / max(*noise, floor)
        if multiple > LIMIT:
            above[point] = multiple, dtype
        for index, own in enumerate(noise):
            # Leave one out, because a noisy run must not judge itself.
            if own > LIMIT * max(*noise[:index], *noise[index + 1 :], floor):
                false_points += 1
                false_runs.add(index)
    if not compared:
        return PrecisionReport(trouble="rounding alone changes every tensor too much")
    return PrecisionReport(
        compared_count=compared,
        above=above,
        false_runs=len(false_runs),
        false_points=false_points,
    )


def _epsilon(dtype: str) -> float:
    """Return a dtype's relative rounding, by name. Python's numbers have the name `float`."""
    known = getattr(torch, dtype)
    return torch.finfo(known).eps if known.is_floating_point or known.is_complex else 0.0
