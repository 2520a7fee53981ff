"""Directed cases, each for one rule or one capability."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from zero_sim.run.small_cases import BASE, changed
from zero_sim.scenario.fitting import without_unused
from zero_sim.scenario.spec import (
    DataSpec,
    DtypeName,
    FreezeSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OneRankSpec,
    OptimizerName,
    OptimizerSpec,
    ParamGroupSpec,
    ReloadSpec,
    Scenario,
    SkipSpec,
    TopologySpec,
)
from zero_sim.targets import Target, capabilities_of
from zero_sim.targets.models import own_models_of
from zero_sim.workloads import build_workload

DIVISOR = 12
"""Multiples of this number can be sharded over 1, 2, 3, 4 and 6 ranks."""


_PLAIN_MODELS: Mapping[str, Any] = {
    "": {},
    f", sizes that {DIVISOR} divides": {"hidden": DIVISOR},
    f", params that {DIVISOR} divides": ModelSpec(name="params", shapes=((12,), (24, 2))),
}
"""Models for the plain case, by name suffix. The next model is tried if sizes are refused."""


def plain_models(target: Target) -> Mapping[str, Any]:
    """Return models for the plain case: the target's own if it declares no shipped model."""
    declared = capabilities_of(target).models
    own = [name for name in declared if name in own_models_of(target)]
    if own and set(own) == set(declared):
        return {f", {name}": ModelSpec(name=name) for name in own}
    return _PLAIN_MODELS


def plain_optimizer(target: Target) -> Mapping[str, str]:
    """Return optimizer changes for the plain case: the target's own rule if it has no other."""
    is_own = set(capabilities_of(target).optimizers) == {"own"}
    return {"name": "own"} if is_own else {}


def in_ranks(count: int) -> str:
    """Return a number of ranks in words."""
    return f"{count} rank{'' if count == 1 else 's'}"


def rule_cases(base: Scenario, *, dtype: DtypeName, ranks_max: int) -> Iterator[Scenario]:
    """Yield cases that decide gradient rules, simplest first."""
    many = {"size": ranks_max}
    base = changed(base, f"{dtype}, {in_ranks(base.world.size)}", model={"dtype": dtype})
    # Three micro-batches, because division by a power of two does not round.
    micros = changed(base, f"{dtype}, three micro-batches", run={"micro_batches": 3})
    many_micros = f"{dtype}, {in_ranks(ranks_max)}, three micro-batches"
    yield base
    # Only if there are more ranks than in the base case.
    if ranks_max > base.world.size:
        yield changed(base, f"{dtype}, {in_ranks(ranks_max)}", world=many)
    yield micros
    if ranks_max > base.world.size:
        yield changed(micros, many_micros, world=many)
    yield changed(base, f"{dtype}, divide = 'pre'", system={"divide": "pre"}, world=many)
    yield changed(base, f"{dtype}, divide = 'none'", system={"divide": "none"})
    yield changed(micros, f"{dtype}, divide_by", system={"divide_by": "micro-batches"})
    yield changed(micros, f"{dtype}, sync = 'every'", system={"sync": "every"})
    # In fp32, all gradient dtypes are the same.
    if dtype != "fp32":
        yield changed(micros, f"{dtype}, grad_dtype = 'fp32'", system={"grad_dtype": "fp32"})
    # In Adam's first step, most rules lead to the same params. These cases come last, because a
    # one-step case names the rule by which it differs.
    for case in (base, changed(micros, many_micros, world=many)):
        yield changed(case, f"{case.name}, three steps", run={"steps": 3})


def unused_cases(base: Scenario) -> Iterator[Scenario]:
    """Yield cases with weight decay and an unused param, smaller case first.

    The second case also has params in another dtype, which shows the dtype in which a factor is
    rounded.
    """
    # Weight decay moves a param with a zero gradient, but no param without a gradient.
    decay, dtype = OptimizerSpec(weight_decay=0.1), base.model.dtype
    bare = _bare(base, unused=("p1",))
    yield changed(bare, f"{dtype}, params that nobody uses", optimizer=decay)
    name = f"{dtype}, params of two dtypes, some of which nobody uses"
    yield changed(base, name, model={"name": "unusual"}, optimizer=decay)


