"""Declarations of a target: what it may be asked for, and by which rules it computes.

Declared facts, never tolerances. A case outside the capabilities is refused before it runs; the
numerics turn the case that a target is given into the case that the reference replays, so that the
reference knows nothing of targets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal, get_args

from zero_sim.errors import Problem, ProtocolError, ScenarioError, UsageError
from zero_sim.reference import AVERAGES, CLIP_FORMS, POSITION_FREE, ClipForm, Norm, takes_root
from zero_sim.scenario.fields import show
from zero_sim.scenario.reload import after_reload, placed_in_reload
from zero_sim.scenario.spec import (
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
from zero_sim.targets.protocol import Target

PLAIN_MODELS: tuple[ModelName, ...] = (
    "mlp",
    "params",
    "transformer-260",
    "lattice",
    "bit-hash",
)
"""Models of which every rank has all params and every micro-batch uses each of them."""

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
"""What an engine follows that steps with a class of torch and the settings of the scenario."""

_FREE = ("optimizer.name", "optimizer.lr", "system.target", "system.stage")
"""Fields that are no option, or that a field of their own speaks of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a target may be asked for; the defaults are what ten lines around AdamW can do."""

    models: tuple[ModelName, ...] = PLAIN_MODELS
    empty_params: bool = True
    """Whether a param may have no elements."""
    scalar_params: bool = True
    """Whether a param may have no dimensions."""
    dtypes: tuple[DtypeName, ...] = ("fp32",)
    """Of the working params."""
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1)
    """ZeRO stages: 0 where every rank holds all optimizer state, 1 where it is sharded; 2 where
    gradients are, too, and 3 where params are."""
    optimizers: tuple[OptimizerName, ...] = ("adamw",)
    orders: tuple[OrderName, ...] = POSITION_FREE
    """Orders of addition; those that depend on positions only where parts tell their places."""
    world_size_max: int | None = None
    """Most ranks; None for any number."""
    follows: tuple[str, ...] = ()
    """Paths of options that it follows where a scenario sets them: of `system`, `optimizer` and
    `topology`; and `run.micro_batches`, `model.freeze`, `model.distinct_start`, `reload`: in any
    form, and on in a world and a layout that these capabilities allow, too. All others must be as
    by default, or as the numerics say."""

    def __post_init__(self) -> None:
        """Refuse what no scenario has.

        Raises:
            UsageError: A word, a path or a type that is none.
        """
        for name, choices in _CAPABLE.items():
            check_words(f"Capabilities.{name}", getattr(self, name), choices)
        check_words("Capabilities.follows", self.follows, followed())
        for name in ("empty_params", "scalar_params"):
            check_word(f"Capabilities.{name}", getattr(self, name), (True, False))
        most = self.world_size_max
        if most is not None and (type(most) is not int or most < 1):
            raise UsageError(
                "expected Capabilities.world_size_max to be an integer at least 1, or None for any "
                f"number, got {most!r}."
            )

    def problems(self, scenario: Scenario, *, numerics: Numerics) -> Iterator[Problem]:
        """What of a case is not supported, each with the path to it."""
        topology = scenario.topology
        parts = max(1, topology.tp * topology.pp)
        yield from _one_of("model.name", scenario.model.name, self.models)
        yield from _one_of("model.dtype", scenario.model.dtype, self.dtypes)
        yield from _one_of("system.stage", scenario.system.stage, self.stages)
        yield from _one_of("optimizer.name", scenario.optimizer.name, self.optimizers)
        # An order that the judge is not told needs no places to model it.
        if scenario.world.order_known:
            yield from _one_of("world.order", scenario.world.order, self.orders)
        order = scenario.world.order
        if numerics.divide == "avg" and AVERAGES.get(order, "post") is None:
            yield Problem(
                path="world.order",
                message=f"expected an order whose AVG the reference knows, got {order!r}, in which "
                "NCCL multiplies with the reciprocal after the sum.",
                suggestion="Try nccl-ring.",
            )
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
        yield from self._unfollowed(scenario, numerics)
        if scenario.optimizer.clip_norm is not None:
            yield from _not_clipped(scenario, numerics)

    def _unfollowed(self, scenario: Scenario, numerics: Numerics) -> Iterator[Problem]:
        for path, value, default in _options(scenario):
            if value == default or path in self.follows or path in _FREE:
                continue
            # What the target does anyway, a scenario may say.
            table, _, name = path.partition(".")
            if table == "system" and value == getattr(numerics, name, None):
                continue
            yield Problem(
                path=path,
                message=f"this target does not follow it, got {show(value)}.",
                suggestion="Leave it out; or, if the target does, let its capabilities declare "
                f"follows=({path!r},).",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """By which rules a target computes; None where it does as the scenario says."""

    divide: Literal["none", "pre", "post", "premul", "avg"] | None = None
    """How the sum over the ranks becomes a mean, as `system.divide` has it; or `avg`: by AVG of the
    collective, which is a division after the sum (`post`) everywhere but on NCCL, whose rings
    multiply with the rounded reciprocal before it (`premul`)."""
    divide_by: Literal["ranks", "micro-batches", "tokens"] | None = None
    """What it is divided by."""
    sync: Literal["last", "every"] | None = None
    """The accumulation rule: whether ranks are summed after the last micro-batch or every one."""
    grad_dtype: Literal["param", "fp32"] | None = None
    """Dtype in which gradients are accumulated and reduced."""
    grads_told: Literal["before-division", "after-division"] = "before-division"
    """Whether the reduced gradients that it tells are as the collective left them, or already
    divided where the division comes after the sum."""
    norm: Norm = "of-elements"
    """What a norm is rounded from. `of-elements`: the root of one fp64 sum over all ranks, rounded
    to fp32 once. `of-params`: the fp32 norm of the fp32 norms of whole gradients, as
    `torch.nn.utils.clip_grad_norm_` computes it on every rank by itself. `of-rows`: the same where
    each rank has rows of them, and one call adds the squares of their norms. A target with a norm
    of norms cannot be asked to clip by it over several cells, or in an unknown order."""
    clip: ClipForm = "fp32-division"
    """How gradients are clipped by that norm; all forms are one in mathematics and a few units in
    the last place apart. The first word says where the coefficient is computed: `fp32`, in fp32
    tensors, from the fp32 norm; `fp64`, from the fp32 norm in Python's floats, rounded once;
    `fp64-root`, likewise from a root that was never rounded to fp32. The second one says how:
    `division`, min(1, bound / (norm + 1e-6)); `reciprocal`, bound times (1 / (norm + 1e-6));
    `inverse`, 1 / ((norm + 1e-6) / bound); `quotient`, gradients divided by
    max(1, (norm + 1e-6) / bound). With `-without-eps` behind it, 1e-6 is not added.

    `torch.nn.utils.clip_grad_norm_` and FSDP: `fp32-reciprocal`; `torch.clamp(bound / (norm +
    1e-6), max=1.0)` with a Python number for the bound is that, and with a tensor for it, as in
    fairscale, `fp32-division`. Megatron-LM: `fp64-division`, or `fp64-root-division` where the
    root is taken in Python. DeepSpeed and ColossalAI: `fp32-inverse` where the norm is a tensor,
    `fp64-inverse` or `fp64-root-inverse` where it is a Python number. The LAMB kernels of apex:
    `fp32-quotient-without-eps`."""
    grads_in_params: bool = False
    """Whether the tensors that `params` gives have the reduced gradient in `.grad` after a step:
    not clipped, not unscaled."""

    def __post_init__(self) -> None:
        """Refuse what is no known rule.

        Raises:
            UsageError: A word that is none, or a form of clipping that the norm does not have.
        """
        for name, choices in _WORDS.items():
            check_word(f"Numerics.{name}", getattr(self, name), choices)
        if takes_root(self.clip) and self.norm != "of-elements":
            raise UsageError(
                f"expected norm = 'of-elements' with clip = {self.clip!r}, which takes the root of "
                f"one fp64 sum, got norm = {self.norm!r}. Try clip = "
                f"{self.clip.replace('fp64-root', 'fp64')!r}."
            )

    def replayed(self, scenario: Scenario, *, added_in: str | None = None) -> Scenario:
        """The case that the reference replays in place of the one that the target is given.

        Args:
            scenario: As the target is given it.
            added_in: The order in which the backend adds; None for the one that the case names.
        """
        system, divide = scenario.system, self.divide
        if divide == "avg":
            divide = AVERAGES.get(added_in or scenario.world.order, "post")
        declared = replace(
            system,
            divide=divide or system.divide,
            divide_by=self.divide_by or system.divide_by,
            sync=self.sync or system.sync,
            grad_dtype=self.grad_dtype or system.grad_dtype,
        )
        return replace(scenario, system=declared)


_WORDS: dict[str, tuple[object, ...]] = {
    "divide": (None, "none", "pre", "post", "premul", "avg"),
    "divide_by": (None, "ranks", "micro-batches", "tokens"),
    "sync": (None, "last", "every"),
    "grad_dtype": (None, "param", "fp32"),
    "grads_told": ("before-division", "after-division"),
    "norm": get_args(Norm),
    "clip": CLIP_FORMS,
}
"""What each of the numerics can be."""

_CAPABLE: dict[str, tuple[object, ...]] = {
    "models": get_args(ModelName),
    "dtypes": get_args(DtypeName),
    "stages": (0, 1, 2, 3),
    "optimizers": get_args(OptimizerName),
    "orders": get_args(OrderName),
}
"""What each of the capabilities can name."""


def numerics_of(target: Target) -> Numerics:
    """What a target declares of its numerics; what the scenario says, where it declares nothing.

    Raises:
        ProtocolError: It declares something else.
    """
    declared: object = getattr(target, "numerics", None)
    if declared is None:
        return Numerics()
    if not isinstance(declared, Numerics):
        raise _misdeclared(target, "numerics", "zero_sim.targets.Numerics or None", declared)
    return declared


def capabilities_of(target: Target) -> Capabilities:
    """What a target can be asked for: what it declares, or what ten lines around AdamW can do.

    None, and not just left out, stands for all that a scenario can say.

    Raises:
        ProtocolError: It declares something else.
    """
    declared: object = getattr(target, "capabilities", Capabilities())
    if declared is None:
        return EVERYTHING
    if not isinstance(declared, Capabilities):
        raise _misdeclared(
            target, "capabilities", "zero_sim.targets.Capabilities or None", declared
        )
    return declared


def check_word(what: str, value: object, choices: tuple[object, ...]) -> None:
    """Check that something is one of the words that there are for it.

    Raises:
        UsageError: It is none; names them all.
    """
    # True is 1 to Python, and no stage.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        names = ", ".join(map(repr, choices))
        near = get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        hint = f" Try {near[0]!r}." if near else ""
        raise UsageError(f"expected {what} to be one of {names}, got {value!r}.{hint}")


def check_words(what: str, values: object, choices: tuple[object, ...]) -> None:
    """Check that something is a tuple of such words.

    Raises:
        UsageError: It is none, or has another one among them.
    """
    if not isinstance(values, tuple | list):
        raise UsageError(f"expected {what} to be a tuple, got {values!r}. Try ({values!r},).")
    for value in values:
        check_word(f"every entry of {what}", value, choices)


def followed() -> tuple[str, ...]:
    """All paths that a target can declare to follow."""
    case = Scenario(schema=1, model=ModelSpec(name="mlp"))
    return tuple(path for path, _, _ in _options(case))


def _misdeclared(target: Target, name: str, wanted: str, got: object) -> ProtocolError:
    return ProtocolError(
        f"expected {name!r} of target {getattr(target, 'name', target)!r} to be {wanted}, got "
        f"{shown(got)}."
    )


def refusals(target: Target, scenario: Scenario) -> tuple[Problem, ...]:
    """All that keeps a case from being run on a target; empty where nothing does.

    A case that goes on after a checkpoint is asked about twice: as it begins, and as the case by
    itself that it then is.
    """
    found = _refusals_of_one(target, scenario)
    if scenario.reload is None:
        return found
    after = replace(after_reload(scenario), reload=None)
    later = (
        placed_in_reload(problem, scenario.reload) for problem in _refusals_of_one(target, after)
    )
    return (*found, *(problem for problem in later if problem not in found))


def check_asked(target: Target, scenario: Scenario) -> None:
    """Check that a case can be run on a target.

    Raises:
        ScenarioError: It cannot; names all that keeps it from that.
    """
    problems = refusals(target, scenario)
    if problems:
        raise ScenarioError(f"{scenario.name}: target {target.name!r} cannot be asked", problems)


def _refusals_of_one(target: Target, scenario: Scenario) -> tuple[Problem, ...]:
    declared = capabilities_of(target).problems(scenario, numerics=numerics_of(target))
    return (*declared, *_own_refusals(target, scenario))


def _own_refusals(target: Target, scenario: Scenario) -> tuple[Problem, ...]:
    own = getattr(target, "refuses", None)
    if own is None:
        return ()
    try:
        reported: object = own(scenario)
        reported = tuple(reported) if isinstance(reported, Iterable) else reported
    # Code of the target's own may raise anything.
    except Exception as error:
        raise ProtocolError(
            f"expected `refuses` of target {target.name!r} to say what keeps a case from being "
            f"run, got {type(error).__name__}: {error}."
        ) from error
    if not isinstance(reported, tuple) or not all(isinstance(each, Problem) for each in reported):
        wanted = "zero_sim.errors.Problem"
        raise ProtocolError(
            f"expected `refuses` of target {target.name!r} to give an iterable of {wanted}, empty "
            f"for nothing, got {shown(reported)}."
        )
    return reported


def _not_clipped(scenario: Scenario, numerics: Numerics) -> Iterator[Problem]:
    """Where nothing is known of a gradient that is clipped by such a norm."""
    by_norms, by_root = numerics.norm != "of-elements", takes_root(numerics.clip)
    if by_norms and scenario.topology.tp * scenario.topology.pp > 1:
        yield Problem(
            path="optimizer.clip_norm",
            message="this target takes the norm of the params that a rank has, which with tp or pp "
            "are not all.",
            suggestion="Leave it out, or tp and pp.",
        )
    if (by_norms or by_root) and not scenario.world.order_known:
        why = (
            "rounds the norm in fp32, for which no bound is proven"
            if by_norms
            else "clips by a root that it tells rounded to fp32 alone"
        )
        yield Problem(
            path="world.order_known",
            message=f"this target {why}, got "
            f"clip_norm = {show(scenario.optimizer.clip_norm)} and an order that is not known.",
            suggestion="Leave one of them out.",
        )


def _one_of(path: str, value: object, choices: tuple[object, ...]) -> Iterator[Problem]:
    if value not in choices:
        names = ", ".join(show(choice) for choice in choices)
        yield Problem(
            path=path,
            message=f"this target supports {names}, got {show(value)}.",
            suggestion=f"Try {show(choices[0])}." if choices else "",
        )


def _options(scenario: Scenario) -> Iterator[tuple[str, object, object]]:
    """Path, value and default of every option that a target has to follow."""
    tables = (
        ("system", scenario.system, SystemSpec()),
        ("optimizer", scenario.optimizer, OptimizerSpec()),
        ("topology", scenario.topology, TopologySpec()),
    )
    for table, record, default in tables:
        for field in dataclasses.fields(record):
            path = f"{table}.{field.name}"
            yield path, getattr(record, field.name), getattr(default, field.name)
    yield "run.micro_batches", scenario.run.micro_batches, 1
    yield "model.freeze", scenario.model.freeze, ModelSpec(name="mlp").freeze
    yield "model.distinct_start", scenario.model.distinct_start, False
    yield "reload", scenario.reload, None


EVERYTHING = Capabilities(
    models=get_args(ModelName),
    dtypes=get_args(DtypeName),
    stages=(0, 1, 2, 3),
    optimizers=get_args(OptimizerName),
    orders=get_args(OrderName),
    follows=followed(),
)
"""All that a scenario can say."""
