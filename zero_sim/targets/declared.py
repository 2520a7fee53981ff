"""Capabilities: the settings that a target supports.

Declarations are facts, never tolerances. A case outside the capabilities is refused before it runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch.distributed import ReduceOp

from zero_sim.errors import Problem, ProtocolError, ScenarioError, UsageError
from zero_sim.reference import AVERAGES, POSITION_FREE
from zero_sim.scenario.fields import field_paths, show, values_at
from zero_sim.scenario.fitting import after_reload
from zero_sim.scenario.kinds import is_own_model
from zero_sim.scenario.pair import PAIRED, other_layout, paired, placed_in_pair
from zero_sim.scenario.reload import placed_in_reload
from zero_sim.scenario.spec import (
    AnyModelName,
    DtypeName,
    ModelName,
    ModelSpec,
    OptimizerName,
    OptimizerSpec,
    OrderName,
    Scenario,
    SystemSpec,
    TopologySpec,
)
from zero_sim.targets.answers import shown
from zero_sim.targets.drawn_weights import drawn_problems, draws_weights
from zero_sim.targets.models import own_models_of, unknown_own_model
from zero_sim.targets.numerics import Numerics, check_word, check_words, value_of
from zero_sim.targets.options import option_problems
from zero_sim.targets.protocol import Target
from zero_sim.workloads import known_models

PLAIN_MODELS: tuple[ModelName, ...] = (
    "mlp",
    "params",
    "transformer-260",
    "bit-hash",
    "positional",
    "gpt",
    "multi-token",
)
"""Models with all params on every rank, each used in every micro-batch."""

ADAMW_SETTINGS = ("optimizer.betas", "optimizer.eps", "optimizer.weight_decay")
OPTIMIZER_SETTINGS = (
    *ADAMW_SETTINGS,
    "optimizer.momentum",
    "optimizer.nesterov",
    "optimizer.amsgrad",
    "optimizer.foreach",
    "optimizer.groups",
    "optimizer.warmup_steps",
)
"""Fields that an engine follows if it passes the scenario's settings to a `torch.optim` class."""

OWN_RULES = ("reference_step", "reference_optimizer")
"""Attributes with which a target gives the reference its own update rule."""

UNKNOWN: Literal["unknown"] = "unknown"
"""Entry in `Capabilities.orders` for an order that the judge does not know."""

UPSTREAM = "scenarios/upstream has this case."
"""End of a message that refuses a case because of a library's known divergence."""

