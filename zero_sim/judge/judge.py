"""The judge: compares everything a rank holds with the reference, after every step.

A judge is called by the rank programs themselves, one rank at a time, right after a step and before
anything else changes the state; so nothing is copied unless a difference is found.

Where every rank is a process of its own, each has a judge that observes that one rank, hears of
the others what they say before their first step, and may hear what the reference of one of them
computes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from zero_sim.cost.memory import bytes_held, check_memory
from zero_sim.cost.volume import StepWindow
from zero_sim.findings import describe as findings
from zero_sim.findings.buffer_map import build_buffer_map
from zero_sim.findings.phase import Phase
from zero_sim.findings.records import BufferMap, Finding
from zero_sim.judge.checks import invariants
from zero_sim.judge.checks.step_result import check_result
from zero_sim.judge.checks.working_params import (
    check_casts,
    check_repeated,
    check_untrained,
)
from zero_sim.judge.comparison import AnyReference, owed_of
from zero_sim.judge.facts import Facts
from zero_sim.judge.guarantee import Guarantee
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.ownership import Ownership
from zero_sim.judge.positions import Arrangements
from zero_sim.judge.rank_notes import RankNotes
from zero_sim.judge.step_digests import owed_by
from zero_sim.judge.step_source import AnyStep, SharedSteps
from zero_sim.judge.trainable import check_trainable
from zero_sim.judge.trajectory import LateReference
from zero_sim.reference import SumSite
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import CompletedEngine, Numerics, OwnedPart, Place, StepResult
from zero_sim.targets.adapt import PARTS


class Judge:
    """Judges one run; collects findings of the first step at which anything is wrong.

    Args:
        scenario: The case that is judged.
        reference: The oracle, at the step before `first_step`.
        first_step: The first step to judge, more than 0 after a checkpoint was reloaded.
        stop_step: The step before which this world ends; all of the case where left out.
        world_ranks: The ranks of the group that is judged, as findings name them.
        order_seed: Seed of the world, if it is not the scenario's.
        calls_made: How many calls the world has logged, for findings to say where in the log they
            stand; left out where there is no log.
        numerics: What the target declares; without it, gradients are told before the division.
        observed: The ranks, within the group, that this judge is shown; all where left out.
        after_step: Called with every step that the reference has taken, before the next one.
        shared: Steps that other processes take, or that earlier cases took; None to take all here.

    Judges of one world that share a norm have to be told of each other by `join_peers`.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        reference: AnyReference | LateReference,
        first_step: int = 0,
        stop_step: int | None = None,
        world_ranks: Sequence[int] | None = None,
        order_seed: int | None = None,
        calls_made: Callable[[], int] | None = None,
        numerics: Numerics | None = None,
        observed: Collection[int] | None = None,
        after_step: Callable[[int], None] | None = None,
        shared: SharedSteps | None = None,
    ) -> None:
        self.scenario = scenario
        self.first_step = first_step
        self.world_ranks: Sequence[int] = world_ranks or range(scenario.world.size)
        self.nonzero_fraction_max = 0.0
        self.same_data = scenario.world.size > 1
        self.can_unwrap = True  # False if the engine of any rank has no `unwrap`.
        self.has_stepped = False
        """Whether any step was taken, and on finite gradients: others prove nothing."""
        self.owed: Counter[Guarantee] = Counter()
        """Elements of the reduced gradients of all steps, by why they are owed."""
        self.windows: list[StepWindow] = []
        """Where the steps of all ranks lie in the event log."""
        self.notes: dict[int, RankNotes] = {}
        """By rank that has begun."""
        ranks = range(scenario.world.size) if observed is None else observed
        seed = scenario.run.seed if order_seed is None else order_seed
        self._observed = dict.fromkeys(ranks, first_step - 1)
        """By rank that is shown: the last step at which it was."""
        self._ownership = Ownership(scenario, held=reference.held)
        self._group = JudgedGroup(
            scenario=scenario,
            numerics=numerics or Numerics(),
            ownership=self._ownership,
            world_ranks=self.world_ranks,
            first_step=first_step,
            sees_all=len(self._observed) == scenario.world.size,
        )
        self._owed = owed_of(self._group, reference=reference, order_seed=seed, shared=shared)
        self._steps, self._steps.on_step = self._owed.steps, self._take
        self._after_step = after_step
        self._call_count, self._calls_made = calls_made or int, calls_made
        self._calls_seen: dict[int, int] = {}
        self._skipped: dict[int, bool] = {}
        self._looked: dict[int, list[tuple[int, int]]] = {}
        """By rank: stretches of the log in which its engine gathered what the judge asked for."""
        stop_step = scenario.run.steps if stop_step is None else stop_step
        # What leaks has done so after the second step. Weighing costs as much as comparing.
        self.weighed_step = min(first_step + 1, stop_step - 1)
        self._call_starts: dict[tuple[int, int], int] = {}
        self._parts: dict[int, list[OwnedPart]] = {}
        self._bad_step: int | None = None
        self._begun_step = self._taken_step = first_step - 1
        self._findings: list[Finding] = []

    @staticmethod
    def join_peers(judges: Sequence[Judge]) -> None:
        """Let judges step their references together: every rank of all has built by then."""
        for judge in judges:
            judge._steps.peers = [each._steps for each in judges]

    def findings(self) -> tuple[Finding, ...]:
        """What was found at the first bad step, in the order in which an error travels."""
        return self.judge_report().merged()

    def judge_report(self) -> JudgeReport:
        """All there is to say of this run, as plain data."""
        placed = (findings.with_index(found, self._ownership.shapes) for found in self._findings)
        judged = JudgeReport(
            world_ranks=tuple(self.world_ranks),
            first_step=self.first_step,
            has_started=self.has_started,
            compared_elems=self._group.comparer.elems,
            nonzero_fraction_max=self.nonzero_fraction_max,
            same_data=self.same_data,
            has_stepped=self.has_stepped,
            uncertified_step=self._steps.uncertified_step,
            unobserved=frozenset(self._group.unobserved),
            owed=self.owed,
            bad_step=self._bad_step,
            findings=tuple(
                found if found.rank is None else replace(found, rank=self.world_ranks[found.rank])
                for found in placed
            ),
        )
        return self._owed.exact.add_to(judged)

    def buffer_map(self) -> BufferMap | None:
        """The flat buffer of the first finding that lies in one."""
        judged = self.judge_report()
        for first in judged.merged():
            sharing = self._ownership.places_beside(first.param)
            places = {self.world_ranks[rank]: places for rank, places in sharing.items()}
            found = [finding for finding in judged.findings if finding.check == first.check]
            buffer_map = build_buffer_map(first, found=found, places=places)
            if buffer_map is not None:
                return buffer_map
        return None

    def note_facts(self, rank: int, facts: Facts) -> None:
        """Note what a rank's engine says before the first step: who owns what, and where it lies.

        Args:
            rank: The rank, within the group.
            facts: What it says. Of every rank, also those that are not observed, before any steps.
        """
        self._ownership.note_facts(rank, facts)
        self._group.unobserved.update(facts.unreported)
        self.can_unwrap &= facts.can_unwrap
        if self.has_started:
            self._steps.set_addresses(self._ownership.addresses)
            tell_parts = PARTS not in self._group.unobserved
            self._report(
                self.first_step, self._ownership.check(self.first_step, tell_parts=tell_parts)
            )

    def calls(self) -> Iterator[tuple[tuple[int, ...], SumSite]]:
        """The calls that add gradients, once all ranks were heard; see `Ownership.calls`."""
        return self._ownership.calls()

    def arrange(self, arrangements: Arrangements) -> None:
        """Note how communicators were seen to add, before the first step.

        Args:
            arrangements: By their ranks, within the group.
        """
        self._ownership.arrangements = arrangements

    def observe_load(self, rank: int, engine: CompletedEngine) -> None:
        """Judge what a rank goes on with, right after it has loaded a checkpoint.

        Args:
            rank: The rank, within the group.
            engine: Its engine; params can be read.
        """
        with engine.asked_once():
            # On every rank, whether or not the reference still stands where the load left it.
            engine.parts()
            engine.params()
            engine.settings()
            self._report(self.first_step, self._owed.exact.compare_loaded(engine, rank=rank))

    def begin(self, rank: int, notes: RankNotes) -> None:
        """Note what is known of a rank, which is judged from the next step on.

        Args:
            rank: The rank, within the group.
            notes: Its module, declared costs, and recorders.
        """
        self.notes[rank] = notes
        self._calls_seen[rank] = self._call_count()

    def note_uncosted(self, names: Iterable[str]) -> None:
        """Note what of the ranks' costs is held to nothing."""
        self._group.unobserved.update(names)

    @property
    def places(self) -> Mapping[int, Sequence[Place]]:
        """What each rank tells that it owns, by rank."""
        return self._ownership.places

    @property
    def param_names(self) -> frozenset[str]:
        """Names of the params that any rank of the group trains."""
        return frozenset[str]().union(*self._ownership.held)

    @property
    def has_started(self) -> bool:
        """Whether every rank has built its engine and told of it."""
        return self._ownership.are_all_there

    def before_backward(self, rank: int, step: int, engine: CompletedEngine) -> None:
        """Look at a rank right before the first backward of a step."""
        self._begun_step = max(self._begun_step, step)
        if self._calls_made is not None:
            self._call_starts[rank, step] = self._calls_made()
            # Params of the step before may be looked at in this one.
            self._call_starts.pop((rank, step - 2), None)
        if self._bad_step is not None and self._bad_step < step:
            self._steps.stop_sharing(step)
        with self.aside(rank):
            self._report(step, invariants.check_zero_gradients(engine, step=step, rank=rank))

    def observe(
        self,
        rank: int,
        step: int,
        losses: Sequence[Tensor],
        result: StepResult,
        engine: CompletedEngine,
    ) -> None:
        """Judge all of a rank's state after a step.

        Args:
            rank: The rank, within the judged group.
            step: The step it has just done, from 0.
            losses: Its loss for each micro-batch.
            result: What its engine said of the step.
            engine: Its engine; params may still be in flight.
        """
        with self.aside(rank), engine.asked_once():
            self._query_after_step(rank, step, engine)
            if self._bad_step is not None and step > self._bad_step:
                return
            self._observe(rank, step, losses, result, engine)
        self._close_window(rank, step)

    def _query_after_step(self, rank: int, step: int, engine: CompletedEngine) -> None:
        """Query an engine for everything that may be compared after a step.

        Its answers may take collectives. So the queries follow from the case alone: no finding,
        and nothing that one rank reports, decides whether another rank is queried.
        """
        engine.parts()
        engine.stray_gradients(padding_only=True)
        if self._group.shows_grads_of_params:
            engine.gradients()
        if self._is_weighed(rank, step):
            engine.held_bytes()

    def _is_weighed(self, rank: int, step: int) -> bool:
        """True for the step whose memory is compared, if the target declares any of it."""
        return step == self.weighed_step and self.notes[rank].costs.held is not None

    def _observe(
        self,
        rank: int,
        step: int,
        losses: Sequence[Tensor],
        result: StepResult,
        engine: CompletedEngine,
    ) -> None:
        if self._steps.follows(step):
            self._steps.get(step, told=result.norm)
            if self._steps.uncertified_step is None:
                compare = partial(self._compare, rank, step, losses, result, engine)
                self._hold(step, compare)
                if self._is_weighed(rank, step):
                    self._report(step, self._compare_memory(rank, step, engine))
            else:
                # Whether it was skipped is not owed either: an overflow may depend on the order.
                self._skipped[step] = bool(result.skipped)
        else:
            self._skipped.setdefault(step, bool(result.skipped))

    @contextmanager
    def aside(self, rank: int) -> Iterator[None]:
        """A block in which what a rank calls belongs to no step: for the judge, or a checkpoint."""
        start = self._call_count()
        yield
        stop = self._call_count()
        if stop > start:
            self._looked.setdefault(rank, []).append((start, stop))

    def _close_window(self, rank: int, step: int) -> None:
        """Note what the rank called since its last step ended."""
        start, stop = self._calls_seen.get(rank, 0), self._call_count()
        self._calls_seen[rank] = stop
        self.windows.append(
            StepWindow(
                rank=rank,
                world_rank=self.world_ranks[rank],
                step=step,
                start=start,
                stop=stop,
                skipped=self._skipped[step],
                looked=tuple(self._looked.pop(rank, ())),
            )
        )

    def observe_params(self, rank: int, step: int, engine: CompletedEngine) -> None:
        """Judge a rank's working params, once a step's gathers are done; last look at that step."""
        with self.aside(rank), engine.asked_once():
            # On every rank, whatever was found: see `_query_after_step`.
            engine.params()
            engine.stray_padding()
            if self._bad_step is None or step <= self._bad_step:
                if self._steps.uncertified_step is None:
                    compare = partial(self._compare_params, rank, step, engine)
                    self._hold(step, compare, agreed=self._parts[rank])
                found = check_untrained(engine, group=self._group, step=step, rank=rank)
                self._report(step, found)
        self._observed[rank] = step
        self._forget_shown(step)

    def note_findings(self, step: int, found: Iterator[Finding]) -> None:
        """Note what a check found that needs nothing of the judge.

        Args:
            step: After which step.
            found: Its findings.
        """
        self._report(step, found)

    def step_unseen(self) -> None:
        """Let the references of all peers take a step of which nothing is shown here."""
        if self._steps.steps_unseen:
            self._steps.advance()

    def ask_reference(self) -> None:
        """Let the reference take the step that a rank has begun, if it has not yet.

        Raises:
            UntrainableError: It cannot, or not with finite numbers.
        """
        if self._steps.steps_unseen and self._taken_step < self._begun_step:
            self._steps.fall_back()
            self._steps.advance()

    def _hold(
        self,
        step: int,
        compare: Callable[[], Iterator[Finding]],
        *,
        agreed: Sequence[OwnedPart] = (),
    ) -> None:
        """Report what a comparison finds; with steps from elsewhere, what the own ones find then.

        Args:
            step: Index of the step.
            compare: Compares.
            agreed: Parts that agreed with this step before, and are as they were.
        """
        if not self._steps.is_local:
            noted = self._group.noted()
            if next(compare(), None) is None:
                return
            self._group.go_back(noted)
            self._steps.fall_back()
            for part in agreed:
                self._owed.exact.note_agreed(part, step=step)
        self._report(step, compare())

    def _report(self, step: int, found: Iterator[Finding]) -> None:
        for finding in found:
            is_first = self.first_step and finding.step == self.first_step
            if is_first and finding.phase != Phase.LOAD:
                message = f"{finding.message}, in the first step after the checkpoint was loaded"
                finding = replace(finding, message=message)
            self._findings.append(self._dated(finding))
            self._bad_step = step if self._bad_step is None else min(self._bad_step, step)
        if self._bad_step is not None:
            # Only the first bad step tells where it began.
            self._findings = [f for f in self._findings if f.step in (None, self._bad_step)]

    def _dated(self, finding: Finding) -> Finding:
        """A finding with its place in the event log."""
        if self._calls_made is None:
            return finding
        started = None
        if finding.rank is not None and finding.step is not None:
            started = self._call_starts.get((finding.rank, finding.step))
        return replace(finding, call_start=started, call_stop=self._calls_made())

    def _take(self, taken: AnyStep) -> None:
        """Note a step that the reference has just done."""
        self._forget_shown(taken.step)
        self._taken_step = taken.step
        if self._after_step is not None:
            self._after_step(taken.step)
        self._skipped[taken.step] = taken.skipped
        self.nonzero_fraction_max = max(self.nonzero_fraction_max, taken.nonzero_fraction)
        is_finite = math.isfinite(taken.norm)
        if is_finite:
            self.owed += owed_by(taken, scenario=self.scenario)
        self.has_stepped |= not taken.skipped and is_finite
        self.same_data &= len(set(taken.data_digests.values())) == 1
        # Behind a finding the system's own mistake may have led there.
        if not self._findings:
            check_trainable(taken, self.scenario, world_ranks=self.world_ranks)

    def _forget_shown(self, step: int) -> None:
        """Forget a step once all ranks were shown with it; at once where none ever is."""
        if all(last >= step for last in self._observed.values()):
            self._steps.forget(step)
            self._owed.exact.forget(step)

    def _compare(
        self,
        rank: int,
        step: int,
        losses: Sequence[Tensor],
        result: StepResult,
        engine: CompletedEngine,
    ) -> Iterator[Finding]:
        expected, comparison = self._steps.get(step), self._owed.comparison
        yield from comparison.compare_measured(result, rank=rank, step=step)
        spec, unobserved = self.scenario.optimizer, self._group.unobserved
        yield from check_result(
            result, expected, optimizer=spec, unobserved=unobserved, step=step, rank=rank
        )
        reads = self.notes[rank].reads
        yield from comparison.compare_losses(losses, reads=reads, rank=rank, step=step)
        # Views of live state, looked at once more when the params are there.
        self._parts[rank] = list(engine.parts())
        owned = [part.place for part in self._parts[rank]]
        self._group.telling[rank] = any(part.grad is not None for part in self._parts[rank])
        yield from invariants.check_same_places(
            self._ownership.places[rank], owned, step=step, rank=rank
        )
        for part in self._parts[rank]:
            yield from comparison.compare_part(part, rank=rank, step=step)
        yield from invariants.check_padding(engine, step=step, rank=rank)
        yield from comparison.compare_reported(engine, rank=rank, step=step)

    def _compare_params(self, rank: int, step: int, engine: CompletedEngine) -> Iterator[Finding]:
        params, held = engine.params(), self._ownership.held[rank]
        comparison = self._owed.comparison
        scales = engine.scales([name for name in comparison.scale_names(step) if name in held])
        at: dict[str, Any] = {"comparer": self._group.comparer, "step": step, "rank": rank}
        yield from comparison.compare_scales(scales, rank=rank, step=step)
        yield from check_casts(self._parts[rank], params, scales, **at)
        yield from check_repeated(engine.repeated(), params, **at)
        yield from comparison.compare_params(params, rank=rank, step=step)
        yield from invariants.check_param_padding(engine, step=step, rank=rank)

    def _compare_memory(self, rank: int, step: int, engine: CompletedEngine) -> Iterator[Finding]:
        notes = self.notes[rank]
        if notes.own_bytes is not None:
            yield from check_memory(engine.held_bytes(), notes.own_bytes, step=step, rank=rank)
            return
        owed = bytes_held(
            notes.sizes,
            scenario=self.scenario,
            rank=rank,
            # What state an element has was compared with the reference before.
            stored=sum(
                part.master.numel() * sum(value.dim() > 0 for value in part.state.values())
                for part in self._parts[rank]
            ),
        )
        if PARTS in self._group.unobserved:
            del owed["state"]  # How much of it an element has only parts tell.
        yield from check_memory(engine.held_bytes(), owed, step=step, rank=rank)
        if notes.memory is not None:
            yield from notes.memory.findings()
