"""Smaller candidates for a failing case, in passes. The search keeps those that still fail."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import reduce
from operator import attrgetter

from zero_sim.scenario.fields import choices_of, fields_of
from zero_sim.scenario.rules import BOUNDS
from zero_sim.scenario.spec import Scenario, TopologySpec
from zero_sim.shrink.models import (
    fewer_params,
    plainer_models,
    smaller_params,
    tiny_models,
    with_bare_params,
    with_buckets,
    with_params_reversed,
)
from zero_sim.shrink.repair import changed, repaired
from zero_sim.shrink.size import size_of
from zero_sim.shrink.substitutions import TINY, one_world, substitutions

_FEW_RANKS = 3
_RANKS_TRIED = 8
"""Try all numbers of ranks up to this limit, but only some larger numbers."""
_SEEDS = range(4)
_TINY_ELEMS = 2
_FEW_ELEMS = (1, 2, 8)
# With a large learning rate, more draws show a rounding fault.
_LARGE_LR = 0.1
_MORE_SEEDS = range(24)
"""Seeds for tiny cases, which are cheap to run."""

_LEAST = {bound.path: bound.least for bound in BOUNDS}
_SECTIONS = ("data", "world", "topology", "system", "optimizer", "expect")
_KEPT = frozenset({"size", "steps", "micro_batches", "seed", "stall_seconds", "target", "finding"})
"""Fields that other passes change, or whose change would test something else."""


def fewer_ranks(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case in smaller worlds, smallest first."""
    size, after = scenario.world.size, scenario.reload
    # The world after a reload may also fail without a checkpoint. Without a reload, skip this.
    for steps in range(1, scenario.run.steps + 1 if after is not None else 1):
        yield repaired(changed(one_world(scenario), "run.steps", steps))
    fewest = {*range(1, _RANKS_TRIED + 1), size // 2, size * 3 // 4, size - 1, size}
    for ranks in sorted(ranks for ranks in fewest if 1 <= ranks <= size):
        # Also scale sizes, because a shape may only matter relative to the number of ranks.
        for base in (scenario, _scaled(scenario, by=ranks - size)):
            fewer = replace(base, world=replace(base.world, size=ranks))
            # Also drop tp, cp and pp, because these may not divide the smaller world.
            for flat in (fewer, replace(fewer, topology=TopologySpec(ep=fewer.topology.ep))):
                if after is None:
                    yield repaired(flat)
                    continue
                # World size after the reload: unchanged, the same as before it, then small.
                for reloaded in dict.fromkeys((after.world_size, None, 1, 2, ranks)):
                    # Not larger than before, because that would make the case larger.
                    if reloaded is None or reloaded <= max(ranks, after.world_size or 0):
                        yield repaired(replace(flat, reload=replace(after, world_size=reloaded)))


def _scaled(scenario: Scenario, *, by: int) -> Scenario:
    """Change sizes by the same amount as the number of ranks."""
    # A network's sizes do not depend on the number of ranks.
    shapes, bucket = scenario.model.shapes, scenario.system.bucket_elems
    if shapes is None:
        return scenario
    smaller = tuple((max(1, shape[0] + by),) if len(shape) == 1 else shape for shape in shapes)
    if bucket is not None:
        scenario = changed(scenario, "system.bucket_elems", max(1, bucket + by))
    return replace(scenario, model=replace(scenario.model, shapes=smaller))


def leaps(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with a tiny model on one or two ranks, so that later runs are cheap."""
    dropped = [section for section in _SECTIONS if section not in ("world", "system")]
    model = replace(scenario.model, tied=(), unused=(), skip=(), one_rank=(), freeze=())
    plain = replace(scenario, reload=None, faults=(), model=model)
    # First without features, then with the race detector and one-element buckets, then with the
    # system's features, and last with all features. So the plainest failing case comes first.
    of_system = reduce(_plain, dropped, plain)
    bare = reduce(_plain, ("world", "system"), of_system)
    watched = changed(changed(bare, "world.races", True), "system.bucket_elems", 1)
    for base in (bare, watched, of_system, scenario):
        for ranks in (1, 2):
            fewer = repaired(changed(base, "world.size", ranks))
            for sizes in TINY:
                yield from with_buckets(with_bare_params(fewer, [(n,) for n in sizes]))


def few_ranks_and_params(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case in the smallest worlds with the smallest models."""
    for ranks in range(1, min(_FEW_RANKS, scenario.world.size) + 1):
        fewer = repaired(replace(scenario, world=replace(scenario.world, size=ranks)))
        yield from tiny_models(fewer)


def fewer_steps(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with fewer steps, then with fewer micro-batches."""
    for steps in range(1, scenario.run.steps):
        yield repaired(changed(scenario, "run.steps", steps))
    for count in range(1, scenario.run.micro_batches):
        yield repaired(changed(scenario, "run.micro_batches", count))


def fewer_features(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with fewer non-default settings: first sections, then fields."""
    for section in _SECTIONS:
        yield repaired(_plain(scenario, section))
    for path in _blocks(scenario):
        yield repaired(changed(scenario, path, _nothing(scenario, path)))
        yield from _shorter(scenario, path)
    yield from with_params_reversed(scenario)
    yield from (repaired(changed(scenario, *one)) for one in _defaults(scenario))
    # Pairs too, because a field may only be valid together with another.
    pairs = itertools.combinations(list(_defaults(scenario)), 2)
    yield from (repaired(changed(changed(scenario, *one), *other)) for one, other in pairs)


def plainer_values(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with smaller numbers, plainer choices and small seeds."""
    for path, value, _, choices in _values(scenario):
        if value in choices:
            # Choices are declared in order of plainness.
            options: Iterable[object] = choices[: choices.index(value)]
        elif isinstance(value, int) and not isinstance(value, bool):
            least = _LEAST.get(path, 0)
            options = sorted({n for n in (0, 1, 2, value // 2, value - 1) if least <= n < value})
        else:
            continue
        yield from (repaired(changed(scenario, path, option)) for option in options)
    for index, one in enumerate(scenario.model.one_rank):
        for plainer in (replace(one, rank=0), replace(one, micro_batch=None)):
            others = scenario.model.one_rank
            ones = (*others[:index], plainer, *others[index + 1 :])
            if ones != others:
                yield repaired(changed(scenario, "model.one_rank", ones))
    # Without repair, because no setting depends on the seed.
    yield from (changed(scenario, "run.seed", seed) for seed in _SEEDS)


def with_other_numbers(scenario: Scenario) -> Iterator[Scenario]:
    """Yield smaller cases with other seeds, because rounding may hide a fault in some draws."""
    for smaller in (fewer_params, smaller_params, fewer_steps):
        for candidate in smaller(scenario):
            yield from _other_seeds(candidate)
    # Only for tiny cases, because each candidate runs with all seeds.
    if size_of(scenario).elements <= _TINY_ELEMS:
        for path in _blocks(scenario):
            yield from _other_seeds(repaired(changed(scenario, path, _nothing(scenario, path))))
        for path, default in _defaults(scenario):
            yield from _other_seeds(repaired(changed(scenario, path, default)))


def bare_with_other_numbers(scenario: Scenario) -> Iterator[Scenario]:
    """Yield a single small bare param, with other seeds and a large learning rate."""
    # `with_other_numbers` covers tiny cases.
    if size_of(scenario).elements <= _TINY_ELEMS:
        return
    for elems in _FEW_ELEMS:
        bare = repaired(with_bare_params(scenario, [(elems,)]))
        for candidate in (bare, changed(bare, "optimizer.lr", _LARGE_LR)):
            yield from _other_seeds(candidate)


def _other_seeds(scenario: Scenario) -> Iterator[Scenario]:
    # More seeds for tiny cases, because few draws of so few elements show a rounding fault.
    is_tiny = size_of(scenario).elements <= _TINY_ELEMS
    seeds = _MORE_SEEDS if is_tiny else _SEEDS
    yield from (changed(scenario, "run.seed", seed) for seed in seeds)


def _plain(scenario: Scenario, section: str) -> Scenario:
    """Reset a section to its defaults, except for `_KEPT`."""
    record = getattr(scenario, section)
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    kept = {name: value for name, value in fields.items() if name in _KEPT}
    return replace(scenario, **{section: type(record)(**kept)})


def _blocks(scenario: Scenario) -> Iterator[str]:
    """Yield the paths of optional tables and lists that are not empty."""
    paths = ("reload", "pair", "data.nan", "optimizer.loss_scale", "optimizer.groups",
             "model.freeze", "model.tied", "model.unused", "model.skip", "model.one_rank",
             "topology.shared", "topology.tied", "system.options", "faults",
             "run.own_micro_batches")  # fmt: skip
    return (path for path in paths if attrgetter(path)(scenario))


def _nothing(scenario: Scenario, path: str) -> object:
    return () if isinstance(attrgetter(path)(scenario), tuple) else None


def _shorter(scenario: Scenario, path: str) -> Iterator[Scenario]:
    items = attrgetter(path)(scenario)
    if isinstance(items, tuple) and len(items) > 1:
        for index in range(len(items)):
            yield repaired(changed(scenario, path, items[:index] + items[index + 1 :]))


def _defaults(scenario: Scenario) -> Iterator[tuple[str, object]]:
    """Yield the path and default of each non-default field."""
    for path, _, default, _ in _values(scenario):
        if default is not dataclasses.MISSING:
            yield path, default


def _values(scenario: Scenario) -> Iterator[tuple[str, object, object, tuple[object, ...]]]:
    """Yield path, value, default and choices of each non-default field."""
    tables = [*_SECTIONS, "run", "model", "reload", "pair", "data.nan", "optimizer.loss_scale"]
    for table in tables:
        record = attrgetter(table)(scenario)
        for column in dataclasses.fields(record) if record is not None else ():
            value, default = getattr(record, column.name), column.default
            if column.name in _KEPT or (table, column.name) == ("model", "name"):
                continue
            # `betas` is a value. Other tuples are lists, which have their own passes.
            is_list = isinstance(value, tuple) and column.name != "betas"
            if is_list or dataclasses.is_dataclass(value) or value == default:
                continue
            choices = choices_of(fields_of(type(record))[column.name])
            yield f"{table}.{column.name}", value, default, choices


# Leaps first, because they make all later candidates cheap to run.
PASSES: tuple[Callable[[Scenario], Iterator[Scenario]], ...] = (
    leaps,
    fewer_ranks,
    plainer_models,
    fewer_params,
    smaller_params,
    fewer_steps,
    fewer_features,
    few_ranks_and_params,
    substitutions,
    plainer_values,
    with_other_numbers,
    bare_with_other_numbers,
)