_FREE = ("optimizer.name", "optimizer.lr", "system.target", "system.stage", "system.options")
"""Fields that need not be followed, or that other capabilities cover."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Settings that a target supports. The defaults suit a minimal AdamW wrapper.

    Example:
        A ZeRO-1 system in fp32 or bf16, which clips and accumulates micro-batches:

        >>> can = Capabilities(
        ...     stages=(1,),
        ...     dtypes=("fp32", "bf16"),
        ...     follows=(*ADAMW_SETTINGS, "optimizer.clip_norm", "run.micro_batches"),
        ... )
        >>> can.optimizers
        ('adamw',)
    """

    models: tuple[AnyModelName, ...] = PLAIN_MODELS
    """Shipped models that the target can train. Its own `models` are added."""
    empty_params: bool = True
    """True if a param may have no elements."""
    scalar_params: bool = True
    """True if a param may have no dimensions."""
    dtypes: tuple[DtypeName, ...] = ("fp32",)
    """Dtypes of the working params."""
    # Sharded systems omit stage 0, in which every rank must own all state.
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1)
    """ZeRO stages: nothing is sharded (0), optimizer state (1), gradients too (2), params too (3).
    A sharded system declares `(1,)`."""
    optimizers: tuple[OptimizerName, ...] = ("adamw",)
    """Optimizers from `torch.optim`, or `own` for the target's own update rule."""
    why_no_optimizer: tuple[tuple[OptimizerName, str], ...] = ()
    """Pairs of an unsupported optimizer and the reason, which the refusal shows."""
    # Orders such as a ring's depend on an element's position in the call.
    orders: tuple[OrderName | Literal["unknown"], ...] = POSITION_FREE
    """Orders of addition. If an order depends on positions, `parts` must report places. Declare
    `("unknown",)` if the target adds in its own order, for example with send and recv. Its cases
    then have `world.order_known = false` and are judged by bounds."""
    world_size_max: int | None = None
    """Most data-parallel ranks. None for any number."""
    # Without `settle`, params may be in flight, so they are compared after the next forward.
    unsettled: bool = False
    """True if a step may begin before `settle`. `settle` is then only called after every second
    step, and after the last step."""
    # Lists supported fields, not refused fields, so that older targets refuse new scenario fields.
    follows: tuple[str, ...] = ()
    """Paths of fields that the target obeys: any field of `system`, `optimizer` and `topology`;
    `run.micro_batches`, `run.own_micro_batches`; `model.tied`, `model.unused`, `model.skip`,
    `model.one_rank`, `model.freeze`, `model.recompute`, `model.distinct_start`; `reload`, in any
    form and into any layout that these capabilities allow; `reload.async_steps`. All other fields
    must have their default, or the value that the numerics declare."""
    independent_of: tuple[str, ...] = ()
    """Layout fields that change no bit in params and state unless they change a reduced gradient:
    `world.size`, `system.stage`, `system.redundancy`, `system.bucket_elems`, `system.partition`,
    `system.param_order`. This target can be judged in pairs of layouts. If it has no update rule
    for the reference, each drawn case also has a second layout (`pair`)."""
    only: tuple[tuple[str, tuple[object, ...]], ...] = ()
    """Pairs of a field's path and its supported values, if some values are not supported:
    `("reload.form", ("sharded",))`, `("reload.weights_only", (False,))`, `("system.redundancy", (1,
    2))`. If checkpoints omit the module's buffers: `("model.buffer", ("none", "rebuilt"))`."""

    def __post_init__(self) -> None:
        """Check values, paths and types.

        Raises:
            UsageError: A field has a value that no scenario has.
        """
        for name, choices in _CAPABLE.items():
            # Own models are valid too, once they are registered in this process.
            own = known_models() if name == "models" else ()
            check_words(f"Capabilities.{name}", getattr(self, name), (*choices, *own))
        check_words("Capabilities.follows", self.follows, followed())
        check_words("Capabilities.independent_of", self.independent_of, tuple(PAIRED.values()))
        for entry in self.only:
            if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[1], tuple):
                raise UsageError(
                    "expected every entry of Capabilities.only to be a path and a tuple of values, "
                    f"got {entry!r}. Try ('reload.form', ('sharded',))."
                )
            check_word("the path of an entry of Capabilities.only", entry[0], field_paths())
        for name in ("empty_params", "scalar_params", "unsettled"):
            check_word(f"Capabilities.{name}", getattr(self, name), (True, False))
        most = self.world_size_max
        if most is not None and (type(most) is not int or most < 1):
            raise UsageError(
                "expected Capabilities.world_size_max to be an integer at least 1, or None for any "
                f"number, got {most!r}."
            )

    @property
    def known_orders(self) -> tuple[OrderName, ...]:
        """Orders that the judge knows; empty if the target only adds in an unknown order."""
        return tuple(order for order in self.orders if order != UNKNOWN)

    def problems(self, scenario: Scenario, *, numerics: Numerics) -> Iterator[Problem]:
        """Yield each field of a case that is not supported."""
        topology = scenario.topology
        parts = max(1, topology.tp * topology.pp)
        # Models, dtypes, stages and optimizers.
        if is_own_model(scenario.model.name) and scenario.model.name not in self.models:
            yield unknown_own_model(scenario.model.name, self.models)
        else:
            yield from _one_of("model.name", scenario.model.name, self.models)
        yield from _one_of("model.dtype", scenario.model.dtype, self.dtypes)
        yield from _one_of("system.stage", scenario.system.stage, self.stages)
        name = scenario.optimizer.name
        why = dict(self.why_no_optimizer).get(name, "")
        if name == "own":
            why = why or f"it has no update rule of its own, {' or '.join(OWN_RULES)}"
        yield from _one_of("optimizer.name", name, self.optimizers, why=why)
        # An order that the judge does not know needs no places.
        if scenario.world.order_known and self.known_orders:
            yield from _one_of("world.order", scenario.world.order, self.known_orders)
        elif scenario.world.order_known:
            yield Problem(
                path="world.order_known",
                message="this target adds in its own order, got a known order.",
                suggestion="Try false, or --order unknown.",
            )
        order = scenario.world.order
        # None marks orders of NCCL whose AVG is not modelled.
        if numerics.divide == "avg" and AVERAGES.get(order, "post") is None:
            yield Problem(
                path="world.order",
                message=f"expected an order whose AVG the reference knows, got {order!r}, in which "
                "NCCL multiplies by the reciprocal after the sum.",
                suggestion="Try nccl-ring.",
            )
        # `world.size` counts all ranks, but each tp and pp index has its own data-parallel group.
        if self.world_size_max is not None and scenario.world.size // parts > self.world_size_max:
            yield Problem(
                path="world.size",
                message=f"expected at most {self.world_size_max} data-parallel ranks, got "
                f"{scenario.world.size // parts}.",
            )
        for index, shape in enumerate(scenario.model.shapes or ()):
            if (not shape and not self.scalar_params) or (
                math.prod(shape) == 0 and not self.empty_params
            ):
                yield Problem(
                    path=f"model.shapes[{index}]",
                    message=f"expected {'an element or more' if shape else 'a dimension or more'}, "
                    f"got {show(shape)}.",
                )
        for path, values in self.only:
            # A path may have several values, for example in each param group.
            for at, value in values_at(scenario, path):
                if value not in values:
                    yield from _one_of(at, value, values)
        for name, path in () if scenario.pair is None else paired(scenario).items():
            if path not in self.independent_of:
                yield Problem(
                    path=f"pair.{name}",
                    message=f"expected a target whose state is independent of {path}.",
                    suggestion="Remove it; or, if its state is independent, declare "
                    f"Capabilities(independent_of=({path!r},)).",
                )
        yield from self._unfollowed(scenario, numerics)
        yield from numerics.problems(scenario)

    def _unfollowed(self, scenario: Scenario, numerics: Numerics) -> Iterator[Problem]:
        for path, value, default in _options(scenario):
            if value == default or path in self.follows or path in _FREE:
                continue
            # A scenario may name the value that the target uses anyway.
            table, _, name = path.partition(".")
            if table == "system" and value == value_of(numerics, name):
                continue
            yield Problem(
                path=path,
                message=f"this target does not follow it, got {show(value)}.",
                suggestion="Remove it; or, if the target follows it, declare "
                f"Capabilities(follows=({path!r},)).",
            )


