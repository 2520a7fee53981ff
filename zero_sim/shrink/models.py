"""Smaller models: fewer params, smaller params, plainer networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zero_sim.scenario.spec import AnyModelName, ModelSpec, OneRankSpec, Scenario
from zero_sim.shrink.repair import changed, repaired, with_model
from zero_sim.shrink.size import SIMPLEST_MODEL
from zero_sim.workloads import params_of

Shape = tuple[int, ...]

_PLAINER: dict[AnyModelName, tuple[AnyModelName, ...]] = {
    "fp8": ("mlp",),
    "moe": ("mlp",),
    # `moe` too, because experts fill a second buffer, as in `unusual`.
    "unusual": ("mlp", "moe"),
    "digits": ("mlp",),
    "transformer-260": ("mlp",),
    "bit-hash": ("params",),
    "ternary": ("mlp",),
    "positional": ("mlp",),
    "gpt": ("mlp",),
    "multi-token": ("mlp",),
    "tp-block": ("mlp",),
}
# Limits the candidates for large networks.
_KEPT_MAX = 6
_BUCKET_ELEMS_MAX = 3
_GRID = ((1, range(1, 5)), (2, range(4)), (3, range(3)))
"""Number of params, and the sizes to try for each of them."""


def plainer_models(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with bare params, or with a plainer or smaller network."""
    model = scenario.model
    shapes = [shape for _, shape in params_of(model)]
    if model.name != SIMPLEST_MODEL:
        for count in range(1, min(len(shapes), _KEPT_MAX) + 1):
            for elems in (1, 2):
                yield with_bare_params(scenario, ((elems,),) * count)
        yield with_bare_params(scenario, [(math.prod(shape),) for shape in shapes])
        yield with_bare_params(scenario, shapes)
        # This network has tied, skipped and unused params. Try each kind separately as bare params.
        if model.name == "unusual":
            yield from _as_awkward(scenario)
    for name in _PLAINER.get(model.name, ()):
        bare = name == "params"
        other = ModelSpec(
            name=name,
            dtype=model.dtype,
            shapes=model.shapes if bare else None,
            recompute="none" if bare else model.recompute,
            distinct_start=model.distinct_start,
        )
        if not bare:
            # The smallest network first, then default sizes.
            yield with_model(scenario, replace(other, hidden=1, blocks=1, experts=1))
        yield with_model(scenario, other)
    if model.shapes is None:
        yield from _smaller_networks(scenario)


def _as_awkward(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with bare params, one of them tied, unused or used by one rank only."""
    last = OneRankSpec(param="p1", rank=0)
    for elems in (1, 2):
        two = with_bare_params(scenario, ((elems,), (elems,)))
        yield repaired(changed(with_bare_params(scenario, ((elems,),)), "model.tied", ("p0",)))
        yield repaired(changed(two, "model.tied", ("p0",)))
        yield repaired(changed(two, "model.unused", ("p1",)))
        yield repaired(changed(two, "model.one_rank", (last,)))
        yield repaired(changed(two, "model.one_rank", (replace(last, micro_batch=0),)))


def _smaller_networks(scenario: Scenario) -> Iterator[Scenario]:
    model, after = scenario.model, scenario.reload
    ways = max(scenario.topology.ep, (after.ep or 1) if after is not None else 1)
    widths = {1, 2, 3, max(1, model.hidden // 2), max(1, model.hidden - 1), model.hidden}
    # Expert-parallel ranks must divide the experts, before and after a reload.
    for experts in sorted({ways, 2, 4}) if model.name == "moe" else (model.experts,):
        for blocks, hidden in itertools.product(range(1, model.blocks + 1), sorted(widths)):
            smaller = replace(model, hidden=hidden, blocks=blocks, experts=experts)
            yield with_model(scenario, smaller)


def fewer_params(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with fewer bare params: one, two, or all except one or two."""
    shapes = scenario.model.shapes
    if shapes is None:
        return
    count = len(shapes)
    # Not all subsets, because their number doubles with each param.
    for kept_count in sorted({1, 2, count - 2, count - 1}):
        if 0 < kept_count < count:
            for kept in itertools.combinations(range(count), kept_count):
                yield _with_params(scenario, kept)


def smaller_params(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with smaller bare params: first all at once, then each, then pairs."""
    shapes = scenario.model.shapes
    if shapes is None:
        return
    flat = [(math.prod(shape),) for shape in shapes]
    # All at once first, because this saves most of the later steps.
    for most in (1, 2, 3):
        yield from with_buckets(with_bare_params(scenario, [(min(n, most),) for (n,) in flat]))
    yield from with_buckets(with_bare_params(scenario, flat))
    for index, (elems,) in enumerate(flat):
        for fewer in sorted({0, 1, 2, elems // 2, elems - 1}):
            if 0 <= fewer < elems:
                yield from with_buckets(
                    with_bare_params(scenario, [*flat[:index], (fewer,), *flat[index + 1 :]])
                )
    for one, other in itertools.combinations(range(len(flat)), 2):
        # Two together, because a fault may depend on the relation of both sizes.
        fewer = [(max(0, n - 1),) if at in (one, other) else (n,) for at, (n,) in enumerate(flat)]
        yield from with_buckets(with_bare_params(scenario, fewer))


def with_params_reversed(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with reversed params, in place of a layout that reverses them."""
    if scenario.model.shapes is not None and scenario.system.param_order == "reverse":
        turned = changed(scenario, "system.param_order", "registration")
        yield _with_params(turned, range(len(scenario.model.shapes))[::-1])


def tiny_models(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with a few small bare params in place of its model."""
    count = len(params_of(scenario.model))
    for params, sizes in _GRID:
        if params <= count:
            # By total size, so that the smallest failing model comes first.
            for elems in sorted(itertools.product(sizes, repeat=params), key=lambda n: (sum(n), n)):
                yield from with_buckets(with_bare_params(scenario, [(n,) for n in elems]))


def _with_params(scenario: Scenario, kept: Sequence[int]) -> Scenario:
    shapes = scenario.model.shapes or ()
    # A param's name contains its position, so map old names to new positions.
    heirs = {f"p{index}": f"p{place}" for place, index in enumerate(kept)}
    if scenario.model.nested:
        heirs |= {f"m{index}.p{index}": f"m{place}.p{place}" for place, index in enumerate(kept)}
    model = replace(scenario.model, shapes=tuple(shapes[index] for index in kept))
    return with_model(scenario, model, heirs=heirs)


def with_bare_params(scenario: Scenario, shapes: Sequence[Shape]) -> Scenario:
    """Replace a case's model by bare params.

    Args:
        scenario: Case to change.
        shapes: Shape of each param.
    """
    model = scenario.model
    # A network becomes the simplest model of bare params. Such models keep their name.
    name = model.name if model.shapes is not None else SIMPLEST_MODEL
    bare = ModelSpec(
        name=name,
        dtype=model.dtype,
        shapes=tuple(shapes),
        nested=model.nested,
        distinct_start=model.distinct_start,
    )
    return with_model(scenario, bare)


def with_buckets(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case itself, then with smaller buckets and reduce buffers, if it has any."""
    yield scenario
    after = scenario.reload
    for path, now in (
        ("system.bucket_elems", scenario.system.bucket_elems),
        ("system.reduce_buffer_elems", scenario.system.reduce_buffer_elems),
        ("reload.bucket_elems", None if after is None else after.bucket_elems),
    ):
        for elems in range(1, min(_BUCKET_ELEMS_MAX + 1, now or 0)):
            yield changed(scenario, path, elems)
