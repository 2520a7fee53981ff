"""Candidates with an additional feature, but fewer ranks, params or steps, which count more.

Many bugs show either with another rank or param, or with a feature of the same effect. For example,
an alignment adds the same padding as a second rank. The original case may have either form. These
candidates lead to the smaller form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from zero_sim.scenario.fitting import after_reload
from zero_sim.scenario.spec import (
    FreezeSpec,
    LossScaleSpec,
    NanSpec,
    OneRankSpec,
    ParamGroupSpec,
    ReloadSpec,
    Scenario,
)
from zero_sim.shrink.models import with_bare_params
from zero_sim.shrink.repair import changed, repaired
from zero_sim.workloads import params_of

Change = Callable[[Scenario], Scenario]

TINY = ((1,), (2,), (1, 1))
"""Param sizes of the smallest models."""


def substitutions(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with another feature, but fewer ranks, params or steps."""
    for base in _bases(scenario):
        yield from (repaired(change(base)) for change in _CHANGES)
    if scenario.run.own_micro_batches and scenario.world.size > 1:
        # A rank without data contributes no gradients. A one-rank param has this effect alone.
        alone = repaired(changed(scenario, "world.size", 1))
        for elems in (1, 2):
            two = with_bare_params(alone, ((elems,), (elems,)))
            # On one rank, a sum has no effect unless it is divided.
            yield from (repaired(change(two)) for change in _READ_ONCE_FORMS)


def one_world(scenario: Scenario) -> Scenario:
    """Return the case in the world after its reload, from the first step on."""
    if scenario.reload is None:
        return scenario
    return repaired(replace(after_reload(scenario), reload=None))


def _bases(scenario: Scenario) -> Iterator[Scenario]:
    count = len(params_of(scenario.model))
    for ranks in range(1, min(2, scenario.world.size) + 1):
        fewer = repaired(changed(scenario, "world.size", ranks))
        for sizes in TINY:
            if len(sizes) <= count:
                yield with_bare_params(fewer, [(n,) for n in sizes])
        if ranks < scenario.world.size:
            yield fewer
    if scenario.run.steps > 1:
        # A reload needs several steps, so a single step drops it.
        yield changed(one_world(scenario), "run.steps", 1)
        yield repaired(changed(scenario, "run.steps", scenario.run.steps - 1))


def _setting(path: str, value: object) -> Change:
    return lambda scenario: changed(scenario, path, value)


def _staged(stage: Literal[0, 1, 2]) -> Change:
    """Return a change to another stage, without settings of higher stages."""

    def change(scenario: Scenario) -> Scenario:
        system = replace(
            scenario.system,
            stage=stage,
            prefetch=None,
            reshard_after_forward=True,
            gather_after_step=False,
            arena=scenario.system.arena and stage > 1,
            sum_by=scenario.system.sum_by if stage else "reduce-scatter",
            **({} if stage else _WITHOUT_BUFFERS),
        )
        return replace(scenario, system=system)

    return change


_WITHOUT_BUFFERS: dict[str, Any] = {
    "reduce_buffer_elems": None,
    "contiguous_grads": True,
    "gather_chunk_elems": None,
}


def _both(first: Change, second: Change) -> Change:
    return lambda scenario: second(first(scenario))


def _at_least(path: str, least: int) -> Change:
    table, name = path.split(".")
    return lambda scenario: changed(
        scenario, path, max(least, getattr(getattr(scenario, table), name))
    )


def _frozen(index: int, *, start: int) -> Change:
    def change(scenario: Scenario) -> Scenario:
        name = params_of(scenario.model)[index][0]
        freeze = FreezeSpec(param=name, start=start, stop=start + 1)
        return changed(scenario, "model.freeze", (freeze,))

    # Two steps: one frozen, one not.
    return _both(change, _at_least("run.steps", 2))


def _grouped(scenario: Scenario) -> Scenario:
    name = params_of(scenario.model)[-1][0]
    return changed(scenario, "optimizer.groups", (ParamGroupSpec(match=name, lr=0.03),))


def _read_once(scenario: Scenario) -> Scenario:
    """Let only one micro-batch read the last param."""
    name = params_of(scenario.model)[-1][0]
    one = OneRankSpec(param=name, rank=0, micro_batch=0)
    return changed(scenario, "model.one_rank", (one,))


def _growing(scenario: Scenario) -> Scenario:
    scale = scenario.optimizer.loss_scale or LossScaleSpec()
    # With interval 1, the scale grows after every good step, so few steps are enough.
    return changed(scenario, "optimizer.loss_scale", replace(scale, growth_interval=1))


_TWO_STEPS = _at_least("run.steps", 2)
_TWO_MICRO_BATCHES = _at_least("run.micro_batches", 2)
_BY_MICRO_BATCHES = _both(_setting("system.divide_by", "micro-batches"), _TWO_MICRO_BATCHES)
_SCALED = _setting("optimizer.loss_scale", LossScaleSpec())

_READ_ONCE = _both(_read_once, _TWO_MICRO_BATCHES)
_READ_ONCE_AND_DIVIDED = _both(_read_once, _BY_MICRO_BATCHES)
_READ_ONCE_FORMS: tuple[Change, ...] = (
    _READ_ONCE,
    _READ_ONCE_AND_DIVIDED,
    _both(_READ_ONCE_AND_DIVIDED, _setting("system.divide", "pre")),
)
_CHANGES: tuple[Change, ...] = (
    _setting("system.align_elems", 2),
    _setting("system.bucket_elems", 1),
    _setting("system.bucket_elems", 2),
    _setting("system.overlap_grads", False),
    _setting("system.overlap_params", False),
    _staged(0),
    _staged(1),
    _staged(2),
    _setting("system.prefetch", 0),
    _setting("system.partition", "uneven"),
    _setting("system.partition", "one-owner"),
    _setting("system.param_order", "reverse"),
    _setting("system.redundancy", 2),
    _setting("system.divide", "pre"),
    _setting("system.divide", "none"),
    _setting("system.divide_by", "tokens"),
    _setting("system.sync", "every"),
    _setting("topology.pp", 2),
    _setting("world.races", True),
    _setting("world.timing", "lazy"),
    _setting("model.dtype", "bf16"),
    _setting("optimizer.clip_norm", 0.05),
    _grouped,
    _SCALED,
    _growing,
    _TWO_STEPS,
    _TWO_MICRO_BATCHES,
    _both(_setting("system.sync", "every"), _TWO_MICRO_BATCHES),
    # On one rank, a mean over ranks divides by 1, so divide by micro-batches instead.
    _BY_MICRO_BATCHES,
    _both(_BY_MICRO_BATCHES, _setting("system.divide", "pre")),
    _both(_both(_SCALED, _setting("data.nan", NanSpec(step=0, rank=0))), _TWO_STEPS),
    _both(_setting("reload", ReloadSpec(step=1)), _TWO_STEPS),
    _setting("model.tied", ("p0",)),
    _READ_ONCE,
    _frozen(0, start=0),
    _frozen(0, start=1),
    _frozen(-1, start=1),
)
