"""Program that every rank runs: a plain training loop with observers.

A case has one segment, or two if it reloads a checkpoint into another world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.cost.hook_trace import Clock
from zero_sim.errors import ProtocolError, UsageError
from zero_sim.host.device import seed_device
from zero_sim.judge.facts import Facts, facts_of
from zero_sim.judge.harness import RankTime
from zero_sim.judge.judge import Judge
from zero_sim.judge.positions import check_reported
from zero_sim.run.dp_cp_groups import DpCpGroup
from zero_sim.run.observers import BareModule, Observers, Watched, choose_observers
from zero_sim.scenario.derived import overlaps_params, own_micro_batches
from zero_sim.scenario.fitting import after_reload
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import EngineAdapter, Saving, Target, capabilities_of, complete
from zero_sim.targets.bare_model import model_of, names_like
from zero_sim.targets.costs import Costs, costs_of
from zero_sim.targets.drawn_weights import draws_weights
from zero_sim.workloads import (
    Batch,
    Workload,
    build_module,
    loss_terms,
    make_distinct,
    make_unloaded,
    seed_of,
    total_loss,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive steps in one world."""

    scenario: Scenario
    start: int
    stop: int
    """Half-open range of steps."""
    load: Path | None = None
    """Checkpoint to start from; None to start anew."""
    weights_only: bool = False
    """True to load only weights from `load`."""
    lost_steps: int = 0
    lost_micro_batches: int = 0
    """Training before the load, which the load must discard."""
    early_save: Path | None = None
    """Checkpoint to save before the first step, which is never loaded."""
    save: Path | None = None
    """Checkpoint to save at the end, or from `save_step` on."""
    save_step: int | None = None
    """Step before which an asynchronous save begins."""
    read_step: int | None = None
    """Step in which to record the params that forwards read; None for none."""


@dataclass(slots=True)
class Outcome:
    """Ranks' results besides the judge's findings."""

    accuracy: float | None = None
    notes: list[str] = field(default_factory=list)


def segments_of(scenario: Scenario, *, folder: Path) -> Iterator[Segment]:
    """Yield a case's segments in order; `folder` is for checkpoints."""
    reload, steps = scenario.reload, scenario.run.steps
    if reload is None:
        yield Segment(scenario=scenario, start=0, stop=steps)
        return
    path = folder / "checkpoint"
    yield Segment(
        scenario=scenario,
        start=0,
        # Steps during an asynchronous save are trained here, and again after the load.
        stop=reload.step + reload.async_steps,
        save=path,
        save_step=reload.step if reload.async_steps else None,
        early_save=folder / "early" if reload.early_save else None,
    )
    yield Segment(
        scenario=after_reload(scenario),
        # The checkpoint contains no step of an asynchronous save.
        start=reload.step,
        stop=steps,
        load=path,
        weights_only=reload.weights_only,
        lost_steps=reload.lost_steps,
        lost_micro_batches=reload.lost_micro_batches,
    )


def folder_for(scenario: Scenario) -> AbstractContextManager[str]:
    """Return a context with a temporary folder for checkpoints, or "" if a case has none."""
    # A case without a reload writes no files.
    return nullcontext("") if scenario.reload is None else TemporaryDirectory(prefix="zero-sim-")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupContext:
    """Workload and judge of a dp-cp group."""

    dp_cp_group: DpCpGroup
    workload: Workload
    judge: Judge


ShareFacts = Callable[[int, Facts], None]
"""Passes facts about a world rank's engine to the judges, before the first step."""


_UNTIMED = RankTime()


def build_program(
    segment: Segment,
    *,
    contexts: Sequence[GroupContext],
    target: Target,
    outcome: Outcome,
    rank_time: RankTime = _UNTIMED,
    share_facts: ShareFacts | None = None,
    clock: Clock | None = None,
) -> Callable[[int], None]:
    """Build the program of a segment.

    Args:
        segment: The steps to take, and their world.
        contexts: Contexts of all dp-cp groups in the world.
        target: The system under test.
        outcome: Filled in by rank 0.
        rank_time: Keeps the harness's time out of the world's clock; by default, does nothing.
        share_facts: Passes a rank's facts to the judges; None if ranks share their judges.
        clock: Clock in the world's log; None without a log.
    """

    def program(world_rank: int) -> None:
        # From here on, code runs in the rank's own thread or process.
        group, context = _own_group(contexts, world_rank=world_rank, rank_time=rank_time)
        rank = group.rank()
        bare, engine, costs = _build(
            segment, context, target=target, group=group, rank_time=rank_time
        )
        training = _Training(
            context=context,
            rank=rank,
            engine=engine,
            names=frozenset(bare.names.values()),
            observers=Observers([]),
            rank_time=rank_time,
            target_name=target.name,
            unsettled=capabilities_of(target).unsettled,
        )
        if segment.load is not None:
            _load(training, segment, segment.load)
        facts = _facts_of(training, segment, target=target)
        if share_facts is not None:
            share_facts(world_rank, facts)
        else:
            with rank_time.harness():
                context.judge.note_facts(rank, facts)
        if segment.load is not None:
            engine.settle()
            with rank_time.harness():
                context.judge.observe_load(rank, engine)
        observers, notes = choose_observers(
            bare,
            Watched(judge=context.judge, rank=rank, engine=engine, rank_time=rank_time),
            scenario=context.dp_cp_group.scenario,
            costs=costs,
            clock=clock,
        )
        context.judge.begin(rank, notes)
        if dist.get_world_size() > group.size():
            # All dp-cp groups' judges step together, so all engines must exist before.
            with rank_time.caused_by_harness():
                dist.barrier()
        _train(replace(training, observers=observers), segment, outcome=outcome)

    return program


