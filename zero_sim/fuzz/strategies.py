"""Drawn cases: the public strategies, composed from the other modules.

Every drawn case is valid according to `check_scenario`, and its target supports it. Values are
drawn in the order in which they should shrink: ranks, then params, then sizes, then features, each
to its default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from hypothesis import strategies as st

from zero_sim.fuzz.choices import Choices, Drawable
from zero_sim.fuzz.effort import (
    EFFORT_MAX,
    EFFORT_USUAL,
    chunk_within,
    effort_of,
    steps_within,
)
from zero_sim.fuzz.models import (
    BARE,
    MODELS,
    OWN_TIMES,
    drawn_data,
    drawn_model,
    drawn_overflow,
    fit_blocks,
    nested_model,
    recomputed_model,
    with_buffer,
    with_skipped,
)
from zero_sim.fuzz.optimizers import drawn_optimizer
from zero_sim.fuzz.ordered import within_order
from zero_sim.fuzz.pairs import needs_pair, pairable, with_second_layout
from zero_sim.fuzz.plans import param_specs
from zero_sim.fuzz.swarm import Swarm
from zero_sim.fuzz.systems import (
    drawn_reload,
    drawn_system,
    drawn_topology,
    drawn_world,
    shares,
    with_drawn_options,
)
from zero_sim.scenario.bare_params import fitted_one_rank
from zero_sim.scenario.conditions import why_order_matters
from zero_sim.scenario.derived import limits_of_joins, world_size_at
from zero_sim.scenario.fitting import without_unused
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.names import with_known_names
from zero_sim.scenario.spec import (
    AnyModelName,
    ModelSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
)
from zero_sim.targets import (
    EVERYTHING,
    Capabilities,
    Target,
    capabilities_of,
    numerics_of,
    refusals,
)
from zero_sim.targets.models import own_models_of
from zero_sim.workloads import params_of

OWN = "zero_sim"
RANKS_MAX = 12
STEPS_MAX = 4
# From 11 ranks on, shard indices have two digits.
_MANY_RANKS = 11
# Maximum ranks of a case, repeated by frequency. Mostly few ranks and steps, because these show
# nearly all faults in a fraction of the time. One case in 18 may have shard indices of two digits.
_RANKS_MOSTLY = [2] * 5 + [3] * 3 + [4] * 6 + [8] * 3 + [RANKS_MAX]
# Numbers of ranks above this are twice as likely.
_FEW_RANKS = 4
# Effort limits, repeated by frequency. Mostly the small limit, because rare combinations of
# features occur sooner in many cheap cases than in a few expensive cases.
_EFFORTS = [EFFORT_USUAL] * 7 + [EFFORT_MAX]
# A model may be split in two up to this number of ranks, even if the case should have fewer.
_RANKS_SPLIT = 4
# Maximum ranks after a reload, if the case is slow without the reload.
_RANKS_AFTER_SLOW = 3
# Numbers of ranks that allow several replicas, each sharded over several ranks, repeated by
# frequency. Other numbers rarely give collectives both between and within replicas.
_REPLICABLE_WORLD_SIZES = (4, 4, 4, 4, 4, 6, 8, 8)
_STEPS_MOSTLY = (2, 2, 2, STEPS_MAX)
# Redraw a case if its estimated effort exceeds its limit by this factor.
_REDRAW_FACTOR = 3
# Numbers of steps in cases that skip a step. Consequences may show after four steps only.
_STEPS_WITH_OVERFLOW = (2, 3, 4)
_EVALUATIONS: tuple[Literal["between-steps", "within-step"], ...] = ("between-steps", "within-step")
# Numbers of steps in cases with a frozen param. Training it again before a reload takes at least
# three.
_STEPS_WITH_FREEZE = (2, STEPS_MAX)


def scenarios(
    target: Target | None = None,
    *,
    ranks_max: int = RANKS_MAX,
    steps_max: int = STEPS_MAX,
    models_from: Sequence[AnyModelName] = MODELS,
    reload: bool = True,
) -> st.SearchStrategy[Scenario]:
    """Return `drawn_cases` as a Hypothesis strategy.

    Args:
        target: See `drawn_cases`, also for the other arguments.
        ranks_max: Maximum ranks.
        steps_max: Maximum optimizer steps.
        models_from: Models to draw from.
        reload: True to allow a reload in another world.
    """
    return drawn_cases(
        target, ranks_max=ranks_max, steps_max=steps_max, models_from=models_from, reload=reload
    ).strategy()


def drawn_cases(
    target: Target | None = None,
    *,
    ranks_max: int = RANKS_MAX,
    steps_max: int = STEPS_MAX,
    models_from: Sequence[AnyModelName] = MODELS,
    reload: bool = True,
    with_refused: bool = False,
    order: str | None = None,
) -> Drawable[Scenario]:
    """Return cases with any combination of features.

    A correct system passes these cases, or its verdict is inconclusive.

    Args:
        target: Target of the cases. Only settings that it supports are drawn, and cases that its
            `refuses` method refuses are redrawn. None for our own system, which supports
            everything.
        ranks_max: Maximum ranks.
        steps_max: Maximum optimizer steps, at least 1.
        models_from: Models to draw from, simplest first. Models that the target does not support
            are left out. By default all models, including the target's own.
        reload: True to allow a checkpoint that another world loads.
        with_refused: True to include cases that the target refuses.
        order: Summation order of all cases, or `unknown`; None for all declared orders.

    Raises:
        UsageError: The target does not declare this order.
    """
    able = within_order(EVERYTHING if target is None else capabilities_of(target), order)
    if target is not None and models_from is MODELS:
        models_from = [*MODELS, *own_models_of(target) * OWN_TIMES]
    if target is not None and target.name != OWN:
        # Only our system provides the sums that its tensor-parallel layers need.
        models_from = [name for name in models_from if name != "tp-block"]
    has_pairs = target is not None and needs_pair(target)
    if has_pairs:
        # A reload already changes the layout, so it excludes a second layout.
        able, reload = pairable(able), False
    drawn = partial(
        _drawn_case,
        able=able,
        ranks_max=ranks_max,
        steps_max=steps_max,
        models_from=models_from,
        reload=reload,
        skips=None if target is None else partial(_skips, target),
    )
    if target is None:
        return Drawable(drawn)

    def aimed(choices: Choices) -> Scenario:
        case = drawn(choices)
        case = replace(case, system=replace(case.system, target=target.name))
        if case.model.dtype != "fp32" and numerics_of(target, case).masters == "param":
            # A step of 1e-3 changes few bf16 weights, because it is rounded away.
            rate = choices.among([0.1, 1.0])
            case = replace(case, optimizer=replace(case.optimizer, lr=rate))
        case = with_drawn_options(choices, case, target=target)
        if not has_pairs:
            return case
        sizes = [spec.numel for spec in param_specs(case.model)]
        return with_second_layout(choices, case, able=able, sizes=sizes)

    fitting = Drawable(aimed)
    return fitting if with_refused else fitting.filter(lambda case: not refusals(target, case))


def _drawn_case(
    choices: Choices,
    *,
    able: Capabilities,
    ranks_max: int,
    steps_max: int,
    models_from: Sequence[AnyModelName],
    reload: bool,
    skips: Callable[[Scenario], bool] | None,
) -> Scenario:
    able_models = set(models_from).intersection(able.models)
    if not all((able_models, able.dtypes, able.optimizers, able.orders, able.stages)):
        choices.refuse()
    swarm = Swarm(choices, able=able, has_theme=True)
    ranks_max = min(max(choices.among(_RANKS_MOSTLY), *swarm.theme.ranks, 1), ranks_max)
    # First the size of a dp-cp group, so that a case with fewer groups keeps its layout.
    ranks_max = min(ranks_max, able.world_size_max or ranks_max)
    ranks = _ranks(choices, ranks_max, preferred=swarm.theme.ranks)
    topology = drawn_topology(choices, ranks=ranks, parts_max=ranks_max // ranks, swarm=swarm)
    align_elems = choices.integer(2, 8) if swarm.on("aligned") else 1
    names = _names_for(ranks, models_from, swarm=swarm)
    model = drawn_model(choices, ranks=ranks, align_elems=align_elems, names=names, swarm=swarm)
    has_room = 2 * ranks <= max(ranks_max, _RANKS_SPLIT)
    model, topology = fit_blocks(model, topology, may_split=has_room, swarm=swarm)
    ep = choices.among(shares(model, ranks, swarm=swarm))
    topology = replace(topology, ep=ep)
    sizes = [spec.numel for spec in param_specs(model, ep=ep)]
    system = drawn_system(
        choices, ranks=ranks // ep, sizes=sizes, align_elems=align_elems, swarm=swarm
    )
    scenario = _one_step(choices, model, topology, system, ranks=ranks, swarm=swarm)
    # Rare features seldom meet a reload by chance, so draw a reload more often for them.
    seldom = bool(model.freeze) or model.name == "fp8" or ranks >= _MANY_RANKS
    goes_on = swarm.on("reload", fits=reload and steps_max > 1, often=seldom)
    effort_max = EFFORT_MAX if model.freeze else choices.among(_EFFORTS)
    steps_most = min(
        choices.among(_STEPS_WITH_FREEZE if model.freeze else _STEPS_MOSTLY), steps_max
    )
    begun = replace(scenario, reload=ReloadSpec(step=1) if goes_on else None)
    paced = _paced(choices, begun, sizes=sizes, steps_max=steps_most, effort_max=effort_max)
    scenario = fitted_to_model(replace(paced, reload=None), swarm=swarm)
    may_skip = scenario.optimizer.loss_scale or (skips is not None and skips(scenario))
    if may_skip and swarm.on("overflow", fits=steps_max > 1):
        scenario = _overflowing(choices, scenario, sizes=sizes, steps_max=steps_max)
    if goes_on and scenario.run.steps > 1:
        is_slow = 2 * effort_of(scenario, sizes=sizes) > effort_max
        ranks_after_max = min(ranks_max, _RANKS_AFTER_SLOW) if is_slow else ranks_max
        after = drawn_reload(
            choices, before=scenario, sizes=sizes, ranks_max=ranks_after_max, swarm=swarm
        )
        scenario = _within_both(replace(scenario, reload=after), steps_max=steps_max)
    scenario = _joined(choices, fitted_one_rank(scenario), swarm=swarm)
    # Effort is not limited for many ranks, because these cases are rare.
    if ranks < _MANY_RANKS and effort_of(scenario, sizes=sizes) > _REDRAW_FACTOR * effort_max:
        choices.refuse()
    scenario = _hiding(scenario, swarm=swarm)
    if swarm.on("distinct start", fits=ranks > 1):
        scenario = replace(scenario, model=replace(scenario.model, distinct_start=True))
    scenario = replace(scenario, run=replace(scenario.run, seed=choices.integer(0, 10**6)))
    scenario = _evaluating(choices, scenario, swarm=swarm)
    scenario = _in_epochs(choices, scenario, swarm=swarm)
    model = with_buffer(choices, scenario, swarm=swarm)
    model = with_skipped(choices, model, swarm=swarm)
    scenario = replace(scenario, model=nested_model(choices, model, swarm=swarm))
    model = recomputed_model(choices, scenario, swarm=swarm)
    scenario = replace(scenario, model=model)
    for feature in sorted(swarm.chosen):
        choices.note(feature)
    names = [name for name, _ in params_of(scenario.model)]
    return without_unused(with_known_names(scenario, names))


def _one_step(
    choices: Choices,
    model: ModelSpec,
    topology: TopologySpec,
    system: SystemSpec,
    *,
    ranks: int,
    swarm: Swarm,
) -> Scenario:
    """Return a case with one step, and draw its data, world and optimizer."""
    # On a single rank, only accumulation gives a divisor other than 1.
    accumulates = swarm.on("accumulation", often=ranks == 1)
    data = drawn_data(choices, model=model, swarm=swarm)
    world = drawn_world(choices, size=ranks * topology.tp * topology.pp, swarm=swarm)
    if system.sum_by == "first-rank":
        # The first rank adds in rank order, so the case must have this order.
        world = replace(world, order="linear")
    return Scenario(
        schema=1,
        name="drawn",
        model=model,
        data=data,
        world=world,
        topology=topology,
        system=system,
        optimizer=drawn_optimizer(choices, model=model, swarm=swarm),
        run=RunSpec(steps=1, micro_batches=choices.integer(1, 3) if accumulates else 1),
    )


def _paced(
    choices: Choices,
    scenario: Scenario,
    *,
    sizes: Sequence[int],
    steps_max: int,
    effort_max: int,
) -> Scenario:
    """Return the case with a chunk size and number of steps that fit into the effort limit."""
    # Chunks before steps, because each chunk is a call that adds to a step's effort.
    chunk = chunk_within(scenario, sizes=sizes)
    scenario = replace(scenario, system=replace(scenario.system, gather_chunk_elems=chunk))
    most = steps_within(scenario, sizes=sizes, most=steps_max, effort_max=effort_max)
    scenario = replace(scenario, run=replace(scenario.run, steps=choices.integer(1, most)))
    if effort_of(scenario, sizes=sizes) > effort_max:
        # Two micro-batches suffice to show faults of accumulation.
        run = replace(scenario.run, micro_batches=min(scenario.run.micro_batches, 2))
        scenario = replace(scenario, run=run)
    if effort_of(scenario, sizes=sizes) > effort_max:
        # Small cases show races too, and detection takes time for each param.
        scenario = replace(scenario, world=replace(scenario.world, races=False))
    return scenario


def _ranks(choices: Choices, most: int, *, preferred: tuple[int, ...]) -> int:
    """Draw the size of a dp-cp group, at most `most`. Preferred sizes win if any fit."""
    if fitting := [ranks for ranks in preferred if ranks <= most]:
        return choices.among(fitting)
    if most > _MANY_RANKS:
        return choices.integer(_MANY_RANKS, most)
    replicable = (ranks for ranks in _REPLICABLE_WORLD_SIZES if ranks <= most)
    return choices.among([*range(1, most + 1), *range(_FEW_RANKS + 1, most + 1), *replicable])


def _skips(target: Target, scenario: Scenario) -> bool:
    """Return True if a target without a loss scale skips or refuses steps that are not finite."""
    aimed = replace(scenario, system=replace(scenario.system, target=target.name))
    return numerics_of(target, aimed).nonfinite != "stepped"


def _hiding(scenario: Scenario, *, swarm: Swarm) -> Scenario:
    """Return the case, maybe with an unknown order."""
    # Few cases, because a check against bounds is weaker than a check for equal bits. Never
    # `tp-block`, because the reference trains all its parts in a known order.
    may_hide = scenario.world.order != "linear" and scenario.model.name != "tp-block"
    may_hide &= scenario.world.order_known and not why_order_matters(scenario)
    # An engine that declares nothing may report no masters, and then bounds prove nothing.
    may_hide &= swarm.able != Capabilities()
    if swarm.on("unknown order", fits=may_hide):
        scenario = replace(scenario, world=replace(scenario.world, order_known=False))
    return scenario


def _joined(choices: Choices, scenario: Scenario, *, swarm: Swarm) -> Scenario:
    """Return the case, maybe with ranks that join some micro-batches without data."""
    run, (fewest, least) = scenario.run, limits_of_joins(scenario)
    system = scenario.system
    # A division before every sum comes before the number of micro-batches with data is known.
    is_late = system.divide in ("pre", "premul") and system.sync == "every"
    fits = fewest > 1 and run.micro_batches > least
    fits &= not (is_late and system.divide_by == "micro-batches")
    # `tp-block` counts its sums over ranks, so all ranks need the same number of micro-batches.
    fits &= scenario.model.name != "tp-block"
    if not swarm.on("ranks join", fits=fits, often=True):
        return scenario
    count = choices.integer(1, min(fewest, 3) - 1)
    others = [choices.integer(least, run.micro_batches - 1) for _ in range(count)]
    # A rank must have data for every micro-batch.
    own = (*others, run.micro_batches)
    return replace(scenario, run=replace(run, own_micro_batches=own))


def _in_epochs(choices: Choices, scenario: Scenario, *, swarm: Swarm) -> Scenario:
    """Return the case, maybe with a step that has short micro-batches on all ranks."""
    steps = scenario.run.steps
    # Draw it even without the feature, so that later draws keep their positions.
    epoch_steps = choices.integer(2, max(2, steps))
    # A short step has half the rows, so there must be several rows. `tp-block` counts activation
    # bytes for a single micro-batch size.
    fits = scenario.model.name != "tp-block" and scenario.data.rows > 1 and steps > 1
    if not swarm.on("short step", fits=fits):
        return scenario
    return replace(scenario, data=replace(scenario.data, epoch_steps=epoch_steps))


def _evaluating(choices: Choices, scenario: Scenario, *, swarm: Swarm) -> Scenario:
    """Return the case, maybe with a forward under `no_grad` in each step."""
    when = choices.among(_EVALUATIONS)
    # Ranks without data cannot run this forward, and `tp-block` would get additional sums.
    fits = not scenario.run.own_micro_batches and scenario.model.name != "tp-block"
    if not swarm.on("evaluation", fits=fits):
        return scenario
    return replace(scenario, run=replace(scenario.run, evaluate=when))


def fitted_to_model(scenario: Scenario, *, swarm: Swarm) -> Scenario:
    """Return the case with the settings of `system` that depend on optimizer and model.

    Args:
        scenario: The case, complete otherwise.
        swarm: Features of the case.
    """
    system, optimizer, world = scenario.system, scenario.optimizer, scenario.world
    if optimizer.name in WHOLE_PARAM_OPTIMIZERS:
        # These optimizers gather whole params by collectives, which excludes CPU state and pieces.
        system = replace(system, offload_state=False, step_buffer_elems=None)
    if swarm.on("buffers by group", fits=bool(optimizer.groups)):
        system = replace(system, buffers_by="param-group")
    has_blocks = scenario.model.name == "tp-block"
    # Backward runs a block again, but by then stage 3 has resharded its params.
    if swarm.on("checkpoints", fits=has_blocks and system.stage != 3, often=True):
        system = replace(system, checkpoints="whole" if swarm.on("whole checkpoints") else "split")
        if swarm.on("offloaded checkpoints", often=True):
            system = replace(system, offload_checkpoints=True)
    if has_blocks and scenario.topology.tp > 1:
        world = replace(world, order="linear")
    return replace(scenario, system=system, world=world)


def _names_for(
    ranks: int, names: Sequence[AnyModelName], *, swarm: Swarm
) -> Sequence[AnyModelName]:
    """Return the theme's models, or bare models for many ranks."""
    # Only bare models have enough elements to fill the shards of many ranks.
    bare = [name for name in names if name in BARE]
    if ranks >= _MANY_RANKS and bare:
        return bare
    able = swarm.able.models
    return [name for name in names if name in swarm.theme.models and name in able] or names