def _bare(base: Scenario, **settings: Any) -> Scenario:
    """Return the case with two bare params."""
    model = ModelSpec(name="params", dtype=base.model.dtype, shapes=((3,), (2,)), **settings)
    return changed(base, model=model)


def clip_cases(base: Scenario) -> Iterator[Scenario]:
    """Yield cases that clip by norm. Clip forms differ in some of these cases."""
    # Several gradients, because forms only differ for some norms.
    for seed in range(6):
        clip = OptimizerSpec(clip_norm=0.01 * (1 + seed), lr=0.1)
        yield changed(base, f"clipped, seed {seed}", optimizer=clip, run={"seed": seed})
    # Targets that declare clipping get this case, so rules that fit the rest must pass it too.
    yield changed(FOLLOWED["optimizer.clip_norm"](base), "clipped in three steps")


def second_loss_case(base: Scenario) -> Scenario:
    """Return a case with a second loss, in which all named factors are different."""
    model = ModelSpec(name="multi-token", dtype=base.model.dtype, hidden=base.model.hidden)
    # With three micro-batches, four ranks and cp = 2, all named factors differ.
    case = changed(base, "a second loss", model=model, run={"steps": 2, "micro_batches": 3})
    return changed(case, world={"size": 4}, topology=TopologySpec(cp=2))


def revealing_cases(like: Scenario, *, optimizer: OptimizerSpec) -> Iterator[Scenario]:
    """Yield cases that distinguish rules by several ranks, micro-batches and unequal rows."""
    base = changed(
        BASE,
        model={"dtype": like.model.dtype},
        optimizer=optimizer,
        system={"stage": like.system.stage},
        run={"steps": 2},
    )
    # Odd and even counts, because divisions by powers of two do not round.
    for ranks, micro_batches in ((2, 1), (3, 1), (2, 2), (3, 2), (3, 3), (4, 3)):
        name = f"{in_ranks(ranks)}, {micro_batches} micro-batches"
        run = {"micro_batches": micro_batches, "seed": ranks * micro_batches}
        case = changed(base, name, world={"size": ranks}, run=run)
        yield case
        yield changed(case, f"{name}, unequal rows", data={"uneven_rows": True})


SETTINGS: Mapping[str, Any] = {
    "optimizer.betas": (0.5, 0.6),
    "optimizer.eps": 0.1,
    "optimizer.weight_decay": 0.1,
    "optimizer.momentum": 0.9,
    "optimizer.nesterov": True,
    "optimizer.amsgrad": True,
}
"""Optimizer settings, with the values that cases use."""


def settings_followed(name: OptimizerName, follows: Collection[str]) -> list[str]:
    """Return the optimizer's settings whose paths are in `follows`."""
    # `without_unused` resets all other settings to their defaults.
    with_all = without_unused(of_optimizer(BASE, name, [p for p in SETTINGS if p in follows]))
    default, has = OptimizerSpec(), with_all.optimizer
    names = {path: path.partition(".")[2] for path in SETTINGS}
    return [path for path, n in names.items() if getattr(has, n) != getattr(default, n)]


def of_optimizer(base: Scenario, name: OptimizerName, paths: Collection[str]) -> Scenario:
    """Return the case with an optimizer, three steps and the settings at `paths`."""
    settings = {path.partition(".")[2]: SETTINGS[path] for path in paths}
    optimizer = OptimizerSpec(name=name, **settings)
    return changed(base, f"{name} with settings", optimizer=optimizer, run={"steps": 3})


def overflow_case(base: Scenario) -> Scenario:
    """Return a case with a NaN gradient and without loss scaling."""
    nan = DataSpec(nan=NanSpec(step=0, rank=0))
    return changed(base, "a NaN without a loss scale", data=nan, run={"steps": 2})


