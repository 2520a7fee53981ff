"""Drawn models and their data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from zero_sim.fuzz.choices import Choices
from zero_sim.fuzz.shapes import PARAMS_MAX, param_shapes
from zero_sim.fuzz.swarm import Swarm
from zero_sim.scenario.applies import USED_BY
from zero_sim.scenario.spec import (
    AnyModelName,
    DataSpec,
    FreezeSpec,
    ModelName,
    ModelSpec,
    NanSpec,
    OneRankSpec,
    Scenario,
    SkipSpec,
    TopologySpec,
)
from zero_sim.scenario.tp_block import HEAD_ELEMS, SHARED

BARE: tuple[ModelName, ...] = ("params", "bit-hash")
"""Models that consist only of params with given shapes."""
_USUAL: tuple[ModelName, ...] = ("params", "params", "params", "mlp", "mlp", "mlp")
_OTHERS: tuple[ModelName, ...] = (
    "bit-hash", "bit-hash", "ternary", "unusual", "unusual", "moe", "moe", "fp8", "transformer-260",
    "tp-block", "positional", "positional", "gpt", "multi-token", "multi-token",
)  # fmt: skip
MODELS = _USUAL + _OTHERS
"""Models to draw from, where frequent models are repeated. Cases shrink to the first."""
OWN_TIMES = 3
"""Repetitions of a target's own model: as many as for a usual model."""
# At least the number of choices for a bare model's shapes.
_PRICE = 4 * PARAMS_MAX
_OTHER_LOSSES: tuple[Literal["sum", "mean-of-ranks"], ...] = ("sum", "mean-of-ranks")
_WITH_OTHER_LOSSES = ("mlp", "fp8", "params")
# First steps of a freeze, small because most cases have few steps.
_FROZEN_FROM = (0, 0, 1, 2)
_BUFFERS: tuple[Literal["saved", "rebuilt"], ...] = ("saved", "saved", "saved", "rebuilt")
_EXPERTS = (2, 2, 3, 4, 6)
_MLP_PARAMS = ("0.up.weight", "0.up.bias", "0.down.weight", "0.down.bias")


def drawn_model(
    choices: Choices,
    *,
    ranks: int,
    align_elems: int = 1,
    names: Sequence[AnyModelName],
    swarm: Swarm,
) -> ModelSpec:
    """Draw a model whose param sizes are at the edges of a partition.

    Args:
        choices: Source of choices.
        ranks: Number of ranks that share the optimizer state.
        align_elems: Alignment of shards in elements.
        names: Models to draw from, simplest first. Models that the target does not support are left
            out; if none remain, any supported model.
        swarm: Features of the case.
    """
    able = swarm.able
    name = choices.among([name for name in names if name in able.models] or able.models)
    shapes = None
    if name in BARE:
        shapes = param_shapes(
            choices,
            ranks,
            align_elems=align_elems,
            empty=able.empty_params,
            scalars=able.scalar_params,
        )
    else:
        # Hypothesis prefers the failing case with fewer choices, and a named model takes a single
        # choice. But a few bare params are easier to understand, so named models cost extra
        # choices.
        for _ in range(_PRICE):
            choices.among((False, True))
    dtype = able.dtypes[0]
    if len(able.dtypes) > 1:
        narrow = [each for each in able.dtypes if each != "fp32"]
        dtype = choices.among(narrow) if swarm.on("16-bit params") else "fp32"
    match name:
        case "params" | "bit-hash":
            freeze = (
                _freeze(choices, "p0") if swarm.on("freeze", fits=len(shapes or ()) > 1) else ()
            )
            model = ModelSpec(name=name, dtype=dtype, shapes=shapes, freeze=freeze)
            return _with_readers(choices, model, ranks=ranks, swarm=swarm)
        case "ternary" | "positional" | "multi-token":
            return ModelSpec(name=name, dtype=dtype, hidden=choices.integer(1, 9))
        case "tp-block":
            heads, blocks = choices.integer(1, 2), choices.integer(1, 2)
            # Each rank has whole heads, because attention is computed within a head.
            return ModelSpec(name=name, dtype=dtype, hidden=HEAD_ELEMS * heads, blocks=blocks)
        case "gpt":
            width, blocks = choices.integer(1, 4), choices.integer(1, 2)
            return ModelSpec(name=name, dtype=dtype, hidden=width, blocks=blocks)
        case "moe":
            experts = choices.among(_EXPERTS)
            return ModelSpec(name=name, dtype=dtype, hidden=choices.integer(1, 4), experts=experts)
        case "mlp" | "fp8":
            return ModelSpec(
                name=name,
                dtype=dtype,
                hidden=choices.integer(1, 5),
                blocks=choices.integer(1, 2),
                fp8_format=choices.among(["mixed", "e4m3", "e5m2"]) if name == "fp8" else "mixed",
                freeze=_freeze(choices, *_MLP_PARAMS) if swarm.on("freeze") else (),
            )
        case _:
            return ModelSpec(name=name, dtype=dtype)


