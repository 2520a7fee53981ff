"""Whole cases, drawn: the public strategies, of which the others of this room are the parts.

Every value that is drawn is valid: `check_scenario` has nothing to say about it. For a target it is
one that the target can be asked for. What is drawn first is what shrinks first: ranks, then params,
then their sizes, then features, each to its default.
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
_MANY_RANKS = 11
_RANKS_MOSTLY = [2] * 5 + [3] * 3 + [4] * 6 + [8] * 3 + [RANKS_MAX]
"""Most ranks of a case, as often as it says; one in so many has shards of two digits."""
_FEW_RANKS = 4
_EFFORTS = [EFFORT_USUAL] * 7 + [EFFORT_MAX]
"""What a case may cost, about: rare features meet in many cheap cases sooner than in a few dear."""
_RANKS_SPLIT = 4
"""Ranks with which a model that can be split over two mostly is: two halves of two."""
_RANKS_AFTER_SLOW = 3
"""Most ranks after the checkpoint of a case that takes long without it."""
_SQUARISH = (4, 4, 4, 4, 4, 6, 8, 8)
"""Numbers of ranks that can hold several copies, each of them on several ranks: the others seldom
meet what goes between copies and what goes within one at once."""
_STEPS_MOSTLY = (2, 2, 2, STEPS_MAX)
_DEAR = 3
"""A case that takes so many times as much as it should, whatever its steps, is drawn anew."""
_STEPS_WITH_OVERFLOW = (2, 3, 4)
"""Of which what a skipped step leaves behind may need four."""
_EVALUATIONS: tuple[Literal["between-steps", "within-step"], ...] = ("between-steps", "within-step")
_STEPS_WITH_FREEZE = (2, STEPS_MAX)
"""A param that is trained again, and a checkpoint after that, take three steps and more."""


def scenarios(
    target: Target | None = None,
    *,
    ranks_max: int = RANKS_MAX,
    steps_max: int = STEPS_MAX,
    models_from: Sequence[AnyModelName] = MODELS,
    reload: bool = True,
) -> st.SearchStrategy[Scenario]:
    """A strategy of the cases that `drawn_cases` draws, for a test of Hypothesis.

    Args:
        target: As for `drawn_cases`, as are all others.
        ranks_max: Most ranks.
        steps_max: Most optimizer steps.
        models_from: Models to draw from.
        reload: Whether cases may go on in another world.
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
    """Cases that must pass, or be inconclusive: any features with any others.

    Args:
        target: What they are for: only what it can be asked for is drawn, and what its own
            `refuses` still refuses is drawn anew. Our own system, which can be asked for
            everything, where left out.
        ranks_max: Most ranks.
        steps_max: Most optimizer steps; at least 1.
        models_from: Models to draw from, the simplest first; of them those that the target can
            train. By default all, and those of the target's own.
        reload: Whether cases may save a checkpoint and go on in another world.
        with_refused: Whether cases that the target refuses are drawn, too.
        order: The one order of addition of all cases, or `unknown`; those that the target can be
            asked for, if omitted.

    Raises:
        UsageError: The target cannot be asked for that order.
    """
    able = within_order(EVERYTHING if target is None else capabilities_of(target), order)
    if target is not None and models_from is MODELS:
        models_from = [*MODELS, *own_models_of(target) * OWN_TIMES]
    if target is not None and target.name != OWN:
        # Its ranks would have to sum what split layers give.
        models_from = [name for name in models_from if name != "tp-block"]
    has_pairs = target is not None and needs_pair(target)
    if has_pairs:
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
            # A step of 1e-3 is rounded away in most weights of bf16.
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
    # What goes wrong among many ranks, or in many steps, mostly does in few, where a case costs a
    # fraction: broken systems are found sooner for it.
    swarm = Swarm(choices, able=able, has_theme=True)
    ranks_max = min(max(choices.among(_RANKS_MOSTLY), *swarm.theme.ranks, 1), ranks_max)
    # Of one dp-cp group, so that a case that shrinks to fewer of these keeps its layout.
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
    # Few cases have a param that is frozen, scales, or as many ranks; and that in a checkpoint.
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
    # As few have as many ranks, these may cost what they cost.
    if ranks < _MANY_RANKS and effort_of(scenario, sizes=sizes) > _DEAR * effort_max:
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
    """A case of one step, with data, a world and an optimizer for what is drawn so far."""
    # What a mean of one rank is divided by are its own micro-batches.
    accumulates = swarm.on("accumulation", often=ranks == 1)
    data = drawn_data(choices, model=model, swarm=swarm)
    world = drawn_world(choices, size=ranks * topology.tp * topology.pp, swarm=swarm)
    if system.sum_by == "first-rank":
        # The order in which the system adds by itself.
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
    """The case with a number of steps, and of calls that gather params, as its effort allows."""
    chunk = chunk_within(scenario, sizes=sizes)
    scenario = replace(scenario, system=replace(scenario.system, gather_chunk_elems=chunk))
    most = steps_within(scenario, sizes=sizes, most=steps_max, effort_max=effort_max)
    scenario = replace(scenario, run=replace(scenario.run, steps=choices.integer(1, most)))
    if effort_of(scenario, sizes=sizes) > effort_max:
        # Two are as good as three at what accumulation gets wrong.
        run = replace(scenario.run, micro_batches=min(scenario.run.micro_batches, 2))
        scenario = replace(scenario, run=run)
    if effort_of(scenario, sizes=sizes) > effort_max:
        # What ranks touch too early they mostly do among few params as well.
        scenario = replace(scenario, world=replace(scenario.world, races=False))
    return scenario


