"""The program of every rank of a case: a plain training loop with the judge looking on.

A case is one segment, or two where it reloads a checkpoint into another world in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.cost.checkpoints import CheckpointWatch, checkpoint_bytes
from zero_sim.cost.forms import ParamSize, sizes_of
from zero_sim.cost.grad_peaks import GradPeakWatch, watch_grad_peaks
from zero_sim.cost.hook_trace import Clock, HookTrace, record_hooks
from zero_sim.cost.messages import HeldSize, held_sizes_of
from zero_sim.cost.peaks import PeakWatch, watch_peaks
from zero_sim.cost.staging import StagingWatch, staged_bytes
from zero_sim.errors import ProtocolError, UsageError
from zero_sim.host.device import seed_device
from zero_sim.judge.facts import Facts, facts_of
from zero_sim.judge.forward_reads import ForwardReads
from zero_sim.judge.given_back import (
    Hook,
    ModuleNote,
    check_given_back,
    hooks_of,
    note_module,
)
from zero_sim.judge.harness import (
    PauseClock,
    caused_by_harness,
    engine_time,
    harness_time,
)
from zero_sim.judge.judge import Judge
from zero_sim.judge.positions import check_reported
from zero_sim.run.dp_cp_groups import DpCpGroup
from zero_sim.scenario.derived import overlaps_grads, overlaps_params, own_micro_batches
from zero_sim.scenario.fitting import after_reload
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import (
    CheckpointedEngine,
    CompletedEngine,
    CostedEngine,
    PeakEngine,
    Saving,
    Target,
    complete,
)
from zero_sim.targets.bare_model import model_of, names_like
from zero_sim.targets.costs import Costs, costs_of
from zero_sim.workloads import Batch, Workload, build_module, make_distinct, seed_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive steps in one world."""

    scenario: Scenario
    start: int
    stop: int
    """Half-open range of steps."""
    load: Path | None = None
    """Checkpoint to start from."""
    weights_only: bool = False
    """Whether to take the weights alone from it."""
    save: Path | None = None
    """Checkpoint to end with."""
    save_step: int | None = None
    """The step before which it is begun, where training goes on meanwhile."""
    read_step: int | None = None
    """The step in which the params that forwards read are recorded; None for none."""


@dataclass(slots=True)
class Outcome:
    """What the ranks tell besides what the judge sees."""

    accuracy: float | None = None
    notes: list[str] = field(default_factory=list)


def segments_of(scenario: Scenario, *, folder: Path) -> Iterator[Segment]:
    """The segments of a case, in order.

    Args:
        scenario: The case that runs.
        folder: Where a checkpoint goes.
    """
    reload, steps = scenario.reload, scenario.run.steps
    if reload is None:
        yield Segment(scenario=scenario, start=0, stop=steps)
        return
    path = folder / "checkpoint"
    yield Segment(
        scenario=scenario,
        start=0,
        stop=reload.step + reload.async_steps,
        save=path,
        save_step=reload.step if reload.async_steps else None,
    )
    yield Segment(
        scenario=after_reload(scenario),
        start=reload.step,
        stop=steps,
        load=path,
        weights_only=reload.weights_only,
    )


def folder_for(scenario: Scenario) -> AbstractContextManager[str]:
    """A folder for the checkpoint of a case, where it makes one; else no path."""
    return nullcontext("") if scenario.reload is None else TemporaryDirectory(prefix="zero-sim-")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupContext:
    """What the ranks of one dp-cp group need to run."""

    dp_cp_group: DpCpGroup
    workload: Workload
    judge: Judge


ShareFacts = Callable[[int, Facts], None]
"""How the judges hear what the engine of a rank, of the world, says before the first step."""


def _never_timed(pause: bool) -> AbstractContextManager[None]:
    return nullcontext()