_CAPABLE: dict[str, tuple[object, ...]] = {
    "models": get_args(ModelName),
    "dtypes": get_args(DtypeName),
    "stages": (0, 1, 2, 3),
    "optimizers": get_args(OptimizerName),
    "orders": (*get_args(OrderName), UNKNOWN),
}
"""Allowed values of each capability."""


def numerics_of(target: Target, scenario: Scenario) -> Numerics:
    """Return the arithmetic that a target declares for a case; the scenario's if it declares none.

    Raises:
        ProtocolError: `numerics` is something else, or the function raises.
    """
    declared: object = getattr(target, "numerics", None)
    what = "numerics"
    # Do not call a class: declaring it in place of an instance is a mistake.
    if callable(declared) and not isinstance(declared, type):
        what = "numerics(scenario)"
        declared = _answered(
            target, "numerics", declared, scenario, wanted="give the rules of a case"
        )
    if declared is None:
        return Numerics()
    if not isinstance(declared, Numerics):
        raise _misdeclared(target, what, "zero_sim.targets.Numerics or None", declared)
    return declared


def capabilities_of(target: Target) -> Capabilities:
    """Return the capabilities that a target declares; by default those of a minimal AdamW wrapper.

    `capabilities = None` stands for every setting of a scenario. If a target has its own update
    rule, its optimizer is `own` unless its capabilities name others. The target's own models are
    registered in this process, so that they can be built by name.

    Raises:
        ProtocolError: `capabilities` is something else, or has optimizer `own` without a rule.
    """
    has_rule = has_own_rule(target)
    # A missing attribute means `_PLAIN`, but None is a declaration.
    declared: object = getattr(target, "capabilities", _PLAIN)
    own = own_models_of(target)
    if declared is None:
        declared = _EVERYTHING_AND_OWN if has_rule else EVERYTHING
        own = known_models()
    if not isinstance(declared, Capabilities):
        raise _misdeclared(
            target, "capabilities", "zero_sim.targets.Capabilities or None", declared
        )
    # With the default optimizers nothing was declared, so the own rule is the only optimizer.
    if has_rule and declared.optimizers == _PLAIN.optimizers:
        declared = replace(declared, optimizers=("own",))
    # Without an update rule, `own` can only be judged in pairs of layouts.
    if not has_rule and "own" in declared.optimizers and not declared.independent_of:
        raise ProtocolError(
            f"expected target {target.name!r} to have {' or '.join(OWN_RULES)}, because its "
            "capabilities declare optimizer 'own', got neither. Add it, or declare independent_of."
        )
    new = tuple(name for name in own if name not in declared.models)
    return replace(declared, models=(*declared.models, *new)) if new else declared


