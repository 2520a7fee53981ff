"""Buffers and parts of a rank, whatever the numbers are: places, zero gradients, padding."""

from __future__ import annotations

from collections.abc import Iterator

from zero_sim.findings.phase import Phase
from zero_sim.findings.records import Finding
from zero_sim.judge.checks.shown import Shown
from zero_sim.scenario.checks import Check


def check_same_places(shown: Shown) -> Iterator[Finding]:
    """Check that a rank still owns what it owned at the start: what is not told is not compared."""
    before = shown.group.ownership.places[shown.rank]
    now = [part.place for part in shown.parts]
    if before != now:
        gone = sorted({place.param for place in before} - {place.param for place in now})
        yield Finding(
            check=Check.INVARIANT_OWNERSHIP,
            message=f"this rank owned {len(before)} parts at the start and {len(now)} now"
            + (f"; gone: {', '.join(gone)}" if gone else ""),
            step=shown.step,
            phase=Phase.FORWARD,
            rank=shown.rank,
        )


def check_zero_gradients(shown: Shown) -> Iterator[Finding]:
    """Check that gradient buffers are zero before the first micro-batch of a step."""
    where = shown.engine.stray_gradients(padding_only=False)
    if where:
        yield Finding(
            check=Check.INVARIANT_ZERO_GRADIENTS,
            step=shown.step,
            rank=shown.rank,
            phase=Phase.FORWARD,
            message=f"gradients are not zero before the first micro-batch: {where}",
        )


def check_padding(shown: Shown) -> Iterator[Finding]:
    """Check that the padding of gradient buffers is still zero after a step."""
    where = shown.engine.stray_gradients(padding_only=True)
    return _written_padding("a gradient buffer", where, shown, phase=Phase.REDUCE)


def check_param_padding(shown: Shown) -> Iterator[Finding]:
    """Check that the padding of param buffers and master shards is still zero after a step."""
    where = shown.engine.stray_padding()
    return _written_padding("params or masters", where, shown, phase=Phase.GATHER)


def _written_padding(what: str, where: str, shown: Shown, *, phase: Phase) -> Iterator[Finding]:
    if where:
        yield Finding(
            check=Check.INVARIANT_PADDING,
            step=shown.step,
            rank=shown.rank,
            phase=phase,
            message=f"padding of {what} was written: {where}",
        )
