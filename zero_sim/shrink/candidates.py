"""Candidates to replace a case, pass by pass; the search keeps a smaller one that still fails."""

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
"""Try every number of ranks up to this one, and only some larger ones."""
_SEEDS = range(4)
_TINY_ELEMS = 2
_FEW_ELEMS = (1, 2, 8)
# With a large step, a rounding fault shows in more draws.
_LARGE_LR = 0.1
_MORE_SEEDS = range(24)
"""Seeds for tiny cases, which cost next to nothing to run."""

_LEAST = {bound.path: bound.least for bound in BOUNDS}
_SECTIONS = ("data", "world", "topology", "system", "optimizer", "expect")
_KEPT = frozenset({"size", "steps", "micro_batches", "seed", "stall_seconds", "target", "finding"})
"""Fields that other passes change, or that would make the case another test."""


def fewer_ranks(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case in smaller worlds, the smallest first."""
    size, after = scenario.world.size, scenario.reload
    # Empty without a reload, which has only one world.
    for steps in range(1, scenario.run.steps + 1 if after is not None else 1):
        # The world after a reload may fail by itself, in a case without a checkpoint.
        yield repaired(changed(one_world(scenario), "run.steps", steps))
    fewest = {*range(1, _RANKS_TRIED + 1), size // 2, size * 3 // 4, size - 1, size}
    for ranks in sorted(ranks for ranks in fewest if 1 <= ranks <= size):
        # With scaled sizes too: a shape may matter only in relation to the number of ranks.
        for base in (scenario, _scaled(scenario, by=ranks - size)):
            fewer = replace(base, world=replace(base.world, size=ranks))
            # Without tp, cp and pp too, because these may not divide the smaller world.
            for flat in (fewer, replace(fewer, topology=TopologySpec(ep=fewer.topology.ep))):
                if after is None:
                    yield repaired(flat)
                    continue
                # The world after the reload: unchanged, as before it, then small ones.
                for reloaded in dict.fromkeys((after.world_size, None, 1, 2, ranks)):
                    # A larger world after the reload would make the case larger.
                    if reloaded is None or reloaded <= max(ranks, after.world_size or 0):
                        yield repaired(replace(flat, reload=replace(after, world_size=reloaded)))


def _scaled(scenario: Scenario, *, by: int) -> Scenario:
    """Change sizes by as much as the number of ranks changes."""
    # Networks have no sizes that follow the number of ranks.
    shapes, bucket = scenario.model.shapes, scenario.system.bucket_elems
    if shapes is None:
        return scenario
    smaller = tuple((max(1, shape[0] + by),) if len(shape) == 1 else shape for shape in shapes)
    if bucket is not None:
        scenario = changed(scenario, "system.bucket_elems", max(1, bucket + by))
    return replace(scenario, model=replace(scenario.model, shapes=smaller))


def leaps(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with a tiny model on one or two ranks, after which every run is cheap.

    First without any feature, then with the race detector and one-element buckets, with the
    features of its system, and with all its features.
    """
    dropped = [section for section in _SECTIONS if section not in ("world", "system")]
    model = replace(scenario.model, tied=(), unused=(), skip=(), one_rank=(), freeze=())
    plain = replace(scenario, reload=None, faults=(), model=model)
    # Each base keeps more features than the one before it, so the plainest failing one is found
    # first.
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
    """Yield the case with fewer non-default settings: whole sections, then single fields."""
    for section in _SECTIONS:
        yield repaired(_plain(scenario, section))
    for path in _blocks(scenario):
        yield repaired(changed(scenario, path, _nothing(scenario, path)))
        yield from _shorter(scenario, path)
    yield from with_params_reversed(scenario)
    yield from (repaired(changed(scenario, *one)) for one in _defaults(scenario))
    # Pairs, because one field may be valid only together with another.
    pairs = itertools.combinations(list(_defaults(scenario)), 2)
    yield from (repaired(changed(changed(scenario, *one), *other)) for one, other in pairs)


def plainer_values(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the case with smaller numbers, earlier choices and small seeds."""
    for path, value, _, choices in _values(scenario):
        # Anything else than a choice or an integer has no order of plainness.
        if value in choices:
            # Choices are declared with the plainest first.
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
    # No repair, because no other setting depends on the seed.
    yield from (changed(scenario, "run.seed", seed) for seed in _SEEDS)


def with_other_numbers(scenario: Scenario) -> Iterator[Scenario]:
    """Yield smaller cases with other seeds, because rounding may hide a fault in one draw."""
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
    """Yield one bare param of few elements, with other seeds and a large learning rate.

    A rounding fault shows only in some draws, and in more of them if the step is large. Tiny cases
    are skipped: `with_other_numbers` covers them.
    """
    if size_of(scenario).elements <= _TINY_ELEMS:
        return
    for elems in _FEW_ELEMS:
        bare = repaired(with_bare_params(scenario, [(elems,)]))
        for candidate in (bare, changed(bare, "optimizer.lr", _LARGE_LR)):
            yield from _other_seeds(candidate)


def _other_seeds(scenario: Scenario) -> Iterator[Scenario]:
    # More seeds for tiny cases, because few draws of one or two elements show a rounding fault.
    is_tiny = size_of(scenario).elements <= _TINY_ELEMS
    seeds = _MORE_SEEDS if is_tiny else _SEEDS
    yield from (changed(scenario, "run.seed", seed) for seed in seeds)


def _plain(scenario: Scenario, section: str) -> Scenario:
    """Reset a section of the case to its defaults, apart from `_KEPT`."""
    record = getattr(scenario, section)
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    kept = {name: value for name, value in fields.items() if name in _KEPT}
    return replace(scenario, **{section: type(record)(**kept)})


def _blocks(scenario: Scenario) -> Iterator[str]:
    """Yield the paths of the case's optional tables and lists that are not empty."""
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
            # A pair of numbers is a value; other tuples are lists, which have passes of their own.
            is_list = isinstance(value, tuple) and column.name != "betas"
            if is_list or dataclasses.is_dataclass(value) or value == default:
                continue
            choices = choices_of(fields_of(type(record))[column.name])
            yield f"{table}.{column.name}", value, default, choices


# Leaps first, because every later candidate is then cheap to run.
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
