"""Settings that a case has no use for: what would change nothing is a mistake, not an option.

A field left at its default says nothing, whether something uses it or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zero_sim.errors import Problem
from zero_sim.scenario.bare_params import with_others
from zero_sim.scenario.fields import default_at, describe_value
from zero_sim.scenario.reload import after_reload
from zero_sim.scenario.spec import ModelName, ModelSpec, OptimizerName, OptimizerSpec, Scenario

_USED_BY_MODELS: dict[str, tuple[ModelName, ...]] = {
    "hidden": ("mlp", "fp8", "digits", "moe", "ternary", "tp-block"),
    "blocks": ("mlp", "fp8", "tp-block"),
    "experts": ("moe",),
    "fp8_format": ("fp8",),
    "shapes": ("params", "bit-hash"),
    "tied": ("params",),
    "unused": ("params",),
    "one_rank": ("params",),
}
_WITH_BETAS: tuple[OptimizerName, ...] = ("adamw", "adam", "nadam", "radam", "adamax", "lamb")
_WITH_EPS: tuple[OptimizerName, ...] = (*_WITH_BETAS, "rmsprop", "adagrad", "adadelta", "muon")
_NOT_RPROP: tuple[OptimizerName, ...] = (*_WITH_EPS, "sgd", "asgd")
_USED_BY_OPTIMIZERS: dict[str, tuple[OptimizerName, ...]] = {
    "betas": _WITH_BETAS,
    "eps": _WITH_EPS,
    "weight_decay": _NOT_RPROP,
    "momentum": ("sgd", "rmsprop", "muon"),
    "nesterov": ("sgd", "muon"),
    "amsgrad": ("adam", "adamw"),
}
"""By field: whom it does something for; a field that is not here, for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unused:
    """One setting that some cases have no use for."""

    path: str
    reads: tuple[str, ...]
    """Fields that decide whether it has one."""
    is_used: Callable[[Scenario], bool]
    why: Callable[[Scenario], tuple[str, str]]
    """Why not, and what is used in its place, in words."""

    def check(self, scenario: Scenario) -> Iterator[Problem]:
        """Give the problem, if the setting is set and not used."""
        if _is_set(self, scenario):
            why, used = self.why(scenario)
            yield Problem(
                path=self.path,
                message=f"{why}, got {describe_value(_value(self, scenario))}; {used}.",
                suggestion="Leave it out.",
            )


def without_unused(scenario: Scenario) -> Scenario:
    """The case without what it has no use for; what it trains and how stays as it is.

    Args:
        scenario: A case; nothing else that is wrong in it is looked at.
    """
    for unused in UNUSED:
        if _is_set(unused, scenario):
            table, _, name = unused.path.partition(".")
            record = replace(getattr(scenario, table), **{name: default_at(unused.path)})
            scenario = replace(scenario, **{table: record})
    if scenario.model.one_rank:
        scenario = with_others(scenario)
    kept = tuple(each for each in scenario.model.freeze if each.start < scenario.run.steps)
    if kept != scenario.model.freeze:
        scenario = replace(scenario, model=replace(scenario.model, freeze=kept))
    return scenario


def check_freeze_begins(scenario: Scenario) -> Iterator[Problem]:
    """Check that what is to be frozen is so in a step that there is."""
    steps = scenario.run.steps
    for index, freeze in enumerate(scenario.model.freeze):
        if steps >= 1 and freeze.start >= steps:
            yield Problem(
                path=f"model.freeze[{index}].start",
                message=f"expected a step less than run.steps = {steps}, after which nothing is "
                f"trained, got {describe_value(freeze.start)}.",
                suggestion=f"Try {steps - 1}, or leave it out.",
            )


def _value(unused: Unused, scenario: Scenario) -> object:
    table, _, name = unused.path.partition(".")
    return getattr(getattr(scenario, table), name)


def _is_set(unused: Unused, scenario: Scenario) -> bool:
    if _value(unused, scenario) == default_at(unused.path):
        return False
    return not (unused.is_used(scenario) or unused.is_used(after_reload(scenario)))


def _of_model(name: str, users: tuple[ModelName, ...]) -> Unused:
    def why(scenario: Scenario) -> tuple[str, str]:
        uses = _names(ModelSpec, _USED_BY_MODELS, scenario.model.name)
        return _only("model", users), f"model '{scenario.model.name}' uses {uses}"

    return Unused(
        path=f"model.{name}",
        reads=("model.name",),
        is_used=lambda scenario: scenario.model.name in users,
        why=why,
    )


