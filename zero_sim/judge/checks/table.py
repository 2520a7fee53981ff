"""Checks of a rank, and a table of checks for each point of a step.

A check takes a rank's state and yields findings. To add a check, write a function and list it in
the table below. The table's order does not affect reports: they sort findings by dataflow
(`zero_sim.findings.dataflow`).

Other checks are elsewhere: ownership (`Ownership.check`), loaded state (`judge.loaded`), unwrapped
modules (`checks.unwrapped`) and costs (`zero_sim.cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from zero_sim.cost.memory import bytes_held, check_memory
from zero_sim.findings import describe as findings
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.judge.checks.observed_step import ObservedStep
from zero_sim.reference import encode
from zero_sim.scenario.checks import Check
from zero_sim.targets.adapt import PARTS, UNTRAINED


def check_scales_and_casts(observed: ObservedStep) -> Iterator[Finding]:
    """Compare fp8 scales, and check that each working param is its cast master."""
    group, rank, step = observed.group, observed.rank, observed.step
    held, comparison = group.ownership.held[rank], observed.comparison
    # A rank only has scales of params that it holds.
    scales = observed.engine.scales([n for n in comparison.scale_names(step) if n in held])
    yield from comparison.compare_scales(scales, rank=rank, step=step)
    params = observed.params
    for part in observed.parts:
        place = part.place
        if place.param not in params:
            continue
        working = params[place.param].reshape(-1)[place.start : place.stop]
        # Cast by the rank's own scale. A wrong scale is already a finding.
        scale = scales.get(place.param)
        cast = (
            part.master.to(working.dtype)
            if scale is None
            else encode(part.master, scale=scale, dtype=working.dtype)
        )
        if group.comparer.differs(cast, working):
            at = findings.owned(Check.INVARIANT_CAST, "", step, rank, place)
            yield findings.differing(at, cast, working)


def check_repeated(observed: ObservedStep) -> Iterator[Finding]:
    """Check that a param with two names, such as a tied param, has equal values under both."""
    params = observed.params
    for name, other, values in observed.engine.repeated():
        if observed.group.comparer.differs(params[name], values):
            at = findings.param(observed.step, observed.rank, name)
            message = f"the engine also has this param as {other!r}, with other values"
            yield findings.differing(replace(at, message=message), params[name], values)


def check_untrained(observed: ObservedStep) -> Iterator[Finding]:
    """Check that untrained params have not changed since the engine was built."""
    group = observed.group
    for name, values, now in observed.engine.untrained():
        if now is None:
            group.unobserved.add(UNTRAINED)
        elif group.comparer.differs(values, now):
            at = findings.param(observed.step, observed.rank, name)
            at = replace(at, message="this param is not trained and must not change")
            differing = group.differing(at, values, now)
            yield findings.with_index(differing, {name: tuple(values.shape)})


def check_result(observed: ObservedStep) -> Iterator[Finding]:
    """Check that an engine's report of a step is complete and correct."""
    result, rank, step = observed.result, observed.rank, observed.step
    expected, optimizer = observed.expected_steps.steps.get(step), observed.group.scenario.optimizer
    reported = {"norm": result.norm, "zeros": result.zeros, "skipped": result.skipped}
    observed.group.unobserved.update(name for name, got in reported.items() if got is None)
    if result.raised is not None:
        if result.skipped != expected.skipped:
            yield findings.wrongly_raised(step, rank, raised=result.raised)
        # A step that raised cannot report a skip.
        result = replace(result, skipped=None)
    if all(got is None for got in (result.norm, result.zeros, result.skipped, result.loss_scale)):
        # This engine does not report on steps. If it did, norm and loss scale would be required.
        return
    # If an engine clips or scales, it must report by how much, or it cannot be followed.
    if result.norm is None and optimizer.clip_norm is not None:
        yield findings.misreported("norm", step, rank, expected=float(expected.norm), got=None)
    if result.loss_scale is None and optimizer.loss_scale is not None:
        yield findings.misreported("loss_scale", step, rank, expected=expected.loss_scale, got=None)
    fields = (("skipped", result.skipped), ("loss_scale", result.loss_scale))
    for name, got in fields:
        if got is not None and got != (wanted := getattr(expected, name)):
            yield findings.misreported(name, step, rank, expected=wanted, got=got)


def check_same_places(observed: ObservedStep) -> Iterator[Finding]:
    """Check that a rank owns the same places as at the start."""
    before = observed.group.ownership.places[observed.rank]
    now = [part.place for part in observed.parts]
    if before != now:
        # State of omitted params would not be compared, so name them.
        gone = sorted({place.param for place in before} - {place.param for place in now})
        yield Finding(
            check=Check.INVARIANT_OWNERSHIP,
            message=f"this rank owned {len(before)} parts at the start and {len(now)} now"
            + (f"; gone: {', '.join(gone)}" if gone else ""),
            step=observed.step,
            phase=Phase.FORWARD,
            rank=observed.rank,
        )


