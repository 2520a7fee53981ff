"""Comparison of loaded state, before a rank's first forward after a checkpoint.

A wrong load makes everything after it wrong. Only here can the finding name its param and key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from zero_sim.findings import describe as findings
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.recognition import Known
from zero_sim.findings.records import Finding
from zero_sim.judge.judged_group import JudgedGroup, beside, cut_state
from zero_sim.reference import TrainingState
from zero_sim.scenario.checks import Check
from zero_sim.targets import EngineAdapter, OwnedPart, Settings
from zero_sim.targets.bare_model import names_like

CHECK = Check.EQUALITY_LOAD

_FREE = frozenset({"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"})
"""Settings that select an implementation, not a computation, so they may differ."""


def compare_loaded(
    group: JudgedGroup, engine: EngineAdapter, *, training_state: TrainingState, rank: int
) -> Iterator[Finding]:
    """Compare all reported state: masters, optimizer state, params, scales, buffers and settings.

    Args:
        group: The judged group.
        engine: The rank's engine.
        training_state: The reference's state, before its next step.
        rank: Group rank.
    """
    # Masters and state first, because working params are computed from them.
    for part in engine.parts():
        yield from _compare_part(group, part, training_state=training_state, rank=rank)
    params = engine.params()
    for name, wanted in training_state.params.items():
        if name not in group.ownership.held[rank]:
            continue
        at = _of_param(group, name, rank=rank)
        if name not in params:
            yield findings.missing(at, "the system does not have this param after the load")
        elif group.comparer.differs(wanted, params[name]):
            known = partial(_others, training_state.params)
            yield group.differing(at, wanted, params[name], known=known)
    for name, values, now in engine.untrained():
        # Checkpoints contain untrained params, too.
        if now is not None and group.comparer.differs(values, now):
            yield group.differing(_of_param(group, name, rank=rank), values, now)
    yield from _compare_scales(group, engine, training_state=training_state, rank=rank)
    yield from _compare_buffers(group, engine, training_state=training_state, rank=rank)
    settings = engine.settings()
    if settings is None:
        group.unobserved.add("settings of the optimizer after a load")
    else:
        yield from _compare_settings(group, settings, training_state=training_state, rank=rank)


def _compare_part(
    group: JudgedGroup, part: OwnedPart, *, training_state: TrainingState, rank: int
) -> Iterator[Finding]:
    place, step = part.place, group.first_step

    def others(values: Mapping[str, Tensor]) -> Iterator[Known]:
        # A load may swap params, so other params' values are candidates.
        return _others(values, start=place.start)

    name = place.param
    whole = training_state.masters[name]
    cut = partial(cut_state, master=whole, start=place.start, stop=place.stop)
    master = whole.reshape(-1)[place.start : place.stop]
    if group.comparer.differs(master, part.master):
        at = findings.owned(CHECK, "the fp32 master", step, rank, place)

        def known() -> Iterator[Known]:
            # A master that was loaded from the working param lacks the lower bits.
            yield _narrowed(training_state, name, start=place.start)
            yield from others(training_state.masters)

        yield group.differing(replace(at, manner="master"), master, part.master, known=known)
    wanted = training_state.state[name]
    # If only weights were loaded, optimizers may create state now or in the next step. Empty
    # `wanted` skips the comparison until then.
    for key in sorted(wanted.keys() | part.state.keys()) if wanted else ():
        at = findings.owned(CHECK, f"optimizer state {key!r}", step, rank, place)
        at = replace(at, manner=key)
        if key not in wanted or key not in part.state:
            side = "the reference" if key in part.state else "the system"
            message = f"optimizer state {key!r} is missing in {side} after the load"
            yield findings.missing(at, message)
            continue
        value, got = cut(wanted[key]), beside(part.state[key], wanted[key])
        # Counters may be on the CPU although params are on a device.
        if not group.comparer.differs(value, got):
            continue

        def known_state(key: str = key) -> Iterator[Known]:
            for other, stored in wanted.items():
                if other != key and stored.dim():
                    what = f"the expected optimizer state {other!r}"
                    yield Known(what=what, values=stored, start=place.start)
            of_key = {
                each: state[key] for each, state in training_state.state.items() if key in state
            }
            yield from others({each: value for each, value in of_key.items() if value.dim()})

        yield group.differing(at, value, got, known=known_state)


def _compare_scales(
    group: JudgedGroup, engine: EngineAdapter, *, training_state: TrainingState, rank: int
) -> Iterator[Finding]:
    held = [name for name in training_state.scales if name in group.ownership.held[rank]]
    for name, scale in engine.scales(held).items():
        at = replace(_of_param(group, name, rank=rank), manner="scale")
        if scale is None:
            yield findings.missing(at, "the system does not have the scale after the load")
        elif group.comparer.differs(training_state.scales[name], scale):
            at = replace(at, message="the scale of the fp8 param differs from the checkpoint")
            yield group.differing(at, training_state.scales[name], scale)


def _compare_buffers(
    group: JudgedGroup, engine: EngineAdapter, *, training_state: TrainingState, rank: int
) -> Iterator[Finding]:
    held = engine.module_tensors() if training_state.buffers else {}
    for name, wanted in training_state.buffers.items():
        alike = names_like(held, name)
        # A buffer with another name or dtype cannot be compared. The next loss depends on it.
        got = held[alike[0]] if len(alike) == 1 else wanted
        if got.dtype == wanted.dtype and group.comparer.differs(wanted, got):
            message = "the buffer of the module differs from the checkpoint"
            at = replace(_of_param(group, name, rank=rank), manner="buffer", message=message)
            yield group.differing(at, wanted, got)


def _compare_settings(
    group: JudgedGroup, settings: Settings, *, training_state: TrainingState, rank: int
) -> Iterator[Finding]:
    for name, reported in settings.params.items():
        wanted = training_state.settings.get(name, {})
        # Compare common settings only, because engines may have additional settings.
        for key in sorted(wanted.keys() & reported.keys() - _FREE):
            if reported[key] != wanted[key]:
                yield _setting(
                    group, f"the setting {key!r}", wanted[key], reported[key], rank=rank, param=name
                )
    for what, expected, got in (
        ("the loss scale", training_state.loss_scale, settings.loss_scale),
        ("the count of good steps", training_state.good_steps, settings.good_steps),
    ):
        # None without loss scaling.
        if expected is not None and got != expected:
            yield _setting(group, what, expected, got, rank=rank)


def _setting(
    group: JudgedGroup,
    what: str,
    expected: object,
    got: object,
    *,
    rank: int,
    param: str | None = None,
) -> Finding:
    return Finding(
        check=CHECK,
        message=f"{what} differs from the checkpoint: expected {expected!r}, got {got!r}",
        step=group.first_step,
        phase=Phase.LOAD,
        rank=rank,
        param=param,
        manner=what,
    )


def _of_param(group: JudgedGroup, name: str, *, rank: int) -> Finding:
    """Return a template for a whole working param."""
    return Finding(
        check=CHECK,
        message="the working param differs from the checkpoint",
        step=group.first_step,
        phase=Phase.LOAD,
        rank=rank,
        param=name,
        offset_in_param=0,
        manner="param",
    )


def _narrowed(training_state: TrainingState, name: str, *, start: int) -> Known:
    """Return the working param in fp32, as a candidate for a master."""
    # Widening is exact: it fills the lower bits with zeros.
    values = training_state.params[name].float()
    return Known(what="the working param, without the lower bits", values=values, start=start)


def _others(values: Mapping[str, Tensor], *, start: int = 0) -> Iterator[Known]:
    for name, value in values.items():
        what = f"the expected value of param {name!r}"
        yield Known(what=what, values=value, start=start, name=name)