def _facts_of(training: _Training, segment: Segment, *, target: Target) -> Facts:
    """Return the facts that a rank's engine reports before the first step, and check them."""
    with training.rank_time.harness():
        # After a load, the reference continues from its own values.
        draws = segment.load is None and draws_weights(target)
        with_start = segment.scenario.model.distinct_start
        facts = facts_of(training.engine, with_start=with_start, with_drawn=draws)
    # Not in a harness block, because a wrong report is the user's mistake, not a harness error.
    scenario = training.context.dp_cp_group.scenario
    check_reported(facts, scenario=scenario, target_name=target.name)
    return facts


def _own_group(
    contexts: Sequence[GroupContext], *, world_rank: int, rank_time: RankTime
) -> tuple[dist.ProcessGroup, GroupContext]:
    group, mine = dist.group.WORLD, 0
    if len(contexts) > 1:
        # torch.distributed requires that every rank makes every group, in the same order.
        with rank_time.caused_by_harness():
            groups = [dist.new_group(list(context.dp_cp_group.ranks)) for context in contexts]
        mine = next(
            i for i, context in enumerate(contexts) if world_rank in context.dp_cp_group.ranks
        )
        group = groups[mine]
    assert isinstance(group, dist.ProcessGroup)
    return group, contexts[mine]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Training:
    context: GroupContext
    rank: int
    """Group rank in the dp-cp group."""
    engine: EngineAdapter
    names: frozenset[str]
    """Names of the bare model's params."""
    observers: Observers
    rank_time: RankTime
    target_name: str
    unsettled: bool
    """As in the target's capabilities."""

    @property
    def may_raise(self) -> bool:
        """True if a step with non-finite gradients must raise."""
        # With loss scaling, an overflow is an ordinary skipped step.
        raises = self.context.judge.group.numerics.nonfinite == "raises"
        return raises and self.context.dp_cp_group.scenario.optimizer.loss_scale is None


def _build(
    segment: Segment,
    context: GroupContext,
    *,
    target: Target,
    group: dist.ProcessGroup,
    rank_time: RankTime,
) -> tuple[BareModule, EngineAdapter, Costs]:
    scenario = context.dp_cp_group.scenario
    with rank_time.harness():
        # All ranks draw the same weights, except for experts and tensor-parallel parts.
        module = build_module(
            context.workload,
            expert_index=group.rank() % scenario.topology.ep,
            tp_index=context.dp_cp_group.tp_index,
        )
        # Before ranks are made distinct, because all must end with the first rank's values.
        model = model_of(module, known=context.judge.group.ownership.param_names)
        if scenario.model.distinct_start:
            make_distinct(module, rank=group.rank(), ep=scenario.topology.ep)
        if segment.load is not None and scenario.model.buffer == "saved":
            # Another value, so that a buffer missing in the checkpoint is noticed.
            make_unloaded(module)
        # Before the target wraps the module: engines may replace or flatten its params.
        bare = BareModule(module, read_step=segment.read_step, rank_time=rank_time)
    system = target.build(module, scenario=scenario, group=group)
    costs = costs_of(target, scenario, engine=system)
    engine = complete(system, model=model, charging=rank_time.engine)
    _check_can_reload(engine, segment, target=target)
    return bare, engine, costs


