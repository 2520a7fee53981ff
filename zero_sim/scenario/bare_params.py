"""Bare params that losses read: their names, steps and ranks.

Each micro-batch on each rank has a loss. A param that a loss does not read gets no gradient from
its backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zero_sim.errors import Problem
from zero_sim.scenario.fields import check_index, describe_value
from zero_sim.scenario.spec import ModelSpec, OneRankSpec, Scenario

_NAMES_SHOWN = 12


def bare_names(model: ModelSpec) -> tuple[str, ...]:
    """Return bare param names in registration order: `p0`, `p1`, ..."""
    return tuple(f"p{index}" for index in range(len(model.shapes or ())))


def skipped_at(model: ModelSpec, *, step: int) -> frozenset[str]:
    """Return the bare params that no loss reads in a step, because of `model.skip`."""
    return frozenset(each.param for each in model.skip if each.start <= step < each.stop)


def unread_by(model: ModelSpec, *, rank: int, micro: int) -> frozenset[str]:
    """Return the param names that the loss of a group rank's micro-batch does not read."""
    # No other rank or micro-batch reads the param in a `one_rank` entry.
    others = (
        each.param
        for each in model.one_rank
        if each.rank != rank or each.micro_batch not in (None, micro)
    )
    return frozenset((*model.unused, *others))


def others_run(scenario: Scenario, one: OneRankSpec) -> bool:
    """Return True if some loss does not read the param in a `model.one_rank` entry."""
    # Other micro-batches on the same rank do not read the param.
    is_one_of_many = one.micro_batch is not None and scenario.run.micro_batches > 1
    return is_one_of_many or max(_group_sizes(scenario)) > 1


def fitted_one_rank(scenario: Scenario) -> Scenario:
    """Clamp ranks and micro-batches in `model.one_rank` to valid indices."""
    # By the smaller world, because the entry holds before and after a checkpoint.
    last_rank, last_micro = min(_group_sizes(scenario)) - 1, scenario.run.micro_batches - 1
    fitted = tuple(
        replace(
            each,
            rank=max(0, min(each.rank, last_rank)),
            micro_batch=None
            if each.micro_batch is None
            else max(0, min(each.micro_batch, last_micro)),
        )
        for each in scenario.model.one_rank
    )
    return replace(scenario, model=replace(scenario.model, one_rank=fitted))


def with_others(scenario: Scenario) -> Scenario:
    """Return the case without `model.one_rank` entries that cover every loss."""
    # With a single micro-batch, `micro_batch` changes nothing.
    several = scenario.run.micro_batches > 1
    kept = tuple(
        each if several else replace(each, micro_batch=None)
        for each in scenario.model.one_rank
        if others_run(scenario, each)
    )
    return replace(scenario, model=replace(scenario.model, one_rank=kept))


def _group_sizes(scenario: Scenario) -> tuple[int, ...]:
    """Return dp-cp group sizes, before and after a checkpoint."""
    topology, after = scenario.topology, scenario.reload
    # Avoid a division by zero, because the case may be invalid. The range check reports it.
    parts = max(1, topology.tp) * max(1, topology.pp)
    size = scenario.world.size
    sizes = (size, size if after is None else after.world_size or size)
    return tuple(each // parts for each in sizes)


def check_readers(scenario: Scenario) -> Iterator[Problem]:
    """Check that each field names a bare param once, and that every loss reads a param."""
    model = scenario.model
    names = bare_names(model)
    # `applies` reports other models with these fields, `rules` reports missing shapes.
    if model.name != "params" or not names:
        return
    fields = {
        "tied": model.tied,
        "unused": model.unused,
        # A param may have several spans, so repetitions are allowed.
        "skip": tuple(dict.fromkeys(each.param for each in model.skip)),
        "one_rank": tuple(each.param for each in model.one_rank),
    }
    for field, names_of_field in fields.items():
        for index, name in enumerate(names_of_field):
            # Entries of `skip` and `one_rank` are tables with a `param`; others are names.
            place = ".param" if field in ("skip", "one_rank") else ""
            yield from _one_name(
                f"model.{field}[{index}]{place}", name, names_of_field[:index], names
            )
    for index, name in enumerate(model.unused):
        for field in ("tied", "skip", "one_rank"):
            if name in fields[field]:
                yield Problem(
                    path=f"model.unused[{index}]",
                    message="expected a param that no loss reads, got "
                    f"{describe_value(name)}, which is also in model.{field}.",
                    suggestion="Remove it from either field.",
                )
    # Autograd raises if no input to a loss requires a gradient.
    if set(names) <= {*model.unused, *fields["skip"], *fields["one_rank"]}:
        yield Problem(
            path="model.unused" if model.unused else "model.one_rank",
            message="expected a param that every loss reads, because each needs a backward, got "
            f"{', '.join(names[:_NAMES_SHOWN])} all unused, skipped or read by a single rank.",
            suggestion="Remove one of them there, or add a shape to model.shapes.",
        )


def _one_name(
    path: str, name: str, before: tuple[str, ...], names: tuple[str, ...]
) -> Iterator[Problem]:
    if name not in names:
        more = len(names) - _NAMES_SHOWN
        known = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        yield Problem(
            path=path,
            message=f"expected the name of a bare param, got {describe_value(name)}.",
            suggestion=f"Try one of {known}.",
        )
    elif name in before:
        yield Problem(
            path=path,
            message=f"expected every param once, got {describe_value(name)} again.",
            suggestion="Leave it out.",
        )


def check_one_rank(scenario: Scenario) -> Iterator[Problem]:
    """Check that in each `model.one_rank` entry, some loss reads the param and another does not."""
    run, sizes = scenario.run, _group_sizes(scenario)
    # Range checks report a count below 1, with which every index would be wrong.
    if min(*sizes, run.micro_batches) < 1:
        return
    for index, one in enumerate(scenario.model.one_rank):
        path = f"model.one_rank[{index}]"
        whole = "" if scenario.reload is None else ", before and after the checkpoint"
        of = f"the number of ranks in a dp-cp group{whole}, {min(sizes)}"
        yield from check_index(f"{path}.rank", one.rank, stop=min(sizes), of=of, counted="ranks")
        micro = one.micro_batch
        if micro is not None and run.micro_batches == 1:
            yield Problem(
                path=f"{path}.micro_batch",
                message=f"expected several micro-batches, got {describe_value(micro)} with "
                "run.micro_batches = 1.",
                suggestion="Leave it out.",
            )
        elif micro is not None and not 0 <= micro < run.micro_batches:
            yield from check_index(
                f"{path}.micro_batch",
                micro,
                stop=run.micro_batches,
                of=f"run.micro_batches = {run.micro_batches}",
                counted="micro-batches",
            )
        elif not others_run(scenario, one):
            yield Problem(
                path=path,
                message="expected another rank or micro-batch, whose loss does not read "
                f"{describe_value(one.param)}, got a dp-cp group with a single rank.",
                suggestion="Leave it out, or write world.size = 2.",
            )
