"""Estimated memory and time for a case, so that a slip takes neither all memory nor hours.

They count elements on all ranks, and passes through the params. A case within these limits runs in
minutes on a laptop. Split a larger case into several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from zero_sim.errors import Problem
from zero_sim.scenario.spec import ModelSpec, Scenario

WORLD_ELEMS_MAX = 2**30
"""Most elements on all ranks together: params, padding and activations. An element takes about a
dozen bytes."""
WORK_MAX = 10**11
"""Most elements that all ranks process in all steps; see `_work`."""

_PARAM_WORK = 10**4
"""Fixed cost per param, rank and micro-batch, in elements."""
_PASS_WORK = 10**5
"""Fixed cost per rank and micro-batch, in elements."""
_TABLES = 4
"""Most flat buffers in a model: two kinds times two dtypes."""


def check_costs(scenario: Scenario) -> Iterator[Problem]:
    """Check the total cost of a case whose fields are in range."""
    elems = _world_elems(scenario)
    if elems > WORLD_ELEMS_MAX:
        yield Problem(
            path="world.size",
            message=f"expected at most {WORLD_ELEMS_MAX:,} elements on all ranks together, with "
            f"padding and activations, got {elems:,}.",
            suggestion="Try fewer ranks, smaller params, or less alignment: a few elements are "
            "enough to find faults in a layout.",
        )
    work = _work(scenario)
    if work > WORK_MAX:
        yield Problem(
            path="run.steps",
            message=f"expected all ranks to process at most {WORK_MAX:,} elements in all steps, "
            f"counting {_PASS_WORK:,} more for each micro-batch and {_PARAM_WORK:,} more for each "
            f"param, got {work:,}.",
            suggestion="Try fewer steps, micro-batches, ranks or params.",
        )


def _world_elems(scenario: Scenario) -> int:
    elems, _ = _model_size(scenario.model)
    padding = max(_padding(scenario, bucket_elems=size) for size in _bucket_sizes(scenario))
    return _ranks(scenario) * (elems + padding + _activation_elems(scenario))


def _work(scenario: Scenario) -> int:
    elems, params = _model_size(scenario.model)
    # The loss of bare params reads each element once; other models read weights once per row.
    rows = 1 if scenario.model.shapes is not None else 1 + _rows(scenario)
    # Elements in all forwards: rank x step x micro-batch x (elements x rows + fixed costs).
    steps, after = scenario.run.steps, scenario.reload
    if after is not None:
        # Additional steps: during an asynchronous save, lost ones, and one unfinished step.
        steps += after.async_steps + after.lost_steps + 1
    passes = _ranks(scenario) * steps * scenario.run.micro_batches
    return passes * (elems * rows + params * _PARAM_WORK + _PASS_WORK)


def _ranks(scenario: Scenario) -> int:
    # The largest world, because worlds run in turn and never use memory at the same time.
    others = (each.world_size or 0 for each in (scenario.reload, scenario.pair) if each is not None)
    return max((scenario.world.size, *others))


def _rows(scenario: Scenario) -> int:
    # With `uneven_rows`, a rank has up to 2 more rows.
    return scenario.data.rows + 2 * scenario.data.uneven_rows


def _bucket_sizes(scenario: Scenario) -> Iterator[int | None]:
    yield scenario.system.bucket_elems
    for other in (scenario.reload, scenario.pair):
        if other is not None and other.bucket_elems is not None:
            yield other.bucket_elems


def _padding(scenario: Scenario, *, bucket_elems: int | None) -> int:
    """Return the most elements that alignment may add on one rank."""
    elems, params = _model_size(scenario.model)
    # Both alignments hold at once. A byte counts as an element, which can only overestimate.
    multiple = math.lcm(scenario.system.align_elems, scenario.system.align_bytes)
    buckets = _TABLES
    if bucket_elems is not None:
        # A bucket closes at a param's end, so a param closes at most one bucket.
        buckets += min(params, elems // bucket_elems)
    return buckets * _ranks(scenario) * multiple


def _activation_elems(scenario: Scenario) -> int:
    if scenario.model.shapes is not None:
        return 0
    model = scenario.model
    # Activations between layers, as multiples of rows x hidden, rounded up.
    layers = {
        "mlp": 6 * model.blocks,
        "fp8": 6 * model.blocks,
        "moe": 4 * model.experts,
        "tp-block": 64 * model.blocks,
        "gpt": 64 * (model.blocks + 1),
    }
    return _rows(scenario) * model.hidden * layers.get(model.name, 16)


def _model_size(model: ModelSpec) -> tuple[int, int]:
    """Return the numbers of elements and params, rounded up."""
    h = model.hidden
    match model.name:
        case "mlp" | "fp8":
            # Two weights, hidden x 4 hidden and its transpose, and their biases.
            return model.blocks * (8 * h * h + 5 * h), 4 * model.blocks
        case "moe":
            layers = model.experts + 2
            return layers * (h * h + 2 * h), 2 * layers + 1
        case "digits":
            # Two layers: 8 x 8 pixels to hidden, and hidden to 10 digits.
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
        # `transformer-260`, `unusual` and own models: an allowance.
        case _:
            return 1_000, 32
