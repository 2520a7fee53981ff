"""The judge: compares everything a rank holds with the reference, after every step.

A judge is called by the rank programs themselves, one rank at a time, right after a step and before
anything else changes the state; so nothing is copied unless a difference is found.

Where every rank is a process of its own, each has a judge that observes that one rank, hears of
the others what they say before their first step, and may hear what the reference of one of them
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from zero_sim.findings import describe as findings
from zero_sim.findings.buffer_map import build_buffer_map
from zero_sim.findings.records import BufferMap, Finding
from zero_sim.judge.checks import table
from zero_sim.judge.checks.shown import RankNotes, Shown
from zero_sim.judge.comparison import AnyReference, owed_of
from zero_sim.judge.coverage import Coverage, check_trainable
from zero_sim.judge.facts import Facts
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.step_book import FirstBadStep, StepBook
from zero_sim.judge.step_source import AnyStep, SharedSteps
from zero_sim.judge.trajectory import LateReference
from zero_sim.targets import CompletedEngine, OwnedPart, StepResult
from zero_sim.targets.adapt import PARTS


class Judge:
    """Judges one run; collects findings of the first step at which anything is wrong.

    Args:
        group: The judged group of ranks.
        reference: The oracle, at the step before the first one.
        order_seed: Seed of the world, from which orders are drawn.
        observed: The ranks, within the group, that this judge is shown.
        weighed_step: The step whose memory is compared; weighing costs as much as comparing.
        calls_made: How many calls the world has logged, for findings to say where in the log they
            stand; None if there is no log.
        after_step: Called with every step that the reference has taken, before the next one.
        shared: Steps that other processes take, or that earlier cases took; None to take all here.

    Judges of one world that share a norm have to be told of each other by `join_peers`.
    """

    def __init__(
        self,
        group: JudgedGroup,
        *,
        reference: AnyReference | LateReference,
        order_seed: int,
        observed: Iterable[int],
        weighed_step: int,
        calls_made: Callable[[], int] | None,
        after_step: Callable[[int], None],
        shared: SharedSteps | None,
    ) -> None:
        first_step = group.first_step
        self.group = group
        self.weighed_step = weighed_step
        self.notes: dict[int, RankNotes] = {}
        """By rank that has begun."""
        self.book = StepBook(group.world_ranks, first_step=first_step, calls_made=calls_made)
        self.bad = FirstBadStep(first_step=first_step, book=self.book)
        self._coverage = Coverage(group.scenario, first_step=first_step)
        self._shown_steps = dict.fromkeys(observed, first_step - 1)
        """By rank that is shown: the last step at which it was."""
        self._parts: dict[int, Sequence[OwnedPart]] = {}
        """By rank: what it owns, as after its last step."""
        self._owed = owed_of(group, reference=reference, order_seed=order_seed, shared=shared)
        self._owed.steps.on_step = self._take
        self._after_step = after_step

    @staticmethod
    def join_peers(judges: Sequence[Judge]) -> None:
        """Let judges step their references together: every rank of all has built by then."""
        for judge in judges:
            judge._owed.steps.peers = [each._owed.steps for each in judges]

    @property
    def has_started(self) -> bool:
        """Whether every rank has built its engine and told of it."""
        return self.group.ownership.are_all_there

    def findings(self) -> tuple[Finding, ...]:
        """What was found at the first bad step, in the order in which an error travels."""
        return self.judge_report().merged()

    def judge_report(self) -> JudgeReport:
        """All there is to say of this run, as plain data."""
        placed = (
            findings.with_index(found, self.group.ownership.shapes) for found in self.bad.findings
        )
        judged = JudgeReport(
            world_ranks=tuple(self.group.world_ranks),
            first_step=self.group.first_step,
            has_started=self.has_started,
            compared_elems=self.group.comparer.elems,
            nonzero_fraction_max=self._coverage.nonzero_fraction_max,
            same_data=self._coverage.same_data,
            has_stepped=self._coverage.has_stepped,
            uncertified_step=self._owed.steps.uncertified_step,
            unobserved=self._coverage.unobserved.union(self.group.unobserved),
            owed=self._coverage.owed,
            bad_step=self.bad.step,
            findings=tuple(
                found
                if found.rank is None
                else replace(found, rank=self.group.world_ranks[found.rank])
                for found in placed
            ),
        )
        return self._owed.exact.add_to(judged)

    def buffer_map(self) -> BufferMap | None:
        """The flat buffer of the first finding that lies in one."""
        judged = self.judge_report()
        for first in judged.merged():
            sharing = self.group.ownership.places_beside(first.param)
            places = {self.group.world_ranks[rank]: places for rank, places in sharing.items()}
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
        ownership, step = self.group.ownership, self.group.first_step
        ownership.note_facts(rank, facts)
        self.group.unobserved.update(facts.unreported)
        if self.has_started:
            if ownership.drawn:
                self._owed.steps.start_from(ownership.drawn)
            self._owed.steps.set_addresses(ownership.addresses)
            tell_parts = PARTS not in self.group.unobserved
            self.bad.report(step, ownership.check(step, tell_parts=tell_parts))

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
            found = self._owed.exact.compare_loaded(engine, rank=rank)
            self.bad.report(self.group.first_step, found)

    def begin(self, rank: int, notes: RankNotes) -> None:
        """Note what is known of a rank, which is judged from the next step on.

        Args:
            rank: The rank, within the group.
            notes: Its module, declared costs, and recorders.
        """
        self.notes[rank] = notes
        self.book.begin(rank)

    def before_backward(self, rank: int, step: int, engine: CompletedEngine) -> None:
        """Look at a rank right before the first backward of a step."""
        self.book.begin_backward(rank, step)
        if self.bad.is_before(step):
            self._owed.steps.stop_sharing(step)
        with self.book.aside(rank):
            shown = self._shown(rank, step, engine)
            self.bad.report(step, table.run_checks(table.BEFORE_BACKWARD, shown))

    def observe_evaluation(self, rank: int, step: int, trained: Tensor, evaluated: Tensor) -> None:
        """Compare a rank's loss under `no_grad` with that of the same micro-batch in training.

        The reference has the latter alone: both read the same params.
        """
        if not self.bad.is_before(step) and self.group.comparer.differs(trained, evaluated):
            found = findings.differing(findings.evaluated_loss(step, rank), trained, evaluated)
            self.bad.report(step, iter((found,)))

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
        with self.book.aside(rank), engine.asked_once():
            self._query_after_step(rank, step, engine)
            if self.bad.is_before(step):
                return
            self._observe(self._shown(rank, step, engine, losses=losses, result=result))
        self.book.end(rank, step)

    def _query_after_step(self, rank: int, step: int, engine: CompletedEngine) -> None:
        """Query an engine for everything that may be compared after a step.

        Its answers may take collectives. So the queries follow from the case alone: no finding,
        and nothing that one rank reports, decides whether another rank is queried.
        """
        # Views of live state, looked at once more when the params are there.
        self._parts[rank] = list(engine.parts())
        if self.group.recorder is not None:
            self.group.recorder.note_parts(step, self._parts[rank])
        engine.stray_gradients(padding_only=True)
        if self.group.shows_grads_of_params:
            engine.gradients()
        if self._is_weighed(rank, step):
            engine.held_bytes()

    def _is_weighed(self, rank: int, step: int) -> bool:
        """True for the step whose memory is compared, if the target declares any of it."""
        return step == self.weighed_step and self.notes[rank].costs.held is not None

    def _observe(self, shown: Shown) -> None:
        steps, rank, step, skipped = self._owed.steps, shown.rank, shown.step, self.book.skipped
        if not steps.follows(step):
            skipped.setdefault(step, bool(shown.result.skipped))
            return
        steps.get(step, told=shown.result.norm)
        if steps.uncertified_step is not None:
            # Whether it was skipped is not owed either: an overflow may depend on the order.
            skipped[step] = bool(shown.result.skipped)
            return
        self.group.telling[rank] = any(part.grad is not None for part in shown.parts)
        self._compare(table.AFTER_STEP, shown)
        if self._is_weighed(rank, step):
            self.bad.report(step, table.run_checks(table.WEIGHED, shown))

    def observe_params(self, rank: int, step: int, engine: CompletedEngine) -> None:
        """Judge a rank's working params, once a step's gathers are done; last look at that step."""
        with self.book.aside(rank), engine.asked_once():
            # On every rank, whatever was found: see `_query_after_step`.
            params = engine.params()
            if self.group.recorder is not None and PARTS in self.group.unobserved:
                self.group.recorder.note_params(step, params)
            engine.stray_padding()
            if not self.bad.is_before(step):
                shown = self._shown(rank, step, engine, params=params)
                if self._owed.steps.uncertified_step is None:
                    self._compare(table.AFTER_GATHER, shown, agreed=shown.parts)
                self.bad.report(step, table.run_checks(table.AFTER_GATHER_ALWAYS, shown))
        self._shown_steps[rank] = step
        self._forget_shown(step)

    def step_unseen(self) -> None:
        """Let the references of all peers take a step of which nothing is shown here."""
        if self._owed.steps.steps_unseen:
            self._owed.steps.advance()

    def ask_reference(self) -> None:
        """Let the reference take the step that a rank has begun, if it has not yet.

        Raises:
            UntrainableError: It cannot, or not with finite numbers.
        """
        steps = self._owed.steps
        if steps.steps_unseen and self._coverage.taken_step < self.book.begun_step:
            steps.fall_back()
            steps.advance()

    def _shown(self, rank: int, step: int, engine: CompletedEngine, **seen: Any) -> Shown:
        return Shown(
            rank=rank,
            step=step,
            engine=engine,
            notes=self.notes[rank],
            group=self.group,
            owed=self._owed,
            parts=self._parts.get(rank, ()),
            **seen,
        )

    def _compare(
        self,
        checks: Sequence[table.RankCheck],
        shown: Shown,
        *,
        agreed: Sequence[OwnedPart] = (),
    ) -> None:
        """Report what checks find; with steps from elsewhere, what they find with own steps then.

        Args:
            checks: The checks.
            shown: What a rank shows.
            agreed: Parts that agreed with this step before, and are as they were.
        """
        steps, step = self._owed.steps, shown.step
        if not steps.is_local:
            noted = self.group.noted()
            if next(table.run_checks(checks, shown), None) is None:
                return
            self.group.go_back(noted)
            steps.fall_back()
            for part in agreed:
                self._owed.exact.note_agreed(part, rank=shown.rank, step=step)
        self.bad.report(step, table.run_checks(checks, shown))

    def _take(self, taken: AnyStep) -> None:
        """Note a step that the reference has just done."""
        self._forget_shown(taken.step)
        self._after_step(taken.step)
        self.book.skipped[taken.step] = taken.skipped
        self._coverage.note(taken)
        # Behind a finding the system's own mistake may have led there.
        if not self.bad.findings:
            check_trainable(taken, self.group.scenario, world_ranks=self.group.world_ranks)

    def _forget_shown(self, step: int) -> None:
        """Forget a step once all ranks were shown with it; at once where none ever is."""
        if all(last >= step for last in self._shown_steps.values()):
            self._owed.steps.forget(step)
            self._owed.exact.forget(step)