def _of_optimizer(name: str, users: tuple[OptimizerName, ...]) -> Unused:
    def why(scenario: Scenario) -> tuple[str, str]:
        uses = _names(OptimizerSpec, _USED_BY_OPTIMIZERS, scenario.optimizer.name)
        return _only("optimizer", users), f"optimizer '{scenario.optimizer.name}' uses {uses}"

    return Unused(
        path=f"optimizer.{name}",
        reads=("optimizer.name",),
        is_used=lambda scenario: scenario.optimizer.name in users,
        why=why,
    )


def _names(record: type, users: Mapping[str, Sequence[str]], user: str) -> str:
    """Names of a record's fields that one user has a use for."""
    names = (field.name for field in dataclasses.fields(record))
    return ", ".join(name for name in names if name != "name" and user in users.get(name, (user,)))


def _only(kind: str, users: Sequence[str]) -> str:
    *others, last = (f"'{user}'" for user in users)
    if not others:
        return f"only {kind} {last} uses it"
    return f"only {kind}s {', '.join(others)} and {last} use it"


def _axes(scenario: Scenario) -> int:
    """Number of axes in which ranks differ."""
    topology = scenario.topology
    sizes = (topology.tp, topology.cp, topology.pp)
    others = max(1, topology.tp) * max(1, topology.cp) * max(1, topology.pp)
    return sum(size > 1 for size in (*sizes, scenario.world.size // others))


UNUSED = (
    *(
        _of_model(name, _USED_BY_MODELS[name])
        for name in ("hidden", "blocks", "experts", "tied", "unused", "one_rank")
    ),
    _of_optimizer("eps", _USED_BY_OPTIMIZERS["eps"]),
    Unused(
        path="system.divide_by",
        reads=("system.divide",),
        is_used=lambda scenario: scenario.system.divide != "none",
        why=lambda scenario: (
            "expected something to be divided",
            "system.divide is 'none'",
        ),
    ),
    Unused(
        path="system.contiguous_grads",
        reads=("system.reduce_buffer_elems", "reload"),
        is_used=lambda scenario: scenario.system.reduce_buffer_elems is not None,
        why=lambda scenario: (
            "expected reduce buffers, into which gradients are copied",
            "there is no system.reduce_buffer_elems",
        ),
    ),
    Unused(
        path="system.arena",
        reads=("system.stage", "system.reduce_buffer_elems", "reload"),
        is_used=lambda scenario: (
            scenario.system.stage > 1 and scenario.system.reduce_buffer_elems is None
        ),
        why=lambda scenario: (
            "expected whole gradients that come and go bucket by bucket, at stages 2 and 3",
            "system.reduce_buffer_elems has buffers of its own"
            if scenario.system.stage > 1
            else f"at stage {scenario.system.stage} they stay",
        ),
    ),
    Unused(
        path="system.checkpoints",
        reads=("model.name",),
        is_used=lambda scenario: scenario.model.name == "tp-block",
        why=lambda scenario: (
            "expected model 'tp-block', whose blocks can be run again",
            f"this one is {scenario.model.name!r}",
        ),
    ),
    Unused(
        path="system.offload_checkpoints",
        reads=("system.checkpoints", "model.name"),
        is_used=lambda scenario: (
            scenario.system.checkpoints != "none" and scenario.model.name == "tp-block"
        ),
        why=lambda scenario: (
            "expected checkpoints to be kept on the CPU",
            "there are no system.checkpoints",
        ),
    ),
    Unused(
        path="system.buffers_by",
        reads=("optimizer.groups",),
        is_used=lambda scenario: bool(scenario.optimizer.groups),
        why=lambda scenario: (
            "expected param groups, each of which has buffers of its own",
            "there are no optimizer.groups",
        ),
    ),
    Unused(
        path="topology.order",
        reads=("topology.tp", "topology.cp", "topology.pp", "world.size", "reload"),
        is_used=lambda scenario: _axes(scenario) > 1,
        why=lambda scenario: (
            "expected two of tp, cp, pp and dp to be more than 1, for axes to have an order",
            "there is one axis here",
        ),
    ),
)
"""Settings that have no rule of their own; others say in `scenario.conditions` what they need."""