def _overflowing(
    choices: Choices, scenario: Scenario, *, sizes: Sequence[int], steps_max: int
) -> Scenario:
    """Return the case with a skipped step and at least one other step."""
    # Without another step, no update is compared. A skipped step's consequences, such as a wrong
    # count of good steps, may show only two steps later.
    most = steps_within(scenario, sizes=sizes, most=steps_max)
    steps = choices.among([each for each in _STEPS_WITH_OVERFLOW if each <= most])
    scenario = replace(scenario, run=replace(scenario.run, steps=steps))
    nan = drawn_overflow(choices, scenario=scenario, elems=sum(sizes))
    return replace(scenario, data=replace(scenario.data, nan=nan))


def _within_both(scenario: Scenario, *, steps_max: int) -> Scenario:
    """Return the case with its NaN on a rank that exists in the NaN's step.

    If the skipped step is the only step before or after the reload, no update would be compared
    there. Then a step is added, or the NaN removed.
    """
    nan, after, steps = scenario.data.nan, scenario.reload, scenario.run.steps
    if nan is None or after is None:
        return scenario
    is_before = nan.step < after.step
    if nan.rank >= world_size_at(scenario, step=nan.step):
        nan = replace(nan, rank=0)
    if (after.step if is_before else steps - after.step) == 1:
        if steps < steps_max:
            # Add the step on the same side of the reload as the skipped step.
            steps, after = steps + 1, replace(after, step=after.step + is_before)
        else:
            nan = None
    return replace(
        scenario,
        data=replace(scenario.data, nan=nan),
        run=replace(scenario.run, steps=steps),
        reload=after,
    )
