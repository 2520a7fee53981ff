"""Strategies for models and for what they are fed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from hypothesis import strategies as st

from zero_sim.fuzz.shapes import PARAMS_MAX, shape_lists
from zero_sim.fuzz.swarm import Swarm
from zero_sim.scenario.spec import (
    DataSpec,
    FreezeSpec,
    ModelName,
    ModelSpec,
    NanSpec,
    OneRankSpec,
    Scenario,
    TopologySpec,
)
from zero_sim.scenario.tp_block import HEAD_ELEMS, SHARED
from zero_sim.targets import EVERYTHING

BARE: tuple[ModelName, ...] = ("params", "lattice", "bit-hash")
"""Models that are nothing but params of given shapes."""
_USUAL: tuple[ModelName, ...] = ("params", "params", "params", "mlp", "mlp", "mlp")
_OTHERS: tuple[ModelName, ...] = (
    "lattice", "bit-hash", "ternary", "unusual", "unusual", "moe", "moe", "fp8", "transformer-260",
    "tp-block",
)  # fmt: skip
MODELS = _USUAL + _OTHERS
"""What is drawn from, those to draw more often more often; it shrinks to the first."""
_PRICE = 4 * PARAMS_MAX
"""Choices at least as many as all shapes of a bare model take."""
_OTHER_LOSSES: tuple[Literal["sum", "mean-of-ranks"], ...] = ("sum", "mean-of-ranks")
_WITH_OTHER_LOSSES = ("mlp", "fp8", "params")
_FROZEN_FROM = (0, 0, 1, 2)
"""Steps at which a param is frozen; most cases have few."""
_MLP_PARAMS = ("0.up.weight", "0.up.bias", "0.down.weight", "0.down.bias")


@st.composite
def models(
    draw: st.DrawFn,
    *,
    ranks: int = 2,
    align_elems: int = 1,
    names: Sequence[ModelName] = MODELS,
    swarm: Swarm | None = None,
) -> ModelSpec:
    """A model whose params lie at the edges of a partition among so many ranks.

    Args:
        draw: Given by Hypothesis.
        ranks: Number of ranks that share its optimizer state.
        align_elems: What shards are aligned to, in elements.
        names: Models to draw from, the simplest first; of them those that the target can train, or
            any that it can where there are none.
        swarm: What the case has; drawn anew where left out.
    """
    able = EVERYTHING if swarm is None else swarm.able
    name = draw(st.sampled_from([name for name in names if name in able.models] or able.models))
    shapes = None
    if name in BARE:
        shapes = draw(
            shape_lists(
                ranks,
                align_elems=align_elems,
                empty=able.empty_params,
                scalars=able.scalar_params,
            )
        )
    else:
        # Of two failing cases Hypothesis keeps the one with fewer choices, and a model with a name
        # would be a single one, though a person would rather look at a handful of bare params.
        for _ in range(_PRICE):
            draw(st.booleans())
    swarm = swarm or Swarm(draw)
    dtype = able.dtypes[0]
    if len(able.dtypes) > 1:
        narrow = [each for each in able.dtypes if each != "fp32"]
        dtype = draw(st.sampled_from(narrow)) if swarm.on("16-bit params") else "fp32"
    match name:
        case "params" | "lattice" | "bit-hash":
            freeze = _freeze(draw, "p0") if swarm.on("freeze", fits=len(shapes or ()) > 1) else ()
            model = ModelSpec(name=name, dtype=dtype, shapes=shapes, freeze=freeze)
            return draw(_with_readers(model, ranks=ranks, swarm=swarm))
        case "ternary":
            return ModelSpec(name=name, dtype=dtype, hidden=draw(st.integers(1, 9)))
        case "tp-block":
            heads, blocks = draw(st.integers(1, 2)), draw(st.integers(1, 2))
            return ModelSpec(name=name, dtype=dtype, hidden=HEAD_ELEMS * heads, blocks=blocks)
        case "moe":
            experts = draw(st.sampled_from([4, 6]))
            return ModelSpec(
                name=name, dtype=dtype, hidden=draw(st.integers(1, 4)), experts=experts
            )
        case "mlp" | "fp8":
            return ModelSpec(
                name=name,
                dtype=dtype,
                hidden=draw(st.integers(1, 5)),
                blocks=draw(st.integers(1, 2)),
                fp8_format=draw(st.sampled_from(["mixed", "e4m3", "e5m2"]))
                if name == "fp8"
                else "mixed",
                freeze=_freeze(draw, *_MLP_PARAMS) if swarm.on("freeze") else (),
            )
        case _:
            return ModelSpec(name=name, dtype=dtype)


@st.composite
def _with_readers(draw: st.DrawFn, model: ModelSpec, *, ranks: int, swarm: Swarm) -> ModelSpec:
    """Bare params of which some are tied, unused, or read by one rank's loss alone.

    The first one every loss reads, so that each has a backward.
    """
    if model.name != "params":
        return model
    sizes = [math.prod(shape) for shape in model.shapes or ()]
    several = len(sizes) > 1
    others = st.integers(1, max(1, len(sizes) - 1))
    if swarm.on("tied params"):
        model = replace(model, tied=(f"p{draw(st.integers(0, len(sizes) - 1))}",))
    if swarm.on("unused params", fits=several):
        index = draw(others)
        # Where most gradients are zero, equal ones mean little.
        if f"p{index}" not in model.tied and 2 * sizes[index] <= sum(sizes):
            model = replace(model, unused=(f"p{index}",))
    if swarm.on("one-rank params", fits=several):
        one = OneRankSpec(
            param=f"p{draw(others)}",
            rank=draw(st.integers(0, ranks - 1)),
            # One that is not there is none, once it is known how many there are.
            micro_batch=draw(st.sampled_from([None, None, 0, 1])),
        )
        if one.param not in model.unused:
            model = replace(model, one_rank=(one,))
    return model


def fit_blocks(model: ModelSpec, topology: TopologySpec) -> tuple[ModelSpec, TopologySpec]:
    """Of a model that is split over ranks, a width that they can split; other models as they are.

    Args:
        model: The model.
        topology: Drawn without a look at it.
    """
    if model.name != "tp-block":
        return model, topology
    shared = (SHARED,) if topology.tp > 1 else ()
    topology = replace(topology, pp=1, tied=(), shared=shared)
    return replace(model, hidden=model.hidden * topology.tp), topology


def _freeze(draw: st.DrawFn, *names: str) -> tuple[FreezeSpec, ...]:
    start = draw(st.sampled_from(_FROZEN_FROM))
    param = draw(st.sampled_from(names))
    return (FreezeSpec(param=param, start=start, stop=start + 1),)


@st.composite
def feeds(draw: st.DrawFn, *, model: ModelSpec, swarm: Swarm | None = None) -> DataSpec:
    """What the ranks are fed: always distinct data, with nothing planted.

    Args:
        draw: Given by Hypothesis.
        model: The model, which decides what losses there are.
        swarm: What the case has; drawn anew where left out.
    """
    swarm = swarm or Swarm(draw)
    return DataSpec(
        rows=draw(st.integers(1, 3)),
        uneven_rows=swarm.on("uneven rows"),
        loss=draw(st.sampled_from(_OTHER_LOSSES))
        if swarm.on("another loss", fits=model.name in _WITH_OTHER_LOSSES)
        else "mean",
    )


@st.composite
def overflows(draw: st.DrawFn, *, scenario: Scenario, elems: int = 1) -> NanSpec:
    """A NaN or an infinity on one rank at one step, for a case in which such a step is skipped.

    Args:
        draw: Given by Hypothesis.
        scenario: The case, with loss scaling, or for a target that skips such steps without.
        elems: Elements of all params; of bare ones each has two in the input.
    """
    return NanSpec(
        rank=draw(st.integers(0, scenario.world.size - 1)),
        step=draw(st.integers(0, scenario.run.steps - 1)),
        value=draw(st.sampled_from(["inf", "nan"])),
        micro_batch=draw(st.integers(0, scenario.run.micro_batches - 1)),
        element=draw(st.integers(0, max(1, 2 * elems - 1))),
    )