def _load(training: _Training, segment: Segment, path: Path) -> None:
    """Train the lost steps, then load the checkpoint that a segment starts from.

    The judge does not observe lost steps. If a load leaves traces of them, later steps differ.
    """
    engine, scenario = training.engine, training.context.dp_cp_group.scenario
    for step in range(segment.start, segment.start + segment.lost_steps):
        _lose(training, step, scenario.run.micro_batches)
        engine.step(lr_factor=lr_factor(scenario, step))
        engine.settle()
    if segment.lost_micro_batches:
        _lose(training, segment.start + segment.lost_steps, segment.lost_micro_batches)
    # Unfreeze all params, because observers cannot set hooks on frozen params.
    _freeze(training, -1)
    engine.load(path, weights_only=segment.weights_only)


def _lose(training: _Training, step: int, micro_batches: int) -> None:
    """Train micro-batches that the next load discards."""
    _freeze(training, step)
    training.engine.zero_grad()
    for micro in range(micro_batches):
        _take_part(training, step, micro)


def _train(training: _Training, segment: Segment, *, outcome: Outcome) -> None:
    scenario, engine = training.context.dp_cp_group.scenario, training.engine
    observers, stop = training.observers, segment.stop
    # The judge must not wait for gathers that overlap with the next forward, so it reads params
    # after this forward has used them.
    deferred, late = overlaps_params(scenario.system), False
    saving: Saving | None = None
    # torch's get_state_dict steps an optimizer without state; see
    # scenarios/upstream/torch-save-steps.
    if segment.early_save is not None:
        _save(training, segment, segment.early_save)
    evaluate = scenario.run.evaluate
    for step in range(segment.start, stop):
        evaluated = _evaluate(training, step) if evaluate == "between-steps" else None
        # Before `zero_grad`, so that the checkpoint has the previous steps and nothing else.
        if step == segment.save_step:
            saving = _begin_save(training, segment)
        _freeze(training, step)
        engine.zero_grad()
        for watch in observers.before_backward:
            watch(step)
        start_step(
            engine,
            training.context.workload,
            scenario,
            step=step,
            rank=training.rank,
            rank_time=training.rank_time,
        )
        losses = _take_micro_batches(training, step, late=late)
        if evaluate == "within-step":
            evaluated = _evaluate(training, step)
        if evaluated is not None:
            for watch in observers.after_evaluation:
                watch(step, losses[0], evaluated)
        with ExitStack() as stack:
            for updating in observers.updating:
                if (block := updating(step)) is not None:
                    stack.enter_context(block)
            take_step = engine.try_step if training.may_raise else engine.step
            result = take_step(lr_factor=lr_factor(scenario, step))
        for watch in observers.after_step:
            watch(step, losses, result)
        # `unsettled` targets skip settle() in every second step, so that both ways are judged.
        late = (deferred or (training.unsettled and step % 2 == 0)) and step + 1 < stop
        if not late:
            engine.settle()
            for watch in observers.after_gather:
                watch(step)
    if segment.save is not None:
        if saving is None:
            _save(training, segment, segment.save)
        else:
            saving.wait()
        return
    # On every rank, because a forward with sharded params needs all ranks.
    with training.rank_time.caused_by_harness():
        accuracy = training.context.workload.accuracy(engine.module)
    notes = engine.notes()
    if training.context.dp_cp_group.ranks[training.rank] == 0:
        outcome.accuracy = accuracy
        outcome.notes.extend(notes)
    # Last, because unwrapping ends the engine.
    for watch in observers.at_end:
        watch(stop - 1)


def _take_micro_batches(training: _Training, step: int, *, late: bool) -> list[Tensor]:
    """Train a step's micro-batches; return the losses for those with data."""
    observers, losses = training.observers, list[Tensor]()
    for micro in range(training.context.dp_cp_group.scenario.run.micro_batches):
        for watch in observers.before_micro_batch:
            watch(step, micro)
        losses += _take_part(training, step, micro)
        if late and micro == 0:
            for watch in observers.after_gather:
                watch(step - 1)
    return losses


def _begin_save(training: _Training, segment: Segment) -> Saving:
    """Begin an asynchronous save between two steps; its calls belong to neither."""
    assert segment.save is not None
    assert segment.scenario.reload is not None
    training.engine.settle()
    with training.context.judge.book.aside(training.rank):
        return training.engine.save_async(segment.save, form=segment.scenario.reload.form)


def _save(training: _Training, segment: Segment, path: Path) -> None:
    """Save a checkpoint; its calls belong to no step."""
    assert segment.scenario.reload is not None
    training.engine.settle()
    with training.context.judge.book.aside(training.rank):
        training.engine.save(path, form=segment.scenario.reload.form)


def _check_can_reload(engine: EngineAdapter, segment: Segment, *, target: Target) -> None:
    if (segment.save or segment.load) and not engine.can_reload:
        raise UsageError(
            "expected a target with save() and load(), because the scenario has `reload`, got "
            f"{target.name!r}. Remove `reload`, or choose another target."
        )