def build_program(
    segment: Segment,
    *,
    contexts: Sequence[GroupContext],
    target: Target,
    outcome: Outcome,
    pause_clock: PauseClock = _never_timed,
    share_facts: ShareFacts | None = None,
    clock: Clock | None = None,
) -> Callable[[int], None]:
    """The program of one segment.

    Args:
        segment: The steps to take, and where.
        contexts: Every dp-cp group of the world, with what it trains and who judges it.
        target: The system under test.
        outcome: Filled in by rank 0.
        pause_clock: Keeps the world from counting the harness's time; left out where no world
            counts any.
        share_facts: Gives judges the facts of a rank; left out where ranks share their judges.
        clock: The time of the world's log; left out where there is none.
    """

    def program(world_rank: int) -> None:
        group, context = dist.group.WORLD, contexts[0]
        if len(contexts) > 1:
            # Every rank makes every group, in one order, as torch.distributed demands.
            with caused_by_harness(pause_clock):
                groups = [dist.new_group(list(context.dp_cp_group.ranks)) for context in contexts]
            mine = next(
                i for i, context in enumerate(contexts) if world_rank in context.dp_cp_group.ranks
            )
            group, context = groups[mine], contexts[mine]
        assert isinstance(group, dist.ProcessGroup)
        built = _build(
            segment, context, target=target, group=group, pause_clock=pause_clock, clock=clock
        )
        engine = built.engine
        with harness_time(pause_clock):
            facts = facts_of(engine, with_start=segment.scenario.model.distinct_start)
        # What the user is to mend, and no failure of the judge that would hear of it.
        check_reported(facts, scenario=context.dp_cp_group.scenario, target_name=target.name)
        if share_facts is not None:
            share_facts(world_rank, facts)
        else:
            with harness_time(pause_clock):
                context.judge.note_facts(group.rank(), facts)
        if segment.load is not None:
            engine.settle()
            with harness_time(pause_clock):
                context.judge.observe_load(group.rank(), engine)
        _hold_to_costs(context.judge, built, rank=group.rank())
        if built.reads is not None:
            context.judge.forward_reads[group.rank()] = built.reads
        _train(
            segment,
            context,
            built=built,
            group=group,
            outcome=outcome,
            pause_clock=pause_clock,
            target_name=target.name,
        )

    return program