def _with_readers(choices: Choices, model: ModelSpec, *, ranks: int, swarm: Swarm) -> ModelSpec:
    """Return the model, maybe with bare params that are tied, unused, or read by one rank only."""
    if model.name != "params":
        return model
    # All losses read the first param, so that each has a backward. Choose among the other params.
    sizes = [math.prod(shape) for shape in model.shapes or ()]
    several = len(sizes) > 1
    last = max(1, len(sizes) - 1)
    if swarm.on("tied params"):
        model = replace(model, tied=(f"p{choices.integer(0, len(sizes) - 1)}",))
    if swarm.on("unused params", fits=several):
        index = choices.integer(1, last)
        # If most gradients are zero, equal gradients mean little; see `guard.zero-gradients`.
        if f"p{index}" not in model.tied and 2 * sizes[index] <= sum(sizes):
            model = replace(model, unused=(f"p{index}",))
    if swarm.on("one-rank params", fits=several):
        one = OneRankSpec(
            param=f"p{choices.integer(1, last)}",
            rank=choices.integer(0, ranks - 1),
            # The number of micro-batches is drawn later; see `fitted_one_rank`.
            micro_batch=choices.among([None, None, 0, 1]),
        )
        if one.param not in model.unused:
            model = replace(model, one_rank=(one,))
    return model


def with_skipped(choices: Choices, model: ModelSpec, *, swarm: Swarm) -> ModelSpec:
    """Return the model, maybe with a bare param that losses skip in some steps.

    Args:
        choices: Source of choices.
        model: The model, complete otherwise.
        swarm: Features of the case.
    """
    sizes = [math.prod(shape) for shape in model.shapes or ()]
    index = choices.integer(1, max(1, len(sizes) - 1))
    # Draw these even without the feature, so that later draws keep their positions.
    start, count = choices.among(_FROZEN_FROM), choices.among((1, 1, 2))
    fits = model.name == "params" and len(sizes) > 1 and f"p{index}" not in model.unused
    # If most gradients are zero, equal gradients mean little.
    fits = fits and 2 * sizes[index] <= sum(sizes)
    if not swarm.on("skipped params", fits=fits):
        return model
    skip = SkipSpec(param=f"p{index}", start=start, stop=start + count)
    return replace(model, skip=(skip,))


def recomputed_model(choices: Choices, scenario: Scenario, *, swarm: Swarm) -> ModelSpec:
    """Return the case's model, maybe with activation checkpoints.

    Args:
        choices: Source of choices.
        scenario: The case, complete otherwise.
        swarm: Features of the case.
    """
    model, after = scenario.model, scenario.reload
    able = dict(swarm.able.only).get("model.recompute", ("non-reentrant", "reentrant"))
    recompute: Any = choices.among([each for each in able if each != "none"] or ["none"])
    is_sharded = 3 in (scenario.system.stage, after.stage if after else None)
    fits = model.name in USED_BY["model.recompute"]
    # A joining rank repeats the gathers of a plain forward and backward. Recomputed blocks gather
    # once more, which it would miss.
    fits &= not (scenario.run.own_micro_batches and is_sharded)
    # `gpt` uses its first block twice, so this block has no reentrant checkpoint.
    fits &= not (recompute == "reentrant" and model.name == "gpt" and model.blocks < 2)
    if not swarm.on("recomputed", fits=fits, often=True):
        return model
    return replace(model, recompute=recompute)


