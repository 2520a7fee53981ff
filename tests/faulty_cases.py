"""Strategy of cases with one planned fault that must be found."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from zero_sim.fuzz.choices import Choices, Drawable
from zero_sim.fuzz.models import drawn_model
from zero_sim.fuzz.plans import param_specs
from zero_sim.fuzz.swarm import Swarm
from zero_sim.fuzz.systems import drawn_system, drawn_world
from zero_sim.scenario.checks import Check
from zero_sim.scenario.fitting import without_unused
from zero_sim.scenario.spec import (
    ExpectSpec,
    FaultSpec,
    ModelName,
    OptimizerSpec,
    RunSpec,
    Scenario,
)


def faulty_scenarios(*, ranks_max: int = 4, steps_max: int = 3) -> st.SearchStrategy[Scenario]:
    """Draw cases with one planned fault; each passes only if the fault is found.

    A rank stops, or one rank's contribution to a sum of gradients is changed, lost or counted
    twice. Every gradient element is nonzero and summed, so nothing hides the fault.

    Args:
        ranks_max: Most ranks, of at least 2.
        steps_max: Most optimizer steps.
    """
    drawn = partial(_faulty_case, ranks_max=ranks_max, steps_max=steps_max)
    return Drawable(drawn).strategy()


def _faulty_case(choices: Choices, *, ranks_max: int, steps_max: int) -> Scenario:
    world_size = choices.integer(2, ranks_max)
    swarm = Swarm(choices)
    names: list[ModelName] = ["params"]
    # Frozen gradients, and those in only some losses, could hide the fault.
    model = drawn_model(choices, ranks=world_size, names=names, swarm=swarm)
    model = replace(model, unused=(), one_rank=(), freeze=())
    sizes = [spec.numel for spec in param_specs(model)]
    system = drawn_system(choices, ranks=world_size, sizes=sizes, swarm=swarm)
    # Equal shards without unowned elements, and one reduction per gradient.
    system = replace(
        system,
        stage=1,
        redundancy=1,
        partition="padded",
        sync="last",
        prefetch=None,
        reshard_after_forward=True,
        sum_by="reduce-scatter",
        gather_after_step=False,
        arena=False,
        reduce_buffer_elems=None,
        contiguous_grads=True,
        gather_chunk_elems=None,
    )
    if system.divide_by == "tokens":
        system = replace(system, divide_by="ranks")
    steps = choices.integer(1, steps_max)
    fault, wanted = choices.among(_FAULTS)
    fault = replace(fault, rank=choices.integer(0, world_size - 1))
    if fault.kind in ("crash", "stall"):
        fault = replace(fault, call=choices.integer(0, steps - 1))
    scenario = Scenario(
        schema=1,
        name="faulty",
        model=model,
        world=drawn_world(choices, size=world_size, swarm=swarm),
        system=system,
        optimizer=OptimizerSpec(),
        faults=(fault,),
        run=RunSpec(steps=steps, seed=choices.integer(0, 10**6)),
        expect=ExpectSpec(finding=wanted.value),
    )
    return without_unused(_summing(scenario))


_FAULTS = (
    (FaultSpec(kind="crash", rank=0), Check.WORLD_RANK_FAILED),
    (FaultSpec(kind="stall", rank=0), Check.WORLD_STALLED_BY_PLAN),
    (FaultSpec(kind="drop", rank=0, collective="reduce_scatter"), Check.EQUALITY_GRAD),
    (FaultSpec(kind="duplicate", rank=0, collective="reduce_scatter"), Check.EQUALITY_GRAD),
)
"""Faults, each with the check that must find it."""


def _summing(scenario: Scenario) -> Scenario:
    """Return the case with at least one element besides padding in its first sum."""
    shapes = scenario.model.shapes
    if shapes is None or (math.prod(shapes[0]) and math.prod(shapes[-1])):
        return scenario
    filled = tuple(shape if math.prod(shape) else (1,) for shape in shapes)
    return replace(scenario, model=replace(scenario.model, shapes=filled))
