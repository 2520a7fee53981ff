"""Draws scenarios that a target says it can be asked for, with a random subset of its features on.

The first of everything is the simplest: Hypothesis shrinks towards fewer ranks, one small param,
and no feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    FreezeSpec,
    GroupSpec,
    LossScaleSpec,
    ModelSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.targets import Capabilities, Target, capabilities_of, refusals

_SHAPED = ("params", "lattice", "bit-hash")
_SIMPLEST_FIRST = ("params", "lattice", "bit-hash", "mlp", "ternary")
_NO_FOREACH = ("nadam", "radam", "asgd")
_BETAS = ("adamw", "adam", "nadam", "radam", "adamax")

Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def scenarios_for(
    draw: Draw, target: Target, *, world_size_max: int = 6, steps_max: int = 3
) -> Scenario:
    """Scenarios within a target's capabilities.

    Args:
        draw: Given by Hypothesis.
        target: What they are for; one that declares no capabilities gets what ten lines around
            AdamW can do.
        world_size_max: Most ranks.
        steps_max: Most steps.
    """
    features = _Features(draw, capabilities_of(target), world_size_max=world_size_max)
    drawn = _draw_scenario(features, steps_max=steps_max)
    drawn = replace(drawn, system=replace(drawn.system, target=target.name))
    # What the target's own `refuses` knows, nothing here can; few draws end so.
    while refusals(target, drawn):
        drawn = _draw_scenario(features, steps_max=steps_max)
        drawn = replace(drawn, system=replace(drawn.system, target=target.name))
    assert not check_scenario(drawn), check_scenario(drawn)
    return drawn


class _Features:
    """What can be drawn, and the drawing of it."""

    def __init__(self, draw: Draw, able: Capabilities, *, world_size_max: int) -> None:
        self.draw, self.able = draw, able
        self.world_size_max = min(world_size_max, able.world_size_max or world_size_max)

    def one_of(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def has(self, path: str) -> bool:
        """Whether the target follows an option, and this case switches it on."""
        return path in self.able.follows and self.number(0, 2) == 2


def _draw_scenario(on: _Features, *, steps_max: int) -> Scenario:
    topology = _draw_topology(on)
    parts = topology.tp * topology.pp
    ranks = on.number(1, max(1, on.world_size_max // parts))
    steps = on.number(1, steps_max)
    model = _draw_model(on, ranks=ranks, steps=steps)
    system = _draw_system(on, ranks=ranks)
    hostile = on.one_of("eager", "lazy", "hostile")
    scenario = Scenario(
        schema=1,
        name="drawn",
        model=model,
        data=DataSpec(rows=on.number(1, 3), uneven_rows=on.one_of(False, False, True)),
        world=WorldSpec(
            size=ranks * parts,
            order=on.one_of(*on.able.orders),
            schedule=on.one_of("round-robin", "random"),
            timing=hostile,
        ),
        topology=topology,
        system=system,
        optimizer=_draw_optimizer(on, model=model),
        run=RunSpec(
            steps=steps,
            micro_batches=on.number(1, 3) if "run.micro_batches" in on.able.follows else 1,
            seed=on.number(0, 2**16),
        ),
    )
    if steps > 1 and on.has("reload"):
        reload = ReloadSpec(step=on.number(1, steps - 1), form="sharded")
        scenario = replace(scenario, reload=reload)
    return scenario


def _draw_topology(on: _Features) -> TopologySpec:
    tp = 2 if on.has("topology.tp") and on.world_size_max >= 2 else 1
    pp = 2 if on.has("topology.pp") and on.world_size_max >= 2 * tp else 1
    order = TopologySpec().order
    if on.has("topology.order"):
        order = on.one_of(order, "pp-dp-cp-tp", "dp-tp-cp-pp")
    return TopologySpec(tp=tp, pp=pp, order=order)


def _draw_model(on: _Features, *, ranks: int, steps: int) -> ModelSpec:
    ordered = [name for name in _SIMPLEST_FIRST if name in on.able.models]
    ordered += [name for name in on.able.models if name not in ordered]
    name = on.one_of(*ordered)
    dtype = on.one_of(*on.able.dtypes)
    if name in _SHAPED:
        return ModelSpec(name=name, dtype=dtype, shapes=_draw_shapes(on, ranks=ranks))
    hidden = on.number(1, 5)
    if name not in ("mlp", "fp8"):
        return ModelSpec(name=name, dtype=dtype, hidden=hidden)
    freeze: tuple[FreezeSpec, ...] = ()
    if name == "mlp" and on.has("model.freeze"):
        start = on.number(0, steps - 1)
        param = on.one_of("0.up.weight", "0.up.bias", "0.down.weight", "0.down.bias")
        freeze = (FreezeSpec(param=param, start=start, stop=start + 1),)
    return ModelSpec(name=name, dtype=dtype, hidden=hidden, blocks=on.number(1, 2), freeze=freeze)


def _draw_shapes(on: _Features, *, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of 0, 1, N - 1, N, N + 1 elements a dimension, and any other small number."""
    least = 0 if on.able.empty_params else 1
    edges = sorted(edge for edge in {0, 1, ranks - 1, ranks, ranks + 1} if edge >= least)
    dim = st.sampled_from(edges) | st.integers(least, 2 * ranks + 1)
    kinds: list[st.SearchStrategy[tuple[int, ...]]] = [st.tuples(dim), st.tuples(dim, dim)]
    if on.able.scalar_params:
        kinds.append(st.just(()))
    drawn = on.draw(st.lists(st.one_of(kinds), max_size=5))
    # One at least has elements: without a gradient, equality means nothing.
    return (*drawn, (on.number(1, 5),))


