"""Param names in a scenario: frozen spans, param groups, and checks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from zero_sim.errors import Problem
from zero_sim.scenario.fields import describe_value
from zero_sim.scenario.spec import FreezeSpec, ModelSpec, ParamGroupSpec, Scenario, SkipSpec

_NAMES_SHOWN = 12


def frozen_at(model: ModelSpec, *, step: int) -> frozenset[str]:
    """Return the names of params that are frozen in a step."""
    return frozenset(each.param for each in model.freeze if each.start <= step < each.stop)


def _spans(model: ModelSpec) -> Iterator[tuple[str, FreezeSpec | SkipSpec]]:
    for name in ("freeze", "skip"):
        for index, span in enumerate(getattr(model, name)):
            yield f"model.{name}[{index}]", span


def check_spans(scenario: Scenario) -> Iterator[Problem]:
    """Check that each span starts before it stops."""
    for path, span in _spans(scenario.model):
        if not 0 <= span.start < span.stop:
            yield Problem(
                path=f"{path}.stop",
                message="expected start at least 0 and stop more than start, got "
                f"start = {span.start}, stop = {span.stop}.",
                suggestion=f"Try stop = {max(span.start, 0) + 1}; steps count from 0.",
            )


def check_spans_begin(scenario: Scenario) -> Iterator[Problem]:
    """Check that each span starts within the run."""
    steps = scenario.run.steps
    for path, span in _spans(scenario.model):
        if steps >= 1 and span.start >= steps:
            yield Problem(
                path=f"{path}.start",
                message=f"expected a step less than run.steps = {steps}, got "
                f"{describe_value(span.start)}.",
                suggestion=f"Try {steps - 1}, or leave it out.",
            )


def check_groups(scenario: Scenario) -> Iterator[Problem]:
    """Check that the optimizer has the settings in its param groups."""
    for index, group in enumerate(scenario.optimizer.groups):
        # torch.optim.Rprop has no `weight_decay`. All optimizers have a learning rate.
        if group.weight_decay and scenario.optimizer.name == "rprop":
            yield Problem(
                path=f"optimizer.groups[{index}].weight_decay",
                message="optimizer 'rprop' has no weight decay, got "
                f"{describe_value(group.weight_decay)}.",
                suggestion="Leave it out.",
            )


def check_names(scenario: Scenario, names: Collection[str]) -> Iterator[Problem]:
    """Check that every param name or name ending in a case matches a param.

    Args:
        scenario: A valid case.
        names: Names of all trained params, on any rank.
    """
    # Show at most a dozen names, because a large model has thousands.
    known = _some(names)
    for index, freeze in enumerate(scenario.model.freeze):
        if freeze.param not in names:
            yield Problem(
                path=f"model.freeze[{index}].param",
                message=f"expected the name of a param that the model trains, got "
                f"{describe_value(freeze.param)}.",
                suggestion=f"Try one of {known}.",
            )
    # A param belongs to its first match, so each group takes its matches from the rest.
    left = list(names)
    for index, group in enumerate(scenario.optimizer.groups):
        matched = {name for name in names if name.endswith(group.match)}
        if matched.isdisjoint(left):
            taken = "earlier groups have all matches" if matched else "no name matches"
            yield Problem(
                path=f"optimizer.groups[{index}].match",
                message="expected the name ending of a trained param that no earlier group has, "
                f"got {describe_value(group.match)}; {taken}.",
                suggestion=f"Leave the group out, or try an ending of one of {_some(left)}."
                if left
                else "Leave the group out.",
            )
        left = [name for name in left if name not in matched]
    for field in ("shared", "tied"):
        for index, ending in enumerate(getattr(scenario.topology, field)):
            if not any(name.endswith(ending) for name in names):
                yield Problem(
                    path=f"topology.{field}[{index}]",
                    message="expected the name ending of a param that the model trains, got "
                    f"{describe_value(ending)}.",
                    suggestion=f"Leave it out, or try an ending of one of {known}.",
                )


def with_known_names(scenario: Scenario, names: Collection[str]) -> Scenario:
    """Return the case without names that match no param; `names` as for `check_names`."""
    topology = replace(
        scenario.topology,
        shared=_known(scenario.topology.shared, names),
        tied=_known(scenario.topology.tied, names),
    )
    freeze = tuple(each for each in scenario.model.freeze if each.param in names)
    groups = matching_groups(scenario.optimizer.groups, names)
    return replace(
        scenario,
        model=replace(scenario.model, freeze=freeze),
        optimizer=replace(scenario.optimizer, groups=groups),
        topology=topology,
    )


def matching_groups(
    groups: Sequence[ParamGroupSpec], names: Collection[str]
) -> tuple[ParamGroupSpec, ...]:
    """Return the groups with at least one param. A param belongs to its first match."""
    # A group whose matches all belong to earlier groups would have no param.
    kept, left = [], set(names)
    for group in groups:
        matched = {name for name in left if name.endswith(group.match)}
        if matched:
            kept.append(group)
        left -= matched
    return tuple(kept)


def _known(endings: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    return tuple(e for e in endings if any(name.endswith(e) for name in names))


def _some(names: Collection[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    some = ", ".join(list(names)[:_NAMES_SHOWN])
    return f"{some} and {more} more" if more > 0 else some