def lr_factor(scenario: Scenario, step: int) -> float:
    """Return the factor for a step's learning rates: a linear warm-up, then 1."""
    # As in the reference, the factor of step 0 is 1 / warmup_steps.
    warmup_steps = scenario.optimizer.warmup_steps
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _freeze(training: _Training, step: int) -> None:
    for freeze in training.context.dp_cp_group.scenario.model.freeze:
        # Not all ranks have an expert's params. The reference has checked that the param exists.
        if freeze.param in training.names:
            # Looked up each step, because engines may replace params.
            param = _find_param(training, freeze.param)
            param.requires_grad_(not freeze.start <= step < freeze.stop)


def _find_param(training: _Training, name: str) -> Tensor:
    """Return the param in the engine's module for a name in the bare model."""
    held = dict(training.engine.module.named_parameters())
    alike = names_like(held, name)
    # Wrappers add parts to names. A single name with the bare name's parts in order is the param.
    if len(alike) == 1:
        return held[alike[0]]
    got = ", ".join(map(repr, alike or held)) or "no params"
    raise ProtocolError(
        f"expected `module` of target {training.target_name!r}'s engine to have param {name!r}, "
        f"because model.freeze names it, got {got}. Use a wrapper that only adds parts to the "
        "params' names, or remove model.freeze."
    )


def draw_batch(workload: Workload, scenario: Scenario, step: int, rank: int, micro: int) -> Batch:
    """Seed the rank's random numbers, and draw a micro-batch."""
    # Each micro-batch has its own seed, so that the reference can replay any of them.
    seed = seed_of(scenario, step=step, rank=rank, micro=micro)
    # Not torch.manual_seed, which queries every kind of device and takes 100 us.
    torch.default_generator.manual_seed(seed)
    batch = workload.batch(step=step, rank=rank, micro=micro)
    # Dropout in forward draws on the device of the inputs.
    seed_device(batch.inputs.device, seed)
    return batch


def start_step(
    engine: EngineAdapter,
    workload: Workload,
    scenario: Scenario,
    *,
    step: int,
    rank: int,
    rank_time: RankTime = _UNTIMED,
) -> None:
    """Call the engine's `start_step` with a step's rows, if it has this method."""
    if not engine.has_start_step:
        return
    # This draws every batch in the step, and training draws it again.
    with rank_time.harness():
        rows = [
            workload.batch(step=step, rank=rank, micro=micro).rows
            for micro in range(own_micro_batches(scenario.run, step=step, rank=rank))
        ]
    engine.start_step(rows=rows)


def _take_part(training: _Training, step: int, micro: int) -> list[Tensor]:
    """Train a micro-batch, or join it without data; return the loss, if any."""
    scenario, rank = training.context.dp_cp_group.scenario, training.rank
    last = micro == scenario.run.micro_batches - 1
    # A rank without data must still take part in every collective.
    if micro >= own_micro_batches(scenario.run, step=step, rank=rank):
        training.engine.join_micro_batch(last=last)
        return []
    with training.rank_time.harness():
        batch = draw_batch(training.context.workload, scenario, step, rank, micro)
    for watch in training.observers.before_forward:
        watch(step, micro)
    return [_micro_batch(training, batch, step, last_micro=last)]


def _evaluate(training: _Training, step: int) -> Tensor:
    """Return the loss of a step's first micro-batch, from a forward under `no_grad`."""
    context, rank = training.context, training.rank
    with training.rank_time.harness():
        batch = draw_batch(context.workload, context.dp_cp_group.scenario, step, rank, 0)
    for watch in training.observers.before_evaluation:
        watch(step)
    # A target's own closed forms cover training only, so exclude these calls.
    is_counted = not callable(context.judge.notes[rank].costs.volume)
    aside = nullcontext() if is_counted else context.judge.book.aside(rank)
    with aside, torch.no_grad():
        return context.workload.loss(training.engine.forward, batch)  # pyrefly: ignore


def _micro_batch(training: _Training, batch: Batch, step: int, *, last_micro: bool) -> Tensor:
    # The loss runs the system's module, so errors and time here are charged to the system.
    engine = training.engine
    engine.start_micro_batch(last=last_micro)
    # `loss_terms` is typed for modules, but only calls `forward`. A model with a second loss has
    # two terms, which the engine may scale separately.
    terms = loss_terms(training.context.workload, engine.forward, batch)  # pyrefly: ignore
    for watch in training.observers.after_forward:
        watch(step)
    engine.backward(*terms, last_micro=last_micro, rows=batch.rows)
    return total_loss([term.detach() for term in terms])
