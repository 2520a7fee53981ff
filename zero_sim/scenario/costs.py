"""Estimates of a case's cost, which keep a slip from taking all memory, or hours.

They count what grows: elements on all ranks, and passes of a rank through its params. A case within
them runs in minutes on a laptop; the next larger one is rather several cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from zero_sim.errors import Problem
from zero_sim.scenario.spec import ModelSpec, Scenario

WORLD_ELEMS_MAX = 2**30
"""Elements on all ranks together, of params, padding and activations; at a dozen bytes each."""
WORK_MAX = 10**11
"""Elements that all ranks together go over in all steps; see `_work`."""

_PARAM_WORK = 10**4
"""What a param costs a rank in a step besides its elements, counted in elements."""
_PASS_WORK = 10**5
"""What a micro-batch costs a rank besides its params, counted in elements."""
_TABLES = 4
"""Buffers that the params of a model may be spread over: two kinds, two dtypes."""


def check_costs(scenario: Scenario) -> Iterator[Problem]:
    """Check what a case costs whose numbers are right one by one."""
    elems = _world_elems(scenario)
    if elems > WORLD_ELEMS_MAX:
        yield Problem(
            path="world.size",
            message="expected ranks that hold at most "
            f"{WORLD_ELEMS_MAX:,} elements together, with padding and activations, got {elems:,}.",
            suggestion="Try fewer ranks, smaller params, or less alignment: faults of a layout "
            "show with a handful of elements.",
        )
    work = _work(scenario)
    if work > WORK_MAX:
        yield Problem(
            path="run.steps",
            message=f"expected all ranks to go over at most {WORK_MAX:,} elements in all steps, "
            f"about as many as {_PASS_WORK:,} for each micro-batch and {_PARAM_WORK:,} for each "
            f"param besides its own, got {work:,}.",
            suggestion="Try fewer steps, micro-batches, ranks or params.",
        )


def _world_elems(scenario: Scenario) -> int:
    elems, _ = _model_size(scenario.model)
    padding = max(_padding(scenario, bucket_elems=size) for size in _bucket_sizes(scenario))
    return _ranks(scenario) * (elems + padding + _activation_elems(scenario))


def _work(scenario: Scenario) -> int:
    elems, params = _model_size(scenario.model)
    rows = 1 if scenario.model.shapes is not None else 1 + _rows(scenario)
    steps, after = scenario.run.steps, scenario.reload
    if after is not None:
        steps += after.async_steps + after.lost_steps + 1
    passes = _ranks(scenario) * steps * scenario.run.micro_batches
    return passes * (elems * rows + params * _PARAM_WORK + _PASS_WORK)


def _ranks(scenario: Scenario) -> int:
    others = (each.world_size or 0 for each in (scenario.reload, scenario.pair) if each is not None)
    return max((scenario.world.size, *others))


def _rows(scenario: Scenario) -> int:
    return scenario.data.rows + 2 * scenario.data.uneven_rows


def _bucket_sizes(scenario: Scenario) -> Iterator[int | None]:
    yield scenario.system.bucket_elems
    for other in (scenario.reload, scenario.pair):
        if other is not None and other.bucket_elems is not None:
            yield other.bucket_elems


def _padding(scenario: Scenario, *, bucket_elems: int | None) -> int:
    """What shards that start where they must add to the params of one rank, at most."""
    elems, params = _model_size(scenario.model)
    multiple = math.lcm(scenario.system.align_elems, scenario.system.align_bytes)
    buckets = _TABLES
    if bucket_elems is not None:
        buckets += min(params, elems // bucket_elems)
    return buckets * _ranks(scenario) * multiple


def _activation_elems(scenario: Scenario) -> int:
    if scenario.model.shapes is not None:
        return 0
    model = scenario.model
    layers = {
        "mlp": 6 * model.blocks,
        "fp8": 6 * model.blocks,
        "moe": 4 * model.experts,
        "tp-block": 64 * model.blocks,
        "gpt": 64 * (model.blocks + 1),
    }
    return _rows(scenario) * model.hidden * layers.get(model.name, 16)


def _model_size(model: ModelSpec) -> tuple[int, int]:
    """Elements and number of params, rounded up."""
    h = model.hidden
    match model.name:
        case "mlp" | "fp8":
            return model.blocks * (8 * h * h + 5 * h), 4 * model.blocks
        case "moe":
            layers = model.experts + 2
            return layers * (h * h + 2 * h), 2 * layers + 1
        case "digits":
            return 80 * h, 4
        case "ternary":
            return 8 * h * h + 32 * h, 16
        case "tp-block":
            return model.blocks * 8 * h * h + 4 * h, 1 + 6 * model.blocks
        case "positional":
            return 6 * h, 2
        case "gpt":
            return 12 * h + model.blocks * (5 * h * h + 9 * h), 4 + 10 * model.blocks
        case "multi-token":
            return 2 * h * h + 12 * h + 5, 7
        case "params" | "bit-hash":
            shapes = model.shapes or ()
            return sum(map(math.prod, shapes)), len(shapes)
        case _:
            return 1_000, 32
