"""Working params beside what no sum decides: a rank's own masters and scales, or how they began."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from zero_sim.findings import describe as findings
from zero_sim.findings.records import Finding
from zero_sim.judge.judged_group import Comparer, JudgedGroup
from zero_sim.reference import encode
from zero_sim.scenario.checks import Check
from zero_sim.targets import CompletedEngine, OwnedPart
from zero_sim.targets.adapt import UNTRAINED


def check_casts(
    parts: Sequence[OwnedPart],
    params: Mapping[str, Tensor],
    scales: Mapping[str, Tensor | None],
    *,
    comparer: Comparer,
    step: int,
    rank: int,
) -> Iterator[Finding]:
    """Check that working params are their masters, cast; of params that are there at all.

    Args:
        parts: What the rank owns.
        params: Its working params.
        scales: Of those in fp8: the rank's own, since this is about what it holds, right or wrong.
        comparer: Counts what is compared.
        step: After which step.
        rank: The rank, within the judged group.
    """
    for part in parts:
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
        if comparer.differs(cast, working):
            at = findings.owned(Check.INVARIANT_CAST, "", step, rank, place)
            yield findings.differing(at, cast, working)


def check_repeated(
    repeated: Iterable[tuple[str, str, Tensor]],
    params: Mapping[str, Tensor],
    *,
    comparer: Comparer,
    step: int,
    rank: int,
) -> Iterator[Finding]:
    """Check that a param that is told under two names, such as a tied one, is one param.

    Args:
        repeated: The param, the name under which it was told again, and the values there.
        params: All that was told, each once.
        comparer: Counts what is compared.
        step: After which step.
        rank: The rank, within the judged group.
    """
    for name, other, values in repeated:
        if comparer.differs(params[name], values):
            at = findings.param(step, rank, name)
            message = f"the engine has this param once more as {other!r}, with other values"
            yield findings.differing(replace(at, message=message), params[name], values)


def check_untrained(
    engine: CompletedEngine, *, group: JudgedGroup, step: int, rank: int
) -> Iterator[Finding]:
    """Check that params which are never trained are what they were before the engine was built.

    Args:
        engine: The rank's engine.
        group: The judged group.
        step: After which step.
        rank: The rank, within the group.
    """
    for name, values, now in engine.untrained():
        if now is None:
            group.unobserved.add(UNTRAINED)
        elif group.comparer.differs(values, now):
            at = findings.param(step, rank, name)
            at = replace(at, message="nobody may change this param, which is never trained")
            differing = group.differing(at, values, now)
            yield findings.with_index(differing, {name: tuple(values.shape)})
