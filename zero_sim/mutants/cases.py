"""The cases of a campaign: drawn so that conjunctions of features are frequent and worlds small.

The same for every mutant, whatever its flags: a campaign that knew what it is looking for would
measure nothing. Most bugs need two or three things at once, so each case switches on a random part
of what the flags name, and how large that part is, is drawn, too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from hypothesis import strategies as st

from zero_sim.mutants.records import FLAGS, Flag
from zero_sim.scenario.names import with_known_names
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    DtypeName,
    FreezeSpec,
    GroupSpec,
    LossScaleSpec,
    ModelName,
    ModelSpec,
    NanSpec,
    OptimizerName,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.scenario.unused import without_unused
from zero_sim.shrink.size import params_of

_WIDE_RANKS = (11, 12)
_RANKS_MAX = 6
_OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "adamw", "adam", "rmsprop", "adagrad")
_MLP_PARAMS = ("0.up.weight", "0.up.bias", "0.down.weight", "0.down.bias")
_DTYPES: tuple[DtypeName, ...] = ("bf16", "bf16", "fp32")
_DIVIDE: tuple[Literal["none", "pre", "post", "premul"], ...] = (
    "post", "post", "post", "pre", "premul", "none",
)  # fmt: skip
_DIVIDE_EARLY = (*_DIVIDE, *_DIVIDE[3:5], *_DIVIDE[3:5])
_STAGES: tuple[Literal[0, 1], ...] = (1, 1, 1, 0)
_PARAM_ORDERS: tuple[Literal["registration", "reverse"], ...] = ("registration", "reverse")
_COUNTED: tuple[Literal["ranks", "micro-batches", "tokens"], ...] = (
    "ranks", "micro-batches", "tokens",
)  # fmt: skip
_EXPANSION = 4
_DISTINCT_EVERY = 4
"""Of so many cases about one has ranks that begin with different values."""


@st.composite
def campaign_cases(draw: st.DrawFn) -> Scenario:
    """A case that the unbroken system must pass.

    Args:
        draw: Given by Hypothesis.
    """
    # Ranks first, then params: what is drawn first shrinks first.
    wide = draw(st.integers(0, 15)) == 15
    size = draw(st.sampled_from(_WIDE_RANKS) if wide else st.integers(2, _RANKS_MAX))
    density = draw(st.sampled_from([1, 2, 4, 6]))
    # What shrinks to 0 shrinks to a case without the feature.
    wanted: set[Flag] = {flag for flag in FLAGS if draw(st.integers(0, 7)) >= 8 - density}
    model = draw(_models(wanted, size))
    topology = draw(_topologies(wanted, model, size))
    ranks = size // (topology.tp * topology.pp)
    system = draw(_systems(wanted, model, ranks // topology.ep))
    steps = draw(st.integers(2, 4)) if wanted & {"S2", "CK"} else draw(st.integers(1, 2))
    scenario = Scenario(
        schema=1,
        name="drawn",
        model=model,
        data=DataSpec(
            rows=draw(st.integers(1, 2)), uneven_rows="DR" in wanted and draw(st.booleans())
        ),
        world=draw(_worlds(wanted, size)),
        topology=topology,
        system=system,
        optimizer=draw(_optimizers(wanted, model)),
        run=RunSpec(
            steps=steps,
            micro_batches=draw(st.integers(2, 3)) if "GA" in wanted else 1,
            seed=draw(st.integers(0, 10**6)),
        ),
    )
    scenario = draw(_overflowing(wanted, scenario))
    if "CK" in wanted:
        scenario = replace(scenario, reload=draw(_reloads(scenario)))
        nan, after = scenario.data.nan, scenario.reload
        if nan and after and after.world_size and nan.rank >= after.world_size:
            scenario = replace(scenario, data=replace(scenario.data, nan=replace(nan, rank=0)))
    # By the seed, not by a draw of its own, which would make other cases of all.
    if scenario.run.seed % _DISTINCT_EVERY == 0:
        scenario = replace(scenario, model=replace(scenario.model, distinct_start=True))
    names = [name for name, _ in params_of(model)]
    scenario = without_unused(with_known_names(scenario, names))
    assert not check_scenario(scenario), check_scenario(scenario)
    return scenario


def _divisors(size: int) -> list[int]:
    return [count for count in range(1, size + 1) if size % count == 0]


@st.composite
def _models(draw: st.DrawFn, wanted: set[Flag], size: int) -> ModelSpec:
    dtype: DtypeName = draw(st.sampled_from(_DTYPES)) if "MX" in wanted else "fp32"
    if "ME" in wanted and size % 2 == 0 and size <= _RANKS_MAX:
        return ModelSpec(name="moe", dtype=dtype, hidden=draw(st.integers(1, 3)), experts=4)
    small = size <= _RANKS_MAX
    if small and wanted & {"TI", "NC", "FZ"} and draw(st.booleans()):
        return ModelSpec(name="unusual", dtype=dtype)
    if draw(st.integers(0, 7)) >= 5 and size <= _RANKS_MAX:
        freeze = ()
        if "FZ" in wanted:
            start = draw(st.integers(0, 1))
            param = draw(st.sampled_from(_MLP_PARAMS))
            freeze = (FreezeSpec(param=param, start=start, stop=start + 1),)
        name: ModelName = "fp8" if "MX" in wanted and draw(st.booleans()) else "mlp"
        hidden = draw(st.integers(1, 3))
        return ModelSpec(
            name=name, dtype=dtype, hidden=hidden, blocks=draw(st.integers(1, 2)), freeze=freeze
        )
    edges = st.sampled_from([1, size - 1, size, size + 1, 2 * size - 1, 2 * size])
    sizes = st.one_of(edges, st.integers(1, 3 * size), *([st.just(0)] if "FZ" in wanted else []))
    shapes = draw(st.lists(sizes.map(lambda n: (n,)), min_size=1, max_size=5))
    freeze = ()
    if "FZ" in wanted and draw(st.booleans()):
        start = draw(st.integers(0, 2))
        freeze = (FreezeSpec(param="p0", start=start, stop=start + 1),)
    # One element at least, somewhere.
    shapes.append((draw(st.integers(1, 4)),))
    return ModelSpec(name="params", dtype=dtype, shapes=tuple(shapes), freeze=freeze)


@st.composite
def _topologies(draw: st.DrawFn, wanted: set[Flag], model: ModelSpec, size: int) -> TopologySpec:
    if model.name == "moe":
        ways = [ep for ep in _divisors(size) if model.experts % ep == 0]
        return TopologySpec(ep=draw(st.sampled_from(ways[1:] or ways)))
    if size % 2 or draw(st.integers(0, 5)) < 5:
        return TopologySpec()
    ending = "0" if model.name == "params" else "bias"
    if draw(st.booleans()):
        return TopologySpec(tp=2, shared=(ending,))
    return TopologySpec(pp=2, tied=(ending,))


def _sizes(model: ModelSpec) -> list[int]:
    return [math.prod(shape) for shape in model.shapes or ()] or [1, 1, 5, 25, 60]


@st.composite
def _systems(draw: st.DrawFn, wanted: set[Flag], model: ModelSpec, ranks: int) -> SystemSpec:
    stage = draw(st.sampled_from(_STAGES))
    bucket_elems = None
    if "B2" in wanted or draw(st.integers(0, 3)) == 3:
        # Sums of sizes that stand together: those that just fit.
        sizes = [size for size in _sizes(model) if size]
        start = draw(st.integers(0, len(sizes) - 1))
        just = sum(sizes[start : start + draw(st.integers(1, 2))])
        bucket_elems = max(1, just + draw(st.sampled_from([0, 0, -1, 1])))
        if "AS" in wanted and model.name == "mlp":
            bucket_elems = draw(st.integers(1, _EXPANSION * model.hidden))
    is_uneven = stage and "PD" not in wanted and draw(st.booleans())
    # In 16 bits each of these rounds in a way of its own.
    divide = draw(st.sampled_from(_DIVIDE_EARLY if "MX" in wanted else _DIVIDE))
    sync = "every" if "GA" in wanted and draw(st.booleans()) else "last"
    ranks_only, by_micro_batches, tokens = _COUNTED
    counts = [by_micro_batches if "GA" in wanted else ranks_only, ranks_only]
    if sync == "last" or divide in ("post", "none"):
        counts.append(tokens)
    overlaps = "AS" in wanted
    return SystemSpec(
        stage=stage,
        redundancy=draw(st.sampled_from(_divisors(ranks)[1:] or [1]))
        if stage and "K" in wanted
        else 1,
        partition="uneven" if is_uneven else "padded",
        align_elems=draw(st.sampled_from([1, 2, 3, 8])) if "PD" in wanted else 1,
        align_bytes=draw(st.sampled_from([1, 16])) if "PD" in wanted else 1,
        param_order=draw(st.sampled_from(_PARAM_ORDERS)),
        bucket_elems=bucket_elems,
        overlap_grads=overlaps and draw(st.integers(0, 3)) > 0,
        overlap_params=overlaps and stage == 1 and draw(st.integers(0, 3)) > 0,
        divide=divide,
        divide_by=draw(st.sampled_from(counts)),
        sync=sync,
        grad_dtype="fp32" if "MX" in wanted and draw(st.booleans()) else "param",
    )


@st.composite
def _worlds(draw: st.DrawFn, wanted: set[Flag], size: int) -> WorldSpec:
    late = "AS" in wanted
    return WorldSpec(
        size=size,
        timing=draw(st.sampled_from(["hostile", "lazy", "eager"])) if late else "eager",
        schedule=draw(st.sampled_from(["random", "round-robin"])) if late else "round-robin",
        races=late and draw(st.integers(0, 3)) == 3,
    )


@st.composite
def _optimizers(draw: st.DrawFn, wanted: set[Flag], model: ModelSpec) -> OptimizerSpec:
    # SGD first: others hide a wrong factor.
    name = draw(st.sampled_from(_OPTIMIZERS))
    endings = ("0", "1") if model.name == "params" else ("bias", "weight")
    if model.name == "unusual":
        endings = ("twice", "unused")
    groups = ()
    if "PG" in wanted:
        groups = tuple(
            GroupSpec(match=ending, lr=lr)
            for ending, lr in zip(endings, (0.03, 0.002), strict=True)
        )
    clip = draw(st.sampled_from(["norm", "norm", "value"])) if "CL" in wanted else None
    scale = None
    if "IN" in wanted:
        scale = LossScaleSpec(
            initial=draw(st.sampled_from([1.0, 64.0])), growth_interval=draw(st.integers(1, 3))
        )
    return OptimizerSpec(
        name=name,
        lr=0.01,
        momentum=0.9 if name in ("sgd", "rmsprop") and draw(st.booleans()) else 0.0,
        weight_decay=draw(st.sampled_from([0.0, 0.1])),
        warmup_steps=draw(st.sampled_from([0, 3])),
        groups=groups,
        clip_norm=draw(st.sampled_from([0.05, 0.5])) if clip == "norm" else None,
        clip_value=0.01 if clip == "value" else None,
        loss_scale=scale,
    )


@st.composite
def _overflowing(draw: st.DrawFn, wanted: set[Flag], scenario: Scenario) -> Scenario:
    if "IN" not in wanted or scenario.run.steps < 2 or draw(st.integers(0, 3)) == 3:
        return scenario
    nan = NanSpec(
        step=draw(st.integers(0, scenario.run.steps - 1)),
        rank=draw(st.integers(0, scenario.world.size - 1)),
        value=draw(st.sampled_from(["inf", "nan"])),
    )
    return replace(scenario, data=replace(scenario.data, nan=nan))


@st.composite
def _reloads(draw: st.DrawFn, scenario: Scenario) -> ReloadSpec:
    topology, system = scenario.topology, scenario.system
    parts = topology.tp * topology.pp
    ranks = scenario.world.size // parts
    if draw(st.booleans()):
        ranks = draw(st.integers(1, _RANKS_MAX // parts))
    ways = [ep for ep in _divisors(ranks) if scenario.model.name == "moe" and 4 % ep == 0] or [1]
    ep = draw(st.sampled_from(ways))
    copies = _divisors(ranks // ep) if system.stage else [1]
    return ReloadSpec(
        step=draw(st.integers(1, scenario.run.steps - 1)),
        form=draw(st.sampled_from(["sharded", "sharded", "sharded", "consolidated"])),
        weights_only=draw(st.integers(0, 5)) == 5,
        world_size=ranks * parts,
        ep=ep,
        redundancy=draw(st.sampled_from(copies)),
        bucket_elems=draw(st.none() | st.integers(1, 30)),
        param_order=draw(st.none() | st.sampled_from(_PARAM_ORDERS)),
    )