def check_zero_gradients(observed: ObservedStep) -> Iterator[Finding]:
    """Check that gradient buffers are zero before the first micro-batch."""
    # Other values would be added to this step's gradients.
    where = observed.engine.stray_gradients(padding_only=False)
    if where:
        yield Finding(
            check=Check.INVARIANT_ZERO_GRADIENTS,
            step=observed.step,
            rank=observed.rank,
            phase=Phase.FORWARD,
            message=f"gradients are not zero before the first micro-batch: {where}",
        )


def check_padding(observed: ObservedStep) -> Iterator[Finding]:
    """Check that gradient padding is still zero after a step."""
    where = observed.engine.stray_gradients(padding_only=True)
    return _written_padding("a gradient buffer", where, observed, phase=Phase.REDUCE)


def check_param_padding(observed: ObservedStep) -> Iterator[Finding]:
    """Check that padding of params and masters is still zero after a step."""
    where = observed.engine.stray_padding()
    return _written_padding("params or masters", where, observed, phase=Phase.GATHER)


def _written_padding(
    what: str, where: str, observed: ObservedStep, *, phase: Phase
) -> Iterator[Finding]:
    if where:
        yield Finding(
            check=Check.INVARIANT_PADDING,
            step=observed.step,
            rank=observed.rank,
            phase=phase,
            message=f"padding of {what} was written: {where}",
        )


def compare_measured(observed: ObservedStep) -> Iterator[Finding]:
    """Compare norm and zeros of the whole gradient."""
    return observed.comparison.compare_measured(
        observed.result, rank=observed.rank, step=observed.step
    )


def compare_losses(observed: ObservedStep) -> Iterator[Finding]:
    """Compare losses. If a loss differs, also compare the params its forward read."""
    return observed.comparison.compare_losses(
        observed.losses, reads=observed.notes.reads, rank=observed.rank, step=observed.step
    )


def compare_parts(observed: ObservedStep) -> Iterator[Finding]:
    """Compare reduced gradients, masters and optimizer state of each part."""
    comparison = observed.comparison
    for part in observed.parts:
        yield from comparison.compare_part(part, rank=observed.rank, step=observed.step)


def compare_reported(observed: ObservedStep) -> Iterator[Finding]:
    """Compare gradients of whole params."""
    return observed.comparison.compare_reported(
        observed.engine, rank=observed.rank, step=observed.step
    )


def compare_params(observed: ObservedStep) -> Iterator[Finding]:
    """Compare working params."""
    return observed.comparison.compare_params(
        observed.params, rank=observed.rank, step=observed.step
    )


def check_rank_memory(observed: ObservedStep) -> Iterator[Finding]:
    """Compare a rank's resident memory with the target's closed form."""
    notes, group = observed.notes, observed.group
    held = observed.engine.held_bytes()
    if notes.own_bytes is not None:
        expected_bytes = notes.own_bytes
    else:
        expected_bytes = bytes_held(
            notes.sizes,
            scenario=group.scenario,
            rank=observed.rank,
            # Count the reported state: its keys were already compared with the reference.
            stored=sum(
                part.master.numel() * sum(value.dim() > 0 for value in part.state.values())
                for part in observed.parts
            ),
        )
        if PARTS in group.unobserved:
            del expected_bytes["state"]  # Only parts show how much state an element has.
    yield from check_memory(held, expected_bytes, step=observed.step, rank=observed.rank)
    # Peaks within the step, which hooks recorded.
    if notes.memory is not None:
        yield from notes.memory.findings()


RankCheck = Callable[[ObservedStep], Iterator[Finding]]

BEFORE_BACKWARD: Sequence[RankCheck] = (check_zero_gradients,)

AFTER_STEP: Sequence[RankCheck] = (
    # First, because bounded comparisons need the reported norm to follow parts.
    compare_measured,
    check_result,
    compare_losses,
    check_same_places,
    compare_parts,
    check_padding,
    compare_reported,
)
"""After a step. Run again on local steps if shared steps give a finding."""

WEIGHED: Sequence[RankCheck] = (check_rank_memory,)
"""After a single step of the run, because measuring memory is slow."""

AFTER_GATHER: Sequence[RankCheck] = (
    check_scales_and_casts,
    check_repeated,
    compare_params,
    check_param_padding,
)
"""After the gathers. Run again like `AFTER_STEP`."""

AFTER_GATHER_ALWAYS: Sequence[RankCheck] = (check_untrained,)
"""After the gathers, even if the reference cannot take the step."""


def run_checks(checks: Sequence[RankCheck], observed: ObservedStep) -> Iterator[Finding]:
    """Yield the findings of all checks, in order."""
    for check in checks:
        yield from check(observed)