def nested_model(choices: Choices, model: ModelSpec, *, swarm: Swarm) -> ModelSpec:
    """Return the model, maybe with bare params in modules of their own, read in another order.

    Args:
        choices: Source of choices.
        model: The model, complete otherwise.
        swarm: Features of the case.
    """
    if swarm.on("tied first", fits=bool(model.tied), often=True):
        model = replace(model, tied_first=True)
    if not swarm.on("nested params", fits=model.name == "params", often=True):
        return model
    # Nesting renames p1 to m1.p1. Only `freeze` contains full names.
    freeze = tuple(replace(each, param=f"m{each.param[1:]}.{each.param}") for each in model.freeze)
    return replace(model, nested=True, freeze=freeze)


def with_buffer(choices: Choices, scenario: Scenario, *, swarm: Swarm) -> ModelSpec:
    """Return the case's model, maybe with a buffer that forwards read.

    Args:
        choices: Source of choices.
        scenario: The case, with its reload.
        swarm: Features of the case.
    """
    buffer, model = choices.among(_BUFFERS), scenario.model
    fits = model.name in USED_BY["model.buffer"]
    # Often in a case with a reload: saved buffers only matter there, and few cases have a reload.
    if not swarm.on("buffer", fits=fits, often=scenario.reload is not None):
        return model
    return replace(model, buffer=buffer)


def fit_blocks(
    model: ModelSpec, topology: TopologySpec, *, may_split: bool, swarm: Swarm
) -> tuple[ModelSpec, TopologySpec]:
    """Return a split model with a matching width and topology. Other models stay unchanged.

    Args:
        model: The model.
        topology: Topology that was drawn for any model.
        may_split: True if the case may have twice as many ranks.
        swarm: Features of the case.
    """
    fits = may_split and model.name == "tp-block" and topology.tp == 1
    if swarm.on("split blocks", fits=fits, often=True):
        topology = replace(topology, tp=2)
    if model.name != "tp-block":
        return model, topology
    shared = (SHARED,) if topology.tp > 1 else ()
    # `tp-block` is split within layers, so every rank has all blocks, and pp has nothing to split.
    topology = replace(topology, pp=1, tied=(), shared=shared)
    # Each rank keeps the drawn width.
    return replace(model, hidden=model.hidden * topology.tp), topology


def _freeze(choices: Choices, *names: str) -> tuple[FreezeSpec, ...]:
    start = choices.among(_FROZEN_FROM)
    param = choices.among(names)
    # Freeze for one step only, so that the param can train again in a short case.
    return (FreezeSpec(param=param, start=start, stop=start + 1),)


def drawn_data(choices: Choices, *, model: ModelSpec, swarm: Swarm) -> DataSpec:
    """Draw data without NaN that is distinct on each rank.

    Args:
        choices: Source of choices.
        model: The model, which determines the possible losses.
        swarm: Features of the case.
    """
    return DataSpec(
        rows=choices.integer(1, 3),
        uneven_rows=swarm.on("uneven rows"),
        loss=choices.among(_OTHER_LOSSES)
        if swarm.on("another loss", fits=model.name in _WITH_OTHER_LOSSES)
        else "mean",
    )


def drawn_overflow(choices: Choices, *, scenario: Scenario, elems: int) -> NanSpec:
    """Draw a NaN or infinity on one rank in one step, for a case that skips such steps.

    Args:
        choices: Source of choices.
        scenario: The case. It has a loss scale, or its target skips such steps without a loss
            scale.
        elems: Elements of all params. Bare params have two input elements per element.
    """
    return NanSpec(
        rank=choices.integer(0, scenario.world.size - 1),
        step=choices.integer(0, scenario.run.steps - 1),
        value=choices.among(["inf", "nan"]),
        micro_batch=choices.integer(0, scenario.run.micro_batches - 1),
        element=choices.integer(0, max(1, 2 * elems - 1)),
    )
