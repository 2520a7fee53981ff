"""Strategies for models and for what they are fed."""

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
"""Models that are nothing but params of given shapes."""
_USUAL: tuple[ModelName, ...] = ("params", "params", "params", "mlp", "mlp", "mlp")
_OTHERS: tuple[ModelName, ...] = (
    "bit-hash", "bit-hash", "ternary", "unusual", "unusual", "moe", "moe", "fp8", "transformer-260",
    "tp-block", "positional", "positional", "gpt", "multi-token", "multi-token",
)  # fmt: skip
MODELS = _USUAL + _OTHERS
"""What is drawn from, those to draw more often more often; it shrinks to the first."""
OWN_TIMES = 3
"""How often each model of the target's own is among those to draw from, as a usual one."""
_PRICE = 4 * PARAMS_MAX
"""Choices at least as many as all shapes of a bare model take."""
_OTHER_LOSSES: tuple[Literal["sum", "mean-of-ranks"], ...] = ("sum", "mean-of-ranks")
_WITH_OTHER_LOSSES = ("mlp", "fp8", "params")
_FROZEN_FROM = (0, 0, 1, 2)
"""Steps at which a param is frozen; most cases have few."""
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
    """A model whose params lie at the edges of a partition among so many ranks.

    Args:
        choices: What it is drawn with.
        ranks: Number of ranks that share its optimizer state.
        align_elems: What shards are aligned to, in elements.
        names: Models to draw from, the simplest first; of them those that the target can train, or
            any that it can where there are none.
        swarm: What the case has.
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
        # Of two failing cases Hypothesis keeps the one with fewer choices, and a model with a name
        # would be a single one, though a person would rather look at a handful of bare params.
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
    """Bare params of which some are tied, unused, or read by one rank's loss alone.

    The first one every loss reads, so that each has a backward.
    """
    if model.name != "params":
        return model
    sizes = [math.prod(shape) for shape in model.shapes or ()]
    several = len(sizes) > 1
    last = max(1, len(sizes) - 1)
    if swarm.on("tied params"):
        model = replace(model, tied=(f"p{choices.integer(0, len(sizes) - 1)}",))
    if swarm.on("unused params", fits=several):
        index = choices.integer(1, last)
        # Where most gradients are zero, equal ones mean little.
        if f"p{index}" not in model.tied and 2 * sizes[index] <= sum(sizes):
            model = replace(model, unused=(f"p{index}",))
    if swarm.on("one-rank params", fits=several):
        one = OneRankSpec(
            param=f"p{choices.integer(1, last)}",
            rank=choices.integer(0, ranks - 1),
            # One that is not there is none, once it is known how many there are.
            micro_batch=choices.among([None, None, 0, 1]),
        )
        if one.param not in model.unused:
            model = replace(model, one_rank=(one,))
    return model


def with_skipped(choices: Choices, model: ModelSpec, *, swarm: Swarm) -> ModelSpec:
    """The model with a bare param that no loss reads in some steps, or as it is.

    Args:
        choices: What it is drawn with.
        model: The model, with all readers.
        swarm: What the case has.
    """
    sizes = [math.prod(shape) for shape in model.shapes or ()]
    index = choices.integer(1, max(1, len(sizes) - 1))
    start, count = choices.among(_FROZEN_FROM), choices.among((1, 1, 2))
    fits = model.name == "params" and len(sizes) > 1 and f"p{index}" not in model.unused
    # Where most gradients are zero, equal ones mean little.
    fits = fits and 2 * sizes[index] <= sum(sizes)
    if not swarm.on("skipped params", fits=fits):
        return model
    skip = SkipSpec(param=f"p{index}", start=start, stop=start + count)
    return replace(model, skip=(skip,))


def recomputed_model(choices: Choices, scenario: Scenario, *, swarm: Swarm) -> ModelSpec:
    """The model of a case with activation checkpoints, or as it is.

    Args:
        choices: What it is drawn with.
        scenario: The case, complete otherwise.
        swarm: What the case has.
    """
    model, after = scenario.model, scenario.reload
    able = dict(swarm.able.only).get("model.recompute", ("non-reentrant", "reentrant"))
    recompute: Any = choices.among([each for each in able if each != "none"] or ["none"])
    is_sharded = 3 in (scenario.system.stage, after.stage if after else None)
    fits = model.name in USED_BY["model.recompute"]
    fits &= not (scenario.run.own_micro_batches and is_sharded)
    fits &= not (recompute == "reentrant" and model.name == "gpt" and model.blocks < 2)
    if not swarm.on("recomputed", fits=fits, often=True):
        return model
    return replace(model, recompute=recompute)


def nested_model(choices: Choices, model: ModelSpec, *, swarm: Swarm) -> ModelSpec:
    """The model with each bare param in a module of its own, and another order of reads, or not.

    Args:
        choices: What it is drawn with.
        model: The model, complete otherwise.
        swarm: What the case has.
    """
    if swarm.on("tied first", fits=bool(model.tied), often=True):
        model = replace(model, tied_first=True)
    if not swarm.on("nested params", fits=model.name == "params", often=True):
        return model
    # Their only names in a bare model are those of the params.
    freeze = tuple(replace(each, param=f"m{each.param[1:]}.{each.param}") for each in model.freeze)
    return replace(model, nested=True, freeze=freeze)


def with_buffer(choices: Choices, scenario: Scenario, *, swarm: Swarm) -> ModelSpec:
    """The model with a buffer that its forwards read, or as it is.

    Args:
        choices: What it is drawn with.
        scenario: Whose model it is; with its reload.
        swarm: What the case has.
    """
    buffer, model = choices.among(_BUFFERS), scenario.model
    fits = model.name in USED_BY["model.buffer"]
    # Few cases go on from a checkpoint, which a saved one is for.
    if not swarm.on("buffer", fits=fits, often=scenario.reload is not None):
        return model
    return replace(model, buffer=buffer)


def fit_blocks(
    model: ModelSpec, topology: TopologySpec, *, may_split: bool, swarm: Swarm
) -> tuple[ModelSpec, TopologySpec]:
    """Of a model that can be split over ranks, ways and a width to match; other models as they are.

    Args:
        model: The model.
        topology: Drawn without a look at it.
        may_split: Whether there may be twice as many ranks.
        swarm: What the case has.
    """
    fits = may_split and model.name == "tp-block" and topology.tp == 1
    if swarm.on("split blocks", fits=fits, often=True):
        topology = replace(topology, tp=2)
    if model.name != "tp-block":
        return model, topology
    shared = (SHARED,) if topology.tp > 1 else ()
    topology = replace(topology, pp=1, tied=(), shared=shared)
    return replace(model, hidden=model.hidden * topology.tp), topology


def _freeze(choices: Choices, *names: str) -> tuple[FreezeSpec, ...]:
    start = choices.among(_FROZEN_FROM)
    param = choices.among(names)
    return (FreezeSpec(param=param, start=start, stop=start + 1),)


def drawn_data(choices: Choices, *, model: ModelSpec, swarm: Swarm) -> DataSpec:
    """What the ranks are fed: always distinct data, with nothing planted.

    Args:
        choices: What it is drawn with.
        model: The model, which decides what losses there are.
        swarm: What the case has.
    """
    return DataSpec(
        rows=choices.integer(1, 3),
        uneven_rows=swarm.on("uneven rows"),
        loss=choices.among(_OTHER_LOSSES)
        if swarm.on("another loss", fits=model.name in _WITH_OTHER_LOSSES)
        else "mean",
    )


def drawn_overflow(choices: Choices, *, scenario: Scenario, elems: int) -> NanSpec:
    """A NaN or an infinity on one rank at one step, for a case in which such a step is skipped.

    Args:
        choices: What it is drawn with.
        scenario: The case, with loss scaling, or for a target that skips such steps without.
        elems: Elements of all params; of bare ones each has two in the input.
    """
    return NanSpec(
        rank=choices.integer(0, scenario.world.size - 1),
        step=choices.integer(0, scenario.run.steps - 1),
        value=choices.among(["inf", "nan"]),
        micro_batch=choices.integer(0, scenario.run.micro_batches - 1),
        element=choices.integer(0, max(1, 2 * elems - 1)),
    )