Vary = Callable[[Scenario], Scenario]


def _optimizer(**settings: Any) -> Vary:
    return lambda base: changed(base, optimizer=OptimizerSpec(**settings), run={"steps": 3})


def _frozen(base: Scenario) -> Scenario:
    # Any param will do. The first exists in every model.
    names = [name for name, _ in build_workload(base).build().named_parameters()]
    freeze = (FreezeSpec(param=names[0], start=0, stop=1),)
    return changed(base, model={"freeze": freeze}, run={"steps": 2})


def _with_one_reader(base: Scenario) -> Scenario:
    """Return the case with a param read by a single rank, or by its first micro-batch."""
    alone = base.world.size == 1
    one = OneRankSpec(param="p1", rank=0, micro_batch=0 if alone else None)
    case = _bare(base, one_rank=(one,))
    return changed(case, run={"micro_batches": 2}) if alone else case


def _blocks(**settings: Any) -> Vary:
    # Two shard groups of two ranks.
    return lambda base: changed(base, world={"size": 4}, system={"redundancy": 2, **settings})


def _cells(**settings: Any) -> Vary:
    # Four ranks, two along the axis.
    return lambda base: changed(base, world={"size": 4}, topology=TopologySpec(**settings))


# Values far from the defaults, so that ignoring an option changes bits.
FOLLOWED: Mapping[str, Vary] = {
    "optimizer.betas": _optimizer(betas=(0.5, 0.6)),
    "optimizer.eps": _optimizer(eps=0.1),
    "optimizer.weight_decay": _optimizer(weight_decay=0.1),
    "optimizer.momentum": _optimizer(name="sgd", momentum=0.9),
    "optimizer.nesterov": _optimizer(name="sgd", momentum=0.9, nesterov=True),
    "optimizer.amsgrad": _optimizer(amsgrad=True),
    "optimizer.groups": _optimizer(groups=(ParamGroupSpec(match="bias", lr=0.03),)),
    "optimizer.warmup_steps": _optimizer(warmup_steps=3),
    "optimizer.clip_norm": _optimizer(clip_norm=0.01),
    "optimizer.clip_value": _optimizer(clip_value=1e-3),
    "optimizer.loss_scale": _optimizer(loss_scale=LossScaleSpec()),
    "run.micro_batches": lambda base: changed(base, run={"micro_batches": 2}),
    "model.tied": lambda base: _bare(base, tied=("p0",)),
    "model.unused": lambda base: _bare(base, unused=("p1",)),
    "model.skip": lambda base: _bare(
        changed(base, run={"steps": 2}), skip=(SkipSpec(param="p1", start=1, stop=2),)
    ),
    "model.one_rank": _with_one_reader,
    "model.freeze": _frozen,
    "model.distinct_start": lambda base: changed(base, model={"distinct_start": True}),
    "system.redundancy": _blocks(),
    "topology.tp": _cells(tp=2),
    "topology.pp": _cells(pp=2),
    "topology.cp": _cells(cp=2),
    "reload": lambda base: changed(base, run={"steps": 2}, reload=ReloadSpec(step=1)),
    "reload.async_steps": lambda base: changed(
        base, run={"steps": 3}, reload=ReloadSpec(step=1, async_steps=1)
    ),
}
"""Cases by option, in which the option affects a compared value."""


def _overflow(base: Scenario) -> Scenario:
    case = FOLLOWED["optimizer.loss_scale"](base)
    # In the second step, so that there is state to keep. Two further steps show this state.
    nan = DataSpec(nan=NanSpec(step=1, rank=0, value="inf"))
    return changed(case, "a step that overflows", data=nan, run={"steps": 4})


SECOND: Mapping[str, Vary] = {"optimizer.loss_scale": _overflow}
"""Second cases by option, for behaviour beyond the first case."""