def _hold_to_costs(judge: Judge, built: _Built, *, rank: int) -> None:
    judge.hold_to_costs(
        rank,
        built.sizes,
        held=built.held_sizes,
        costs=built.costs,
        hook_trace=built.hook_trace,
        peaks=built.peaks,
        staging=built.staging,
        checkpoints=built.checkpoints,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Built:
    """A rank's engine, and what the harness knows of it."""

    engine: CompletedEngine
    names: frozenset[str]
    """Of the params of the bare model."""
    sizes: tuple[ParamSize, ...]
    """What it trains."""
    held_sizes: tuple[HeldSize, ...]
    """What its module has, trained or not."""
    costs: Costs
    """What is declared of what it costs."""
    hook_trace: HookTrace | None
    """What it does between its calls, where it is held to costs and overlaps anything."""
    note: ModuleNote
    """The module as it was before."""
    own_hooks: frozenset[Hook]
    """Hooks of the harness."""
    peaks: PeakWatch | GradPeakWatch | None
    """What it holds within a step, where gradients come and go and it tells."""
    staging: StagingWatch | None
    """What its optimizer is given in a step, where that goes through a buffer."""
    checkpoints: CheckpointWatch | None
    """What it keeps of activations, where it keeps checkpoints."""
    reads: ForwardReads | None
    """The params that its forwards read, if they are recorded."""


def _build(
    segment: Segment,
    context: GroupContext,
    *,
    target: Target,
    group: dist.ProcessGroup,
    pause_clock: PauseClock,
    clock: Clock | None,
) -> _Built:
    """Build a rank's engine, from a checkpoint where the segment starts with one."""
    scenario = context.dp_cp_group.scenario
    with harness_time(pause_clock):
        module = build_module(
            context.workload,
            expert_index=group.rank() % scenario.topology.ep,
            tp_index=context.dp_cp_group.tp_index,
        )
        # Before ranks are made distinct: all are to have what the first holder has.
        model = model_of(module, known=context.judge.param_names)
        if scenario.model.distinct_start:
            make_distinct(module, rank=group.rank(), ep=scenario.topology.ep)
        sizes, held_sizes = sizes_of(module), held_sizes_of(module)
        names: dict[Tensor, str] = {param: name for name, param in module.named_parameters()}
        note = note_module(module)
        step = segment.read_step
        reads = step if step is None else ForwardReads(module, step=step, pause_clock=pause_clock)
    system = target.build(module, scenario=scenario, group=group)
    costs = costs_of(target, scenario, engine=system)
    engine = complete(system, model=model, asking=lambda: engine_time(pause_clock))
    _check_can_reload(engine, segment, target=target)
    if segment.load is not None:
        engine.load(segment.load, weights_only=segment.weights_only)
    overlaps = overlaps_grads(scenario.system) or overlaps_params(scenario.system)
    traces = clock if overlaps and costs.in_flight == "textbook" else None
    watch = _watch_of_peaks(scenario, module)
    costed = engine.costed if costs.held == "textbook" else None
    hook_trace, own_hooks = None, frozenset[Hook]()
    peaks: PeakWatch | GradPeakWatch | None = None
    with harness_time(pause_clock):
        # Those of the engine, among others.
        hooked = (traces, watch, reads) != (None, None, None)
        before = hooks_of(module) if hooked else frozenset[Hook]()
        if traces is not None:
            hook_trace = record_hooks(module, names=names, clock=traces)
        if watch is not None and isinstance(costed, PeakEngine):
            peaks = watch(
                names=names,
                sizes=sizes,
                scenario=scenario,
                rank=group.rank(),
                look=costed.whole_bytes,
            )
        if reads is not None:
            reads.watch()
        if (hook_trace, peaks, reads) != (None, None, None):
            own_hooks = hooks_of(module) - before
    return _Built(
        engine=engine,
        names=frozenset(names.values()),
        sizes=sizes,
        held_sizes=held_sizes,
        costs=costs,
        hook_trace=hook_trace,
        note=note,
        own_hooks=own_hooks,
        peaks=peaks,
        staging=_watch_staging(sizes, scenario=scenario, costed=costed, rank=group.rank()),
        checkpoints=_watch_checkpoints(scenario, costed=costed, rank=group.rank()),
        reads=reads,
    )


def _watch_of_peaks(
    scenario: Scenario, module: nn.Module
) -> Callable[..., PeakWatch | GradPeakWatch] | None:
    """How to watch what is whole within a step; None at stages that shard no gradients."""
    if scenario.system.reduce_buffer_elems is not None:
        return watch_grad_peaks
    return partial(watch_peaks, module) if scenario.system.stage >= 2 else None


def _watch_staging(
    sizes: Sequence[ParamSize], *, scenario: Scenario, costed: CostedEngine | None, rank: int
) -> StagingWatch | None:
    if scenario.system.step_buffer_elems is None or costed is None:
        return None
    return StagingWatch(owed=staged_bytes(sizes, scenario=scenario, rank=rank), rank=rank)


def _watch_checkpoints(
    scenario: Scenario, *, costed: CostedEngine | None, rank: int
) -> CheckpointWatch | None:
    if scenario.system.checkpoints == "none" or not isinstance(costed, CheckpointedEngine):
        return None
    owed = checkpoint_bytes(scenario, rank=rank)
    return CheckpointWatch(owed=owed, rank=rank, look=costed.checkpoint_bytes)


def _train(
    segment: Segment,
    context: GroupContext,
    *,
    built: _Built,
    group: dist.ProcessGroup,
    outcome: Outcome,
    pause_clock: PauseClock,
    target_name: str,
) -> None:
    """Take the segment's steps; the judge looks on after each.

    What the judge reads is not charged to the system, whatever is in flight.
    """
    scenario, workload, judge = context.dp_cp_group.scenario, context.workload, context.judge
    rank, engine, hook_trace = group.rank(), built.engine, built.hook_trace
    # Gathers that the next forward overlaps must not be waited for by the judge: it looks at params
    # once that forward has used them.
    deferred = overlaps_params(scenario.system)
    if dist.get_world_size() > group.size():
        # Judges of all dp-cp groups step together, which they can once every engine is there.
        with caused_by_harness(pause_clock):
            dist.barrier()
    saving: Saving | None = None
    for step in range(segment.start, segment.stop):
        if step == segment.save_step:
            saving = _begin_save(segment, judge, engine, rank=rank)
        _freeze(built, scenario, step, target_name=target_name)
        engine.zero_grad()
        with harness_time(pause_clock):
            judge.before_backward(rank, step, engine)
        losses: list[Tensor] = []
        for micro in range(scenario.run.micro_batches):
            if hook_trace is not None:
                hook_trace.start(step, micro)
            if built.peaks is not None and step == judge.weighed_step:
                built.peaks.start(step, micro)
            losses += _take_part(built, context, step, micro, rank=rank, pause_clock=pause_clock)
            if deferred and micro == 0 and step > segment.start:
                with harness_time(pause_clock):
                    judge.observe_params(rank, step - 1, engine)
        staging = built.staging if step == judge.weighed_step else None
        with nullcontext() if staging is None else staging.watching(step):
            result = engine.step(lr_factor=lr_factor(scenario, step))
        if hook_trace is not None:
            hook_trace.end(step)
        if built.peaks is not None:
            built.peaks.end()
        with harness_time(pause_clock):
            judge.observe(rank, step, losses, result, engine)
        if not deferred:
            engine.settle()
            with harness_time(pause_clock):
                judge.observe_params(rank, step, engine)
    engine.settle()
    if deferred:
        with harness_time(pause_clock):
            judge.observe_params(rank, segment.stop - 1, engine)
    if segment.save is not None:
        _end_save(segment, segment.save, engine, saving)
        return
    # On every rank: where params are sharded, a forward is one of them all.
    with caused_by_harness(pause_clock):
        accuracy = workload.accuracy(engine.module)
    notes = engine.notes()
    if context.dp_cp_group.ranks[rank] == 0:
        outcome.accuracy = accuracy
        outcome.notes.extend(notes)
    if judge.can_unwrap:
        _unwrap(built, judge, rank=rank, step=segment.stop - 1, pause_clock=pause_clock)


def _begin_save(segment: Segment, judge: Judge, engine: CompletedEngine, *, rank: int) -> Saving:
    """Begin a checkpoint between two steps; what it calls belongs to neither."""
    assert segment.save is not None
    assert segment.scenario.reload is not None
    engine.settle()
    with judge.aside(rank):
        return engine.save_async(segment.save, form=segment.scenario.reload.form)


def _end_save(segment: Segment, path: Path, engine: CompletedEngine, saving: Saving | None) -> None:
    """Wait for the checkpoint that was begun, or save it all now."""
    if saving is not None:
        saving.wait()
        return
    assert segment.scenario.reload is not None
    engine.save(path, form=segment.scenario.reload.form)


def _unwrap(built: _Built, judge: Judge, *, rank: int, step: int, pause_clock: PauseClock) -> None:
    """Have the module given back, last of all, and let the judge look at it."""
    with harness_time(pause_clock):
        held = {name: param.clone() for name, param in built.engine.params().items()}
    with caused_by_harness(pause_clock):
        module = built.engine.unwrap()
    with harness_time(pause_clock):
        found = check_given_back(
            module, built.note, held=held, not_its_own=built.own_hooks, step=step, rank=rank
        )
        judge.note_findings(step, found)


def _between(built: _Built, step: int) -> Callable[[], None] | None:
    """What is to be looked at between a forward and its backward."""
    return None if built.checkpoints is None else partial(built.checkpoints.between, step)


def _check_can_reload(engine: CompletedEngine, segment: Segment, *, target: Target) -> None:
    if (segment.save or segment.load) and not engine.can_reload:
        raise UsageError(
            f"expected a target with save and load for a scenario with `reload`, got "
            f"{target.name!r}, which has not both. Try a scenario without `reload`."
        )


def lr_factor(scenario: Scenario, step: int) -> float:
    """What learning rates are multiplied by in a step: a linear warm-up, then 1."""
    warmup_steps = scenario.optimizer.warmup_steps
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _freeze(built: _Built, scenario: Scenario, step: int, *, target_name: str) -> None:
    for freeze in scenario.model.freeze:
        # An expert is not on all ranks; whether a param exists at all, the reference has checked.
        if freeze.param in built.names:
            param = _find_param(built, freeze.param, target_name=target_name)
            param.requires_grad_(not freeze.start <= step < freeze.stop)


def _find_param(built: _Built, name: str, *, target_name: str) -> Tensor:
    """The param of the engine's module that has a name in the bare model.

    Systems may put other tensors in a param's place.
    """
    held = dict(built.engine.module.named_parameters())
    alike = names_like(held, name)
    if len(alike) == 1:
        return held[alike[0]]
    raise ProtocolError(
        f"expected `module` of what target {target_name!r} builds to have param {name!r}, which "
        f"model.freeze names, got {', '.join(map(repr, alike or held)) or 'no params'}. Try a "
        "wrapper that keeps the params' names but for parts that it adds, or a scenario without "
        "model.freeze."
    )


def draw_batch(workload: Workload, scenario: Scenario, step: int, rank: int, micro: int) -> Batch:
    """A micro-batch, after the rank's random numbers were seeded for it."""
    # torch.manual_seed asks every kind of device first, which takes 100 us.
    seed = seed_of(scenario, step=step, rank=rank, micro=micro)
    torch.default_generator.manual_seed(seed)
    batch = workload.batch(step=step, rank=rank, micro=micro)
    seed_device(batch.inputs.device, seed)
    return batch


def _take_part(
    built: _Built,
    context: GroupContext,
    step: int,
    micro: int,
    *,
    rank: int,
    pause_clock: PauseClock,
) -> list[Tensor]:
    """Train in one micro-batch, or join it; the loss, of a rank that has data for it."""
    scenario, workload, engine = context.dp_cp_group.scenario, context.workload, built.engine
    last = micro == scenario.run.micro_batches - 1
    if micro >= own_micro_batches(scenario.run, step=step, rank=rank):
        engine.join_micro_batch(last=last)
        return []
    with harness_time(pause_clock):
        batch = draw_batch(workload, scenario, step, rank, micro)
    if built.reads is not None:
        built.reads.start(step, micro)
    between = _between(built, step) if step == context.judge.weighed_step else None
    return [_micro_batch(engine, workload, batch, last_micro=last, between=between)]


def _micro_batch(
    engine: CompletedEngine,
    workload: Workload,
    batch: Batch,
    *,
    last_micro: bool,
    between: Callable[[], None] | None = None,
) -> Tensor:
    # The loss runs the system's module, so what fails or lasts here is the system's.
    engine.start_micro_batch(last=last_micro)
    # A workload does no more with a module than call it.
    loss = workload.loss(engine.forward, batch)  # pyrefly: ignore
    if between is not None:
        between()
    engine.backward(loss, last_micro=last_micro, rows=batch.rows)
    return loss.detach()