def _ranks(choices: Choices, most: int, *, preferred: tuple[int, ...]) -> int:
    """Ranks of a dp-cp group, up to so many; of those that are preferred, if there are any."""
    if fitting := [ranks for ranks in preferred if ranks <= most]:
        return choices.among(fitting)
    if most > _MANY_RANKS:
        return choices.integer(_MANY_RANKS, most)
    squarish = (ranks for ranks in _SQUARISH if ranks <= most)
    return choices.among([*range(1, most + 1), *range(_FEW_RANKS + 1, most + 1), *squarish])


def _skips(target: Target, scenario: Scenario) -> bool:
    """Return True if it skips steps that are not finite, or raises, without a loss scale."""
    aimed = replace(scenario, system=replace(scenario.system, target=target.name))
    return numerics_of(target, aimed).nonfinite != "stepped"


def _hiding(scenario: Scenario, *, swarm: Swarm) -> Scenario:
    """The case with an order that the judge is not told; few, as bounds show less than bits."""
    may_hide = scenario.world.order != "linear" and scenario.model.name != "tp-block"
    may_hide &= scenario.world.order_known and not why_order_matters(scenario)
    if swarm.on("unknown order", fits=may_hide):
        scenario = replace(scenario, world=replace(scenario.world, order_known=False))
    return scenario


def _joined(choices: Choices, scenario: Scenario, *, swarm: Swarm) -> Scenario:
    """The case with ranks that have no data for some micro-batches, where that can be."""
    run, (fewest, least) = scenario.run, limits_of_joins(scenario)
    system = scenario.system
    is_late = system.divide in ("pre", "premul") and system.sync == "every"
    fits = fewest > 1 and run.micro_batches > least
    fits &= not (is_late and system.divide_by == "micro-batches")
    fits &= scenario.model.name != "tp-block"
    if not swarm.on("ranks join", fits=fits, often=True):
        return scenario
    count = choices.integer(1, min(fewest, 3) - 1)
    others = [choices.integer(least, run.micro_batches - 1) for _ in range(count)]
    own = (*others, run.micro_batches)
    return replace(scenario, run=replace(run, own_micro_batches=own))


def _in_epochs(choices: Choices, scenario: Scenario, *, swarm: Swarm) -> Scenario:
    """The case with a step whose micro-batches are short on all ranks, where that can be."""
    steps = scenario.run.steps
    epoch_steps = choices.integer(2, max(2, steps))
    fits = scenario.model.name != "tp-block" and scenario.data.rows > 1 and steps > 1
    if not swarm.on("short step", fits=fits):
        return scenario
    return replace(scenario, data=replace(scenario.data, epoch_steps=epoch_steps))


def _evaluating(choices: Choices, scenario: Scenario, *, swarm: Swarm) -> Scenario:
    """The case with a forward under `no_grad` in each step, where that can be."""
    when = choices.among(_EVALUATIONS)
    fits = not scenario.run.own_micro_batches and scenario.model.name != "tp-block"
    if not swarm.on("evaluation", fits=fits):
        return scenario
    return replace(scenario, run=replace(scenario.run, evaluate=when))


def fitted_to_model(scenario: Scenario, *, swarm: Swarm) -> Scenario:
    """The case with what its optimizer and its model allow and make possible.

    Args:
        scenario: With all that does not depend on either.
        swarm: Which features it has.
    """
    system, optimizer, world = scenario.system, scenario.optimizer, scenario.world
    if optimizer.name in WHOLE_PARAM_OPTIMIZERS:
        system = replace(system, offload_state=False, step_buffer_elems=None)
    if swarm.on("buffers by group", fits=bool(optimizer.groups)):
        system = replace(system, buffers_by="param-group")
    has_blocks = scenario.model.name == "tp-block"
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
    """Models of the theme; for many ranks those of nothing but params, which fill all shards."""
    bare = [name for name in names if name in BARE]
    if ranks >= _MANY_RANKS and bare:
        return bare
    able = swarm.able.models
    return [name for name in names if name in swarm.theme.models and name in able] or names


def _overflowing(
    choices: Choices, scenario: Scenario, *, sizes: Sequence[int], steps_max: int
) -> Scenario:
    """The case with a step that is skipped, and others.

    With no other no update would be compared; what a skipped step leaves behind, such as a count of
    good steps, may show only two steps later.
    """
    most = steps_within(scenario, sizes=sizes, most=steps_max)
    steps = choices.among([each for each in _STEPS_WITH_OVERFLOW if each <= most])
    scenario = replace(scenario, run=replace(scenario.run, steps=steps))
    nan = drawn_overflow(choices, scenario=scenario, elems=sum(sizes))
    return replace(scenario, data=replace(scenario.data, nan=nan))


def _within_both(scenario: Scenario, *, steps_max: int) -> Scenario:
    """The case with its NaN on a rank that is there in its step.

    And with a step beside the one that is skipped, or no update would be compared on that side.
    """
    nan, after, steps = scenario.data.nan, scenario.reload, scenario.run.steps
    if nan is None or after is None:
        return scenario
    is_before = nan.step < after.step
    if nan.rank >= world_size_at(scenario, step=nan.step):
        nan = replace(nan, rank=0)
    if (after.step if is_before else steps - after.step) == 1:
        if steps < steps_max:
            steps, after = steps + 1, replace(after, step=after.step + is_before)
        else:
            nan = None
    return replace(
        scenario,
        data=replace(scenario.data, nan=nan),
        run=replace(scenario.run, steps=steps),
        reload=after,
    )
