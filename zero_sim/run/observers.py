"""A rank's observers, chosen once per case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from zero_sim.cost.checkpoints import check_checkpoints, checkpoint_bytes
from zero_sim.cost.forms import sizes_of
from zero_sim.cost.grad_peaks import watch_grad_peaks
from zero_sim.cost.hook_trace import Clock, HookTrace, record_hooks
from zero_sim.cost.memory_recorder import Look, MemoryRecorder
from zero_sim.cost.observer import Observer
from zero_sim.cost.peaks import watch_own_peaks, watch_peaks
from zero_sim.cost.staging import check_staging, staged_bytes
from zero_sim.cost.volume import held_sizes_of
from zero_sim.errors import ProtocolError
from zero_sim.judge.checks.observed_step import RankNotes
from zero_sim.judge.checks.unwrapped import (
    Hook,
    ModuleNote,
    check_unwrapped,
    hooks_of,
    note_module,
)
from zero_sim.judge.forward_reads import ForwardReads
from zero_sim.judge.harness import RankTime
from zero_sim.judge.judge import Judge
from zero_sim.scenario.derived import overlaps_grads, overlaps_params
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import (
    CheckpointedEngine,
    CostedEngine,
    EngineAdapter,
    PeakEngine,
    StepResult,
)
from zero_sim.targets.costs import CostCase, Costs, form_of

_WHOLE = "whole "
"""Prefix of names in `Costs.held` that limit memory within a step, not between steps."""


class BareModule:
    """A rank's module, before an engine wraps it.

    Args:
        module: The module.
        read_step: Step in which to record the params that forwards read; None for none.
        rank_time: Keeps the harness's time out of the world's clock.
    """

    def __init__(self, module: nn.Module, *, read_step: int | None, rank_time: RankTime) -> None:
        self.module = module
        self.names: Mapping[Tensor, str] = {
            param: name for name, param in module.named_parameters()
        }
        self.sizes, self.held_sizes = sizes_of(module), held_sizes_of(module)
        self.note = note_module(module)
        self.reads = (
            None if read_step is None else ForwardReads(module, step=read_step, rank_time=rank_time)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A rank with its judge."""

    judge: Judge
    rank: int
    """Group rank in the judge's dp-cp group."""
    engine: EngineAdapter
    rank_time: RankTime


def choose_observers(
    bare: BareModule,
    watched: Watched,
    *,
    scenario: Scenario,
    costs: Costs,
    clock: Clock | None,
) -> tuple[Observers, RankNotes]:
    """Choose a rank's observers, and set their hooks, which run after the engine's hooks.

    Without an event log, `clock` is None.

    Returns:
        The observers, and notes for the judge.
    """
    rank, module = watched.rank, bare.module
    costed = watched.engine.costed if costs.held == "textbook" else None
    own_bytes = _own_bytes(costs, bare, scenario=watched.judge.group.scenario, rank=rank)
    whole = {name: most for name, most in (own_bytes or {}).items() if name.startswith(_WHOLE)}
    look = _look_at(watched.engine) if whole else None
    # Hooks cost time, so set them only if a check reads their records.
    overlaps = overlaps_grads(scenario.system) or overlaps_params(scenario.system)
    traces = clock if overlaps and costs.in_flight == "textbook" else None
    is_hooked = traces is not None or bare.reads is not None or bool(whole) or _has_peaks(scenario)
    hook_trace: HookTrace | None = None
    with watched.rank_time.harness():
        # Listing hooks takes noticeable time in a small case, so list them only if needed.
        before = hooks_of(module) if is_hooked else frozenset[Hook]()
        if traces is not None:
            hook_trace = record_hooks(module, names=bare.names, clock=traces)
        memory = None
        if costed is not None:
            memory = _watch_memory(bare, costed, scenario=scenario, watched=watched)
        elif look is not None:
            memory = MemoryRecorder(watched.judge.weighed_step, look=look)
            watch_own_peaks(memory, module, names=bare.names, most=whole, rank=rank)
        if bare.reads is not None:
            bare.reads.watch()
        recorders = [each for each in (hook_trace, memory, bare.reads) if each is not None]
        # Hooks of the harness must not count as left behind by the engine.
        own_hooks = hooks_of(module) - before if is_hooked else frozenset[Hook]()
    # The memory recorder checks values within a step; the judge checks all others between steps.
    notes = RankNotes(
        sizes=bare.sizes,
        held_sizes=bare.held_sizes,
        costs=costs,
        own_bytes=own_bytes
        and {name: held for name, held in own_bytes.items() if name not in whole},
        hook_trace=hook_trace,
        memory=memory,
        reads=bare.reads,
    )
    unwrapping = UnwrapObserver(watched, note=bare.note, own_hooks=own_hooks)
    # Unwrapping comes last, because it leaves no engine to observe.
    return Observers([*recorders, JudgeObserver(watched), unwrapping]), notes


def _look_at(engine: EngineAdapter) -> Look:
    """Return the engine's method that reports unsharded memory."""
    if isinstance(engine.costed, PeakEngine):
        return engine.costed.whole_bytes
    raise ProtocolError(
        f"expected an engine with whole_bytes(), because Costs.held names {_WHOLE!r}..., got none. "
        "Add it, or leave out these names."
    )


