"""Benchmark rows, with figures and their goals.

Nearly all figures are processor time, which a busy machine inflates by 10 to 20 %. Ratios avoid
this, because they compare work done in turns. Absolute figures also depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from zero_sim.bench import cases, memory, peers
from zero_sim.errors import UsageError
from zero_sim.report.records import Measurement
from zero_sim.scenario.spec import WorldSpec
from zero_sim.scenario.suggest import did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Figures that are measured together, with their goals."""

    figures: tuple[Measurement, ...]
    """Figures without values."""
    take: Callable[[], float | tuple[float, ...]]
    """Function that measures a value for each figure; times are in seconds."""

    def measure(self) -> Iterator[Measurement]:
        """Yield the figures with their measured values."""
        taken = self.take()
        values = taken if isinstance(taken, tuple) else (taken,)
        for figure, in_seconds in zip(self.figures, values, strict=True):
            value = in_seconds * 1e3 if figure.unit == "ms" else in_seconds
            goal, ok = figure.goal, None
            if goal is not None:
                # Rates must reach their goal; times must not exceed it.
                ok = value >= goal if figure.at_least else value <= goal
            yield replace(figure, value=round(value, 4), ok=ok)


def _figure(
    name: str, unit: str, *, most: float | None = None, least: float | None = None
) -> Measurement:
    goal = most if least is None else least
    return Measurement(name=name, value=0.0, unit=unit, goal=goal, at_least=least is not None)


def _row(*figures: Measurement, take: Callable[[], float | tuple[float, ...]]) -> Row:
    return Row(figures=figures, take=take)


def _peer(program: str, *, shown: str, peer: str, least: float | None, repeats: int) -> Row:
    return _row(
        _figure(f"{peer} over simulated, {shown}", "x", least=least),
        take=lambda: peers.ratio_of(program, peer=peer, repeats=repeats),
    )


# Settings that slow a world down. Each is compared with a plain world.
_WORLDS = (
    ("lazy timing", WorldSpec(size=4, timing="lazy")),
    ("hostile timing", WorldSpec(size=4, timing="hostile")),
    ("race detector", WorldSpec(size=4, races=True)),
)
# Figures without a goal are only for comparison.
ROWS = (
    _row(
        _figure("warm all_reduce, 4 ranks", "ms", most=1.0),
        take=lambda: cases.all_reduce_seconds(4, 200),
    ),
    _row(
        _figure("warm all_reduce, 1024 ranks", "s", most=1.0),
        take=lambda: cases.all_reduce_seconds(1024, 5),
    ),
    _row(
        _figure("4096 ranks opened, run, closed", "s", most=3.0),
        _figure("memory of 4096 ranks", "MB", most=600.0),
        take=lambda: memory.many_ranks(4096),
    ),
    _peer("all-reduce", shown="all_reduce", peer="threaded", least=None, repeats=100),
    _peer("all-reduce", shown="all_reduce", peer="in-lock-step", least=None, repeats=100),
    _peer("fsdp2", shown="3 steps of FSDP2", peer="threaded", least=4.0, repeats=8),
    _peer("ddp", shown="3 steps of DDP", peer="threaded", least=2.0, repeats=20),
    _row(_figure("case: 4 ranks, 3 steps, hidden 8", "ms", most=20.0), take=cases.case_seconds),
    _row(_figure("the case over its torch work", "x", most=2.5), take=cases.case_over_torch),
    _row(
        _figure("the case on warm gloo workers", "ms", most=50.0),
        _figure("gloo workers over simulated", "x"),
        _figure("gloo workers over simulated, wall clock", "x", most=1.6),
        take=cases.gloo_figures,
    ),
    _row(
        _figure("gloo workers over simulated, hidden 256", "x"),
        _figure("gloo workers over simulated, hidden 256, wall clock", "x", most=1.6),
        take=lambda: cases.gloo_figures(hidden=256, repeats=8)[1:],
    ),
    # Computation hides the cost of simulated ranks if layers are wide.
    *(
        _row(
            _figure(f"ranks over plain loop, hidden {hidden}", "x", most=most),
            take=partial(cases.overhead, hidden),
        )
        for hidden, most in ((256, 1.15), (8, 2.0))
    ),
    _row(
        _figure("mismatch named, 2 ranks", "ms", most=10.0),
        take=lambda: cases.failing_seconds(2),
    ),
    _row(
        _figure("deadlock explained, 64 ranks", "ms", most=100.0),
        take=lambda: cases.failing_seconds(64),
    ),
    *(
        _row(_figure(f"{name} over none, hidden 8", "x"), take=partial(cases.cost_of, world))
        for name, world in _WORLDS
    ),
    _row(_figure("peak memory over what 4 ranks hold", "x", most=1.1), take=memory.memory_ratio),
    _row(
        _figure("a drawn case, drawing included", "ms", most=30.0),
        _figure("drawing a case", "ms", most=1.0),
        take=cases.drawn_seconds,
    ),
    _row(_figure("drawn layouts", "a second", least=1000.0), take=lambda: cases.layouts_rate(3000)),
    _row(_figure("first verdict of a process", "s", most=2.2), take=cases.first_verdict_seconds),
)


def run_benchmarks(*, only: str = "") -> Iterator[Measurement]:
    """Take every measurement.

    Args:
        only: Part of a figure's name, to measure only rows with such figures; "" for all.

    Raises:
        UsageError: No figure's name contains `only`.
    """
    names = [figure.name for row in ROWS for figure in row.figures]
    if not any(only in name for name in names):
        words = [word for name in names for word in (name, *name.split())]
        raise UsageError(
            f"expected a part of a figure's name, got {only!r}.{did_you_mean(only, words)} "
            f"Figures: {'; '.join(names)}."
        )
    # A single thread, so that processor time does not depend on the number of cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for row in ROWS:
            if any(only in figure.name for figure in row.figures):
                yield from row.measure()
    finally:
        torch.set_num_threads(threads)