def has_own_rule(target: Target) -> bool:
    """Return True if a target has an update rule for the reference."""
    return any(getattr(target, name, None) is not None for name in OWN_RULES)


def reduce_ops_of(target: Target, scenario: Scenario) -> tuple[str, ...]:
    """Return the names of reduce operations besides SUM that a target uses in a case.

    Raises:
        ProtocolError: The function raises, or returns something else.
    """
    own = getattr(target, "reduce_ops", None)
    if own is None:
        return ()
    operations = _answered(target, "reduce_ops", own, scenario, wanted="name operations")
    if not isinstance(operations, tuple) or not all(
        hasattr(ReduceOp, str(each)) for each in operations
    ):
        raise ProtocolError(
            f"expected `reduce_ops` of target {target.name!r} to return a tuple of names of "
            f"torch.distributed.ReduceOp, got {shown(operations)}. Try ('AVG',)."
        )
    return operations


def _answered(
    target: Target,
    name: str,
    own: Callable[[Scenario], object],
    scenario: Scenario,
    *,
    wanted: str,
) -> object:
    try:
        return own(scenario)
    # The target's code may raise anything.
    except Exception as error:
        raise ProtocolError(
            f"expected `{name}` of target {target.name!r} to {wanted}, got "
            f"{type(error).__name__}: {error}."
        ) from error


def _as_problems(reported: object) -> object:
    """Return refusals as problems, converting strings; anything else unchanged."""
    if isinstance(reported, str):
        reported = (reported,)
    if not isinstance(reported, Iterable):
        return reported
    return tuple(
        Problem(path="system.target", message=each) if isinstance(each, str) else each
        for each in reported
    )


def followed() -> tuple[str, ...]:
    """Return all paths that a target can declare to follow."""
    case = Scenario(schema=1, model=ModelSpec(name="mlp"))
    return tuple(path for path, _, _ in _options(case) if path != "system.options")


def _misdeclared(target: Target, name: str, wanted: str, got: object) -> ProtocolError:
    return ProtocolError(
        f"expected {name!r} of target {getattr(target, 'name', target)!r} to be {wanted}, got "
        f"{shown(got)}."
    )


def refusals(target: Target, scenario: Scenario) -> tuple[Problem, ...]:
    """Return all reasons why a case cannot run on a target; empty if it can.

    If a case reloads, it is also checked with the world and layout after the checkpoint.
    """
    found = _refusals_of_one(target, scenario)
    # The pair's other layout runs first, so it must be supported too.
    if scenario.pair is not None:
        other = _refusals_of_one(target, other_layout(scenario))
        placed = (placed_in_pair(problem, scenario) for problem in other)
        return (*found, *(each for each in placed if not found))
    if scenario.reload is None:
        return found
    # World and layout may differ after the checkpoint, so check them as a separate case.
    after = replace(after_reload(scenario), reload=None)
    later = (
        placed_in_reload(problem, scenario.reload) for problem in _refusals_of_one(target, after)
    )
    return (*found, *(problem for problem in later if problem not in found))


