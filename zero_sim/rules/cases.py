"""Directed cases, each of which shows one rule or one capability of a system."""

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
from zero_sim.workloads import build_workload

DIVISOR = 12
"""Sizes that it divides can be divided among 1, 2, 3, 4 and 6 ranks."""


def in_ranks(count: int) -> str:
    """How many ranks there are, in words."""
    return f"{count} rank{'' if count == 1 else 's'}"


def rule_cases(base: Scenario, *, dtype: DtypeName, ranks_max: int) -> Iterator[Scenario]:
    """Cases that rules for gradients decide, the plainest first.

    Args:
        base: A case that the system can be asked for.
        dtype: Of the working params.
        ranks_max: Most ranks.
    """
    many = {"size": ranks_max}
    base = changed(base, f"{dtype}, {in_ranks(base.world.size)}", model={"dtype": dtype})
    micros = changed(base, f"{dtype}, three micro-batches", run={"micro_batches": 3})
    many_micros = f"{dtype}, {in_ranks(ranks_max)}, three micro-batches"
    yield base
    if ranks_max > base.world.size:
        yield changed(base, f"{dtype}, {in_ranks(ranks_max)}", world=many)
    yield micros
    if ranks_max > base.world.size:
        yield changed(micros, many_micros, world=many)
    yield changed(base, f"{dtype}, divide = 'pre'", system={"divide": "pre"}, world=many)
    yield changed(base, f"{dtype}, divide = 'none'", system={"divide": "none"})
    yield changed(micros, f"{dtype}, divide_by", system={"divide_by": "micro-batches"})
    yield changed(micros, f"{dtype}, sync = 'every'", system={"sync": "every"})
    if dtype != "fp32":
        yield changed(micros, f"{dtype}, grad_dtype = 'fp32'", system={"grad_dtype": "fp32"})
    # In the first step of Adam most rules come to the same params. They come last, since a case of
    # one step says by which rule it differs.
    for case in (base, changed(micros, many_micros, world=many)):
        yield changed(case, f"{case.name}, three steps", run={"steps": 3})


def unused_cases(base: Scenario) -> Iterator[Scenario]:
    """Cases with a param that no rank uses, which weight decay moves or not; the smaller first.

    The other one also has params of a second dtype, which show in which one a factor is rounded.

    Args:
        base: Any case.
    """
    decay, dtype = OptimizerSpec(weight_decay=0.1), base.model.dtype
    bare = _bare(base, unused=("p1",))
    yield changed(bare, f"{dtype}, params that nobody uses", optimizer=decay)
    name = f"{dtype}, params of two dtypes, some of which nobody uses"
    yield changed(base, name, model={"name": "unusual"}, optimizer=decay)


def _bare(base: Scenario, **said: Any) -> Scenario:
    """The case with two bare params."""
    model = ModelSpec(name="params", dtype=base.model.dtype, shapes=((3,), (2,)), **said)
    return changed(base, model=model)


def clip_cases(base: Scenario) -> Iterator[Scenario]:
    """Cases that clip by a norm, with which forms differ."""
    for seed in range(6):
        clip = OptimizerSpec(clip_norm=0.01 * (1 + seed), lr=0.1)
        yield changed(base, f"clipped, seed {seed}", optimizer=clip, run={"seed": seed})
    # What is asked of a target that declares to clip: nothing that fits the rest may fail there.
    yield changed(FOLLOWED["optimizer.clip_norm"](base), "clipped in three steps")


def second_loss_case(base: Scenario) -> Scenario:
    """A case with a second loss and context-parallel ranks, where no two named factors are equal.

    Args:
        base: Any case.
    """
    model = ModelSpec(name="multi-token", dtype=base.model.dtype, hidden=base.model.hidden)
    case = changed(base, "a second loss", model=model, run={"steps": 2, "micro_batches": 3})
    return changed(case, world={"size": 4}, topology=TopologySpec(cp=2))


def telling_cases(like: Scenario, *, optimizer: OptimizerSpec) -> Iterator[Scenario]:
    """Cases of several ranks, micro-batches and unequal rows, which tell rules apart.

    Args:
        like: A case whose dtype and stage they have.
        optimizer: The optimizer.
    """
    base = changed(
        BASE,
        model={"dtype": like.model.dtype},
        optimizer=optimizer,
        system={"stage": like.system.stage},
        run={"steps": 2},
    )
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
"""Settings of optimizers, and what they are where a case sets them."""


def settings_followed(name: OptimizerName, follows: Collection[str]) -> list[str]:
    """Which settings an optimizer has of those that a system follows.

    Args:
        name: Of the optimizer.
        follows: Paths of options.
    """
    with_all = without_unused(of_optimizer(BASE, name, [p for p in SETTINGS if p in follows]))
    default, has = OptimizerSpec(), with_all.optimizer
    names = {path: path.partition(".")[2] for path in SETTINGS}
    return [path for path, n in names.items() if getattr(has, n) != getattr(default, n)]


def of_optimizer(base: Scenario, name: OptimizerName, paths: Collection[str]) -> Scenario:
    """The case with an optimizer, three steps and some settings that it has.

    Args:
        base: Any case.
        name: Of the optimizer.
        paths: Of the settings.
    """
    said = {path.partition(".")[2]: SETTINGS[path] for path in paths}
    optimizer = OptimizerSpec(name=name, **said)
    return changed(base, f"{name} with settings", optimizer=optimizer, run={"steps": 3})


def overflow_case(base: Scenario) -> Scenario:
    """A case with a gradient that is no number, and losses that are not scaled."""
    nan = DataSpec(nan=NanSpec(step=0, rank=0))
    return changed(base, "a NaN without a loss scale", data=nan, run={"steps": 2})


Vary = Callable[[Scenario], Scenario]


def _optimizer(**said: Any) -> Vary:
    return lambda base: changed(base, optimizer=OptimizerSpec(**said), run={"steps": 3})


def _frozen(base: Scenario) -> Scenario:
    names = [name for name, _ in build_workload(base).build().named_parameters()]
    freeze = (FreezeSpec(param=names[0], start=0, stop=1),)
    return changed(base, model={"freeze": freeze}, run={"steps": 2})


def _with_one_reader(base: Scenario) -> Scenario:
    """The case with a param that one rank alone reads, or of a single rank one micro-batch."""
    alone = base.world.size == 1
    one = OneRankSpec(param="p1", rank=0, micro_batch=0 if alone else None)
    case = _bare(base, one_rank=(one,))
    return changed(case, run={"micro_batches": 2}) if alone else case


def _blocks(**said: Any) -> Vary:
    return lambda base: changed(base, world={"size": 4}, system={"redundancy": 2, **said})


def _cells(**said: Any) -> Vary:
    return lambda base: changed(base, world={"size": 4}, topology=TopologySpec(**said))


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
"""By option: a case of which something that is compared depends on it."""


def _overflow(base: Scenario) -> Scenario:
    case = FOLLOWED["optimizer.loss_scale"](base)
    # In the second step, so that there is something to keep; and two steps on, to see what is kept.
    nan = DataSpec(nan=NanSpec(step=1, rank=0, value="inf"))
    return changed(case, "a step that overflows", data=nan, run={"steps": 4})


SECOND: Mapping[str, Vary] = {"optimizer.loss_scale": _overflow}
"""By option: a second case, of what the first one does not reach."""