def _draw_system(on: _Features, *, ranks: int) -> SystemSpec:
    stage = on.one_of(*on.able.stages)
    divisors = [copies for copies in range(1, ranks + 1) if ranks % copies == 0]
    sync = "every" if on.has("system.sync") else "last"
    divide = "post"
    if on.has("system.divide"):
        divide = on.one_of("none", "pre", "post", "premul")
    return SystemSpec(
        stage=stage,
        redundancy=on.one_of(*divisors) if stage and on.has("system.redundancy") else 1,
        param_order="reverse" if on.has("system.param_order") else "registration",
        bucket_elems=on.number(1, 60) if on.has("system.bucket_elems") else None,
        sync=sync,
        divide=divide,
        divide_by="micro-batches" if on.has("system.divide_by") else "ranks",
        grad_dtype="fp32" if on.has("system.grad_dtype") else "param",
    )


def _draw_optimizer(on: _Features, *, model: ModelSpec) -> OptimizerSpec:
    name = on.one_of(*on.able.optimizers)
    momentum = name in ("sgd", "rmsprop") and on.has("optimizer.momentum")
    endings = ("bias", "weight") if model.name == "mlp" else ("0", "1")
    groups = tuple(
        GroupSpec(match=ending, lr=on.one_of(None, 0.0, 0.01))
        for ending in (endings if on.has("optimizer.groups") else ())
    )
    clip_norm = on.one_of(100.0, 0.1, 1e-3) if on.has("optimizer.clip_norm") else None
    clip_value = 1e-3 if clip_norm is None and on.has("optimizer.clip_value") else None
    return OptimizerSpec(
        name=name,
        lr=on.one_of(0.1, 1e-3),
        betas=(0.5, 0.75) if name in _BETAS and on.has("optimizer.betas") else (0.9, 0.999),
        eps=1.0 if on.has("optimizer.eps") else 1e-8,
        weight_decay=0.1 if name != "rprop" and on.has("optimizer.weight_decay") else 0.0,
        momentum=0.9 if momentum else 0.0,
        nesterov=name == "sgd" and momentum and on.has("optimizer.nesterov"),
        amsgrad=name in ("adam", "adamw") and on.has("optimizer.amsgrad"),
        foreach=name not in _NO_FOREACH and on.has("optimizer.foreach"),
        warmup_steps=3 if on.has("optimizer.warmup_steps") else 0,
        groups=groups,
        clip_norm=clip_norm,
        clip_value=clip_value,
        loss_scale=LossScaleSpec(initial=64.0) if on.has("optimizer.loss_scale") else None,
    )