def check_supported(target: Target, scenario: Scenario) -> None:
    """Check that a case can run on a target.

    Raises:
        ScenarioError: It cannot; the error lists all reasons.
    """
    problems = refusals(target, scenario)
    if problems:
        raise ScenarioError(
            f"{scenario.name}: target {target.name!r} cannot run this case", problems
        )


def _refusals_of_one(target: Target, scenario: Scenario) -> tuple[Problem, ...]:
    options = tuple(option_problems(target, scenario))
    if options:
        # Return early, because `numerics` and `refuses` may read the options.
        return options
    declared = tuple(
        capabilities_of(target).problems(scenario, numerics=numerics_of(target, scenario))
    )
    drawn = drawn_problems(scenario) if draws_weights(target) else ()
    is_known = scenario.optimizer.name != "own" or has_own_rule(target)
    # A pair needs no rule, because its other layout provides the expected state.
    if scenario.pair is None and not is_known and not declared:
        declared = (_NO_RULE,)
    return (*declared, *drawn, *_own_refusals(target, scenario))


def _own_refusals(target: Target, scenario: Scenario) -> tuple[Problem, ...]:
    own = getattr(target, "refuses", None)
    if own is None:
        return ()
    # Generators must run within `_answered`, where their errors are explained.
    wanted_words = "return reasons why a case cannot run"
    reported = _answered(
        target, "refuses", lambda case: _as_problems(own(case)), scenario, wanted=wanted_words
    )
    if not isinstance(reported, tuple) or not all(isinstance(each, Problem) for each in reported):
        wanted = "strings or zero_sim.errors.Problem"
        raise ProtocolError(
            f"expected `refuses` of target {target.name!r} to return an iterable of {wanted}, got "
            f"{shown(reported)}. Return () to accept the case."
        )
    return reported


def _one_of(
    path: str, value: object, choices: tuple[object, ...], *, why: str = ""
) -> Iterator[Problem]:
    if value not in choices:
        names = ", ".join(show(choice) for choice in choices)
        yield Problem(
            path=path,
            message=f"this target supports {names}, got {show(value)}{why and f': {why}'}.",
            suggestion=f"Try {show(choices[0])}." if choices else "",
        )


def _options(scenario: Scenario) -> Iterator[tuple[str, object, object]]:
    """Yield path, value and default of each field that a target may need to follow."""
    tables = (
        ("system", scenario.system, SystemSpec()),
        ("optimizer", scenario.optimizer, OptimizerSpec()),
        ("topology", scenario.topology, TopologySpec()),
    )
    for table, record, default in tables:
        for field in dataclasses.fields(record):
            path = f"{table}.{field.name}"
            yield path, getattr(record, field.name), getattr(default, field.name)
    # Fields of other tables that the engine must support.
    yield "run.micro_batches", scenario.run.micro_batches, 1
    yield "run.own_micro_batches", scenario.run.own_micro_batches, ()
    for name in ("tied", "unused", "skip", "one_rank", "freeze"):
        yield f"model.{name}", getattr(scenario.model, name), ()
    yield "model.recompute", scenario.model.recompute, "none"
    yield "model.distinct_start", scenario.model.distinct_start, False
    yield "reload", scenario.reload, None
    yield "reload.async_steps", scenario.reload.async_steps if scenario.reload else 0, 0


_NO_RULE = Problem(
    path="pair",
    message=f"this target gives the reference no update rule ({' or '.join(OWN_RULES)}), so "
    "expected two layouts to compare, got one.",
    suggestion="Try [pair] with stage or world_size.",
)
_PLAIN = Capabilities()
EVERYTHING = Capabilities(
    models=get_args(ModelName),
    dtypes=get_args(DtypeName),
    stages=(0, 1, 2, 3),
    optimizers=tuple(name for name in get_args(OptimizerName) if name != "own"),
    orders=get_args(OrderName),
    follows=followed(),
    independent_of=tuple(PAIRED.values()),
)
"""Every setting of a scenario, for a target without its own update rule."""
_EVERYTHING_AND_OWN = replace(EVERYTHING, optimizers=get_args(OptimizerName))