def _watch_memory(
    bare: BareModule, costed: CostedEngine, *, scenario: Scenario, watched: Watched
) -> MemoryRecorder | None:
    """Return a memory recorder; None if no closed form depends on memory within a step."""
    system, rank, step = scenario.system, watched.rank, watched.judge.weighed_step
    recorder = MemoryRecorder(step)
    at: dict[str, Any] = {"scenario": scenario, "rank": rank}
    # Three closed forms: peaks of unsharded tensors, step buffer, activation checkpoints.
    if isinstance(costed, PeakEngine) and _has_peaks(scenario):
        recorder.look = costed.whole_bytes
        if system.reduce_buffer_elems is not None:
            watch_grad_peaks(recorder, names=bare.names, sizes=bare.sizes, **at)
        else:
            watch_peaks(recorder, bare.module, names=bare.names, sizes=bare.sizes, **at)
    if system.step_buffer_elems is not None:
        recorder.with_updates = True
        wanted = staged_bytes(bare.sizes, **at)
        recorder.forms.append(partial(check_staging, wanted=wanted, step=step, rank=rank))
    if system.checkpoints != "none" and isinstance(costed, CheckpointedEngine):
        recorder.kept = costed.checkpoint_bytes
        wanted = checkpoint_bytes(**at)
        recorder.forms.append(partial(check_checkpoints, wanted=wanted, step=step, rank=rank))
    return recorder if recorder.forms else None


def _has_peaks(scenario: Scenario) -> bool:
    """Return True if unsharded gradients or params come and go within a step."""
    return scenario.system.stage >= 2 or scenario.system.reduce_buffer_elems is not None


def _own_bytes(
    costs: Costs, bare: BareModule, *, scenario: Scenario, rank: int
) -> Mapping[str, int] | None:
    """Return the bytes on a rank by the target's own form; None without such a form."""
    if costs.held is None or costs.held == "textbook":
        return None
    # Not in a harness block, because the target's code may raise, which is no harness error.
    elems = {size.name: size.elems for size in bare.sizes}
    case = CostCase(scenario=scenario, rank=rank, elems=elems)
    return form_of(costs.held, case, name="held", kind=Mapping)


class Observers:
    """A rank's observers by moment in the training loop; see `Observer`."""

    def __init__(self, chosen: Sequence[Observer]) -> None:
        def having(method: str) -> Sequence[Observer]:
            # Select here, because the loop walks these lists for every micro-batch. Inherited
            # methods do nothing, so they are omitted.
            base = getattr(Observer, method)
            return [each for each in chosen if getattr(type(each), method) is not base]

        self.before_backward = [each.before_backward for each in having("before_backward")]
        self.before_micro_batch = [each.before_micro_batch for each in having("before_micro_batch")]
        self.before_evaluation = [each.before_evaluation for each in having("before_evaluation")]
        self.after_evaluation = [each.after_evaluation for each in having("after_evaluation")]
        self.before_forward = [each.before_forward for each in having("before_forward")]
        self.after_forward = [each.after_forward for each in having("after_forward")]
        self.updating = [each.updating for each in having("updating")]
        self.after_step = [each.after_step for each in having("after_step")]
        self.after_gather = [each.after_gather for each in having("after_gather")]
        self.at_end = [each.at_end for each in having("at_end")]


class JudgeObserver(Observer):
    """Calls the judge for a rank, and charges its time to the harness."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def before_backward(self, step: int) -> None:
        """Check that gradients are zero."""
        it = self._watched
        with it.rank_time.harness():
            it.judge.before_backward(it.rank, step, it.engine)

    def after_evaluation(self, step: int, trained: Tensor, evaluated: Tensor) -> None:
        """Judge a loss under `no_grad`."""
        it = self._watched
        with it.rank_time.harness():
            it.judge.observe_evaluation(it.rank, step, trained, evaluated)

    def after_step(self, step: int, losses: Sequence[Tensor], result: StepResult) -> None:
        """Judge everything except the working params."""
        it = self._watched
        with it.rank_time.harness():
            it.judge.observe(it.rank, step, losses, result, it.engine)

    def after_gather(self, step: int) -> None:
        """Judge the working params."""
        it = self._watched
        with it.rank_time.harness():
            it.judge.observe_params(it.rank, step, it.engine)


class UnwrapObserver(Observer):
    """Unwraps the module after the last step, and checks it.

    Args:
        watched: The rank, its engine and its judge.
        note: The module's parts before the engine wrapped it.
        own_hooks: The harness's hooks.
    """

    def __init__(self, watched: Watched, *, note: ModuleNote, own_hooks: frozenset[Hook]) -> None:
        self._watched = watched
        self._note, self._own_hooks = note, own_hooks

    def at_end(self, step: int) -> None:
        """Unwrap the module if all ranks' engines can."""
        it = self._watched
        if not it.judge.group.ownership.can_unwrap:
            return
        with it.rank_time.harness():
            # Copy them, because unwrapping may free or change the engine's params.
            held = {name: param.clone() for name, param in it.engine.params().items()}
        # The system's code, but only the harness needs the call.
        with it.rank_time.caused_by_harness():
            module = it.engine.unwrap()
        with it.rank_time.harness():
            found = check_unwrapped(
                module,
                self._note,
                held=held,
                not_its_own=self._own_hooks,
                step=step,
                rank=it.rank,
            )
            it.judge.bad.report(step, found)
