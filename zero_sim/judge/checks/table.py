"""Table of the checks of a rank, by the point of a step at which they are made, in order.

A check takes what a rank shows and yields findings. To add one, write a function in a module beside
this one, and name it here. Findings travel in the order of the data flow, not in this one
(`zero_sim.findings.dataflow`).

Beside these are checks of a whole group: who owns what (`Ownership.check`), what a load brought
back (`judge.loaded`), a module that was given back (`checks.given_back`), and what calls cost
(`zero_sim.cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zero_sim.findings.records import Finding
from zero_sim.judge.checks.buffers import (
    check_padding,
    check_param_padding,
    check_same_places,
    check_zero_gradients,
)
from zero_sim.judge.checks.memory import check_rank_memory
from zero_sim.judge.checks.shown import Shown
from zero_sim.judge.checks.step_result import check_result
from zero_sim.judge.checks.working_params import (
    check_repeated,
    check_scales_and_casts,
    check_untrained,
)

RankCheck = Callable[[Shown], Iterator[Finding]]


def compare_measured(shown: Shown) -> Iterator[Finding]:
    """Compare the norm and the zeros of the whole gradient."""
    return shown.comparison.compare_measured(shown.result, rank=shown.rank, step=shown.step)


def compare_losses(shown: Shown) -> Iterator[Finding]:
    """Compare losses, and what a forward read whose loss differs."""
    return shown.comparison.compare_losses(
        shown.losses, reads=shown.notes.reads, rank=shown.rank, step=shown.step
    )


def compare_parts(shown: Shown) -> Iterator[Finding]:
    """Compare reduced gradients, masters and optimizer state, part by part."""
    comparison = shown.comparison
    for part in shown.parts:
        yield from comparison.compare_part(part, rank=shown.rank, step=shown.step)


def compare_reported(shown: Shown) -> Iterator[Finding]:
    """Compare gradients of whole params."""
    return shown.comparison.compare_reported(shown.engine, rank=shown.rank, step=shown.step)


def compare_params(shown: Shown) -> Iterator[Finding]:
    """Compare working params."""
    return shown.comparison.compare_params(shown.params, rank=shown.rank, step=shown.step)


BEFORE_BACKWARD: Sequence[RankCheck] = (check_zero_gradients,)

AFTER_STEP: Sequence[RankCheck] = (
    compare_measured,
    check_result,
    compare_losses,
    check_same_places,
    compare_parts,
    check_padding,
    compare_reported,
)
"""Compared once more with the own reference if they find anything with steps from elsewhere."""

WEIGHED: Sequence[RankCheck] = (check_rank_memory,)
"""After one step of a run, the weighed one."""

AFTER_GATHER: Sequence[RankCheck] = (
    check_scales_and_casts,
    check_repeated,
    compare_params,
    check_param_padding,
)
"""As `AFTER_STEP`."""

AFTER_GATHER_ALWAYS: Sequence[RankCheck] = (check_untrained,)
"""These need no expected step."""


def run_checks(checks: Sequence[RankCheck], shown: Shown) -> Iterator[Finding]:
    """Yield what checks find, one after another."""
    for check in checks:
        yield from check(shown)
