"""Comparison of two runs of a script in the script's own dtypes.

float64 repairs precision faults, such as a reduction in bfloat16. In native precision no limit
separates all faults from rounding, so a large difference is only a warning.

[Note: measured false alarms]
Runs with rounding noise measure the effect of rounding on each tensor. Each of them is also judged
by all others, as if it were the judged run. The share of them that causes a warning is the rate of
false alarms for this script.
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
"""Multiple of the largest rounding in all noisy runs above which a tensor causes a warning."""
# Relative rounding above which a tensor is not compared, because it has no correct digit.
_UNDECIDED = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionReport:
    """The comparison in native dtypes."""

    trouble: str = ""
    """Reason why there is none; empty if there is one."""
    compared_count: int = 0
    above: Mapping[Point, tuple[float, str]] = field(default_factory=dict)
    """Multiple of rounding and dtype of each tensor above the limit, in the order of a fault."""
    false_runs: int = 0
    """Noisy runs that cause a warning when the others judge them."""
    false_points: int = 0
    """Tensors of noisy runs that cause a warning when the others judge them."""

    @property
    def text(self) -> str:
        """Description of the comparison, in one or two sentences."""
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
    """Run both sides in native dtypes, and the expected one several times with rounding noise.

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
        """Return the relative differences of tensors that can prove a fault."""
        # Only distances are needed, so no tensor is kept.
        measurement = Measurement(baseline, keep_above=float("inf"))
        observed = observe(side, Way(sink=measurement, is_native=True, **options), seed=seed)
        measurement.finish(observed.gathers)
        measured = measurement.measured.items()
        differs = {p: each.relative for p, each in measured if p.moment not in LOCALISING}
        return differs, observed.script

    runs: list[Mapping[Point, float]] = []
    for index in range(NOISY_RUNS):
        differs, script = relative(expected, noise_seed=index + 1)
        # Branches on float values: the runs cannot be compared tensor by tensor.
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
        # A tensor that no noisy run moved still has one rounding of its dtype.
        floor = _epsilon(dtype)
        # A tensor that some noisy run lacks has no measured rounding.
        if len(noise) < len(runs) or max(noise) > _UNDECIDED:
            continue
        compared += 1
        multiple = got[point] / max(*noise, floor)
        if multiple > LIMIT:
            above[point] = multiple, dtype
        for index, own in enumerate(noise):
            # Leave one out: a noisy run must not judge itself.
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
    """Return a dtype's relative rounding by name; Python's own numbers have `float`."""
    known = getattr(torch, dtype)
    return torch.finfo(known).eps if known.is_floating_point or known.is_complex else 0.0
