"""Working params beside what no sum decides: a rank's own masters and scales, or how they began."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zero_sim.findings import describe as findings
from zero_sim.findings.records import Finding
from zero_sim.judge.checks.shown import Shown
from zero_sim.reference import encode
from zero_sim.scenario.checks import Check
from zero_sim.targets.adapt import UNTRAINED


def check_scales_and_casts(shown: Shown) -> Iterator[Finding]:
    """Compare scales of params in fp8, and check that working params are their masters, cast.

    A cast is by the rank's own scale, since this is about what it holds, right or wrong.
    """
    group, rank, step = shown.group, shown.rank, shown.step
    held, comparison = group.ownership.held[rank], shown.comparison
    scales = shown.engine.scales([n for n in comparison.scale_names(step) if n in held])
    yield from comparison.compare_scales(scales, rank=rank, step=step)
    params = shown.params
    for part in shown.parts:
        place = part.place
        if place.param not in params:
            continue
        working = params[place.param].reshape(-1)[place.start : place.stop]
        scale = scales.get(place.param)
        cast = (
            part.master.to(working.dtype)
            if scale is None
            else encode(part.master, scale=scale, dtype=working.dtype)
        )
        if group.comparer.differs(cast, working):
            at = findings.owned(Check.INVARIANT_CAST, "", step, rank, place)
            yield findings.differing(at, cast, working)


def check_repeated(shown: Shown) -> Iterator[Finding]:
    """Check that a param that is told under two names, such as a tied one, is one param."""
    params = shown.params
    for name, other, values in shown.engine.repeated():
        if shown.group.comparer.differs(params[name], values):
            at = findings.param(shown.step, shown.rank, name)
            message = f"the engine has this param once more as {other!r}, with other values"
            yield findings.differing(replace(at, message=message), params[name], values)


def check_untrained(shown: Shown) -> Iterator[Finding]:
    """Check that params which are never trained are what they were before the engine was built."""
    group = shown.group
    for name, values, now in shown.engine.untrained():
        if now is None:
            group.unobserved.add(UNTRAINED)
        elif group.comparer.differs(values, now):
            at = findings.param(shown.step, shown.rank, name)
            at = replace(at, message="nobody may change this param, which is never trained")
            differing = group.differing(at, values, now)
            yield findings.with_index(differing, {name: tuple(values.shape)})
