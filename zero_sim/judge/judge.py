"""The judge: compares a rank's state with the reference after every step.

Rank programs call the judge themselves, one rank at a time, directly after a step and before
anything changes the state. So nothing is copied unless a difference is found.

If each rank is a process, each has a judge that observes only that rank. It receives the facts of
the other ranks before their first step, and may receive the steps that one of them computes.
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
from zero_sim.targets import EngineAdapter, OwnedPart, StepResult
from zero_sim.targets.adapt import PARTS


class Judge:
    """Judges one run, and collects findings of the first bad step.

    Args:
        group: The judged group of ranks.
        reference: The oracle, before the first step.
        order_seed: Seed of the world, from which orders are drawn.
        observed: Ranks of the group that this judge observes.
        weighed_step: The step whose memory is compared, because measuring it is slow.
        calls_made: Returns the number of calls in the world's log, to locate findings in it; None
            without a log.
        after_step: Called with each step that the reference has taken, before the next.
        shared: Steps from other processes or earlier cases; None to take all steps here.

    Connect judges of one world that share a norm by `join_peers`.
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
        """Notes by rank, for ranks that have begun."""
        self.book = StepBook(group.world_ranks, first_step=first_step, calls_made=calls_made)
        self.bad = FirstBadStep(first_step=first_step, book=self.book)
        self._coverage = Coverage(group.scenario, first_step=first_step)
        self._shown_steps = dict.fromkeys(observed, first_step - 1)
        """Last observed step, by observed rank."""
        self._parts: dict[int, Sequence[OwnedPart]] = {}
        """Owned parts after a rank's last step, by rank."""
        self._owed = owed_of(group, reference=reference, order_seed=order_seed, shared=shared)
        self._owed.steps.on_step = self._take
        self._after_step = after_step

    @staticmethod
    def join_peers(judges: Sequence[Judge]) -> None:
        """Let judges step their references together, once all ranks have built their engines."""
        for judge in judges:
            # The list includes the judge's own steps.
            judge._owed.steps.peers = [each._owed.steps for each in judges]

    @property
    def has_started(self) -> bool:
        """True if every rank has built its engine and reported its facts."""
        return self.group.ownership.are_all_there

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of the first bad step, in order of dataflow."""
        return self.judge_report().merged()

    def judge_report(self) -> JudgeReport:
        """Return the report of this run, as plain data."""
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
            # Findings have group ranks until here; reports use world ranks.
            findings=tuple(
                found
                if found.rank is None
                else replace(found, rank=self.group.world_ranks[found.rank])
                for found in placed
            ),
        )
        return self._owed.exact.add_to(judged)

    def buffer_map(self) -> BufferMap | None:
        """Return the flat buffer of the first finding that lies in one."""
        judged = self.judge_report()
        for first in judged.merged():
            # Only ranks that share the param own parts of its buffer.
            sharing = self.group.ownership.places_beside(first.param)
            places = {self.group.world_ranks[rank]: places for rank, places in sharing.items()}
            found = [finding for finding in judged.findings if finding.check == first.check]
            # All differences of this check, so the map shows their pattern.
            buffer_map = build_buffer_map(first, found=found, places=places)
            if buffer_map is not None:
                return buffer_map
        return None

    def note_facts(self, rank: int, facts: Facts) -> None:
        """Record the facts of a rank's engine, before the first step.

        Args:
            rank: Rank in the group.
            facts: Facts of the engine. Needed from every rank, observed or not.
        """
        ownership, step = self.group.ownership, self.group.first_step
        ownership.note_facts(rank, facts)
        self.group.unobserved.update(facts.unreported)
        if self.has_started:
            # All ranks are there, so the reference can be set up and ownership checked.
            if ownership.drawn:
                # In this order: see `Steps.start_from`.
                self._owed.steps.start_from(ownership.drawn)
            self._owed.steps.set_addresses(ownership.addresses)
            tell_parts = PARTS not in self.group.unobserved
            self.bad.report(step, ownership.check(step, tell_parts=tell_parts))

    def observe_load(self, rank: int, engine: EngineAdapter) -> None:
        """Judge the state that a rank has loaded from a checkpoint.

        Args:
            rank: Rank in the group.
            engine: Its engine; params can be read.
        """
        with engine.asked_once():
            # Query on every rank, even if the reference is past the load: calls may be collective.
            engine.parts()
            engine.params()
            engine.settings()
            found = self._owed.exact.compare_loaded(engine, rank=rank)
            self.bad.report(self.group.first_step, found)

    def begin(self, rank: int, notes: RankNotes) -> None:
        """Record notes on a rank, which is judged from the next step on.

        Args:
            rank: Rank in the group.
            notes: Its module, declared costs, and recorders.
        """
        self.notes[rank] = notes
        self.book.begin(rank)

    def before_backward(self, rank: int, step: int, engine: EngineAdapter) -> None:
        """Check a rank directly before the first backward of a step."""
        self.book.begin_backward(rank, step)
        if self.bad.is_before(step):
            # After a finding, other processes take their own steps.
            self._owed.steps.stop_sharing(step)
        with self.book.aside(rank):
            shown = self._shown(rank, step, engine)
            self.bad.report(step, table.run_checks(table.BEFORE_BACKWARD, shown))

    def observe_evaluation(self, rank: int, step: int, trained: Tensor, evaluated: Tensor) -> None:
        """Compare a rank's loss under `no_grad` with that of the same micro-batch in training.

        Both forwards read the same params. The reference only computes the training loss.
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
        engine: EngineAdapter,
    ) -> None:
        """Judge a rank's state after a step.

        Args:
            rank: Rank in the judged group.
            step: The completed step, from 0.
            losses: Loss of each micro-batch.
            result: Returned by the engine's step.
            engine: The engine; params may still be in flight.
        """
        with self.book.aside(rank), engine.asked_once():
            # Before any early return, so that all ranks make the same queries.
            self._query_after_step(rank, step, engine)
            if self.bad.is_before(step):
                # Findings of later steps are consequences of the first.
                return
            self._observe(self._shown(rank, step, engine, losses=losses, result=result))
        # After the block, which sets the judge's own calls aside from those of the step.
        self.book.end(rank, step)

    def _query_after_step(self, rank: int, step: int, engine: EngineAdapter) -> None:
        """Query an engine for everything that may be compared after a step.

        Queries may be collective, so they depend on the case only. If findings or reports of one
        rank decided about queries of another, ranks would wait for each other forever.
        """
        # Views of live state, read again once the params are gathered.
        self._parts[rank] = list(engine.parts())
        if self.group.recorder is not None:
            self.group.recorder.note_parts(step, self._parts[rank])
        engine.stray_gradients(padding_only=True)
        if self.group.shows_grads_of_params:
            engine.gradients()
        if self._is_weighed(rank, step):
            engine.held_bytes()

    def _is_weighed(self, rank: int, step: int) -> bool:
        """Return True if memory is compared after this step, because the target declares any."""
        return step == self.weighed_step and self.notes[rank].costs.held is not None

    def _observe(self, shown: Shown) -> None:
        steps, rank, step, skipped = self._owed.steps, shown.rank, shown.step, self.book.skipped
        if not steps.follows(step):
            # The reference cannot take this step; only record whether the system skipped it.
            skipped.setdefault(step, bool(shown.result.skipped))
            return
        # If the target declares norm = "told", the reference clips by the reported norm.
        steps.get(step, told=shown.result.norm)
        if steps.uncertified_step is not None:
            # An overflow may depend on the order of addition, so skipping is not judged either.
            skipped[step] = bool(shown.result.skipped)
            return
        self.group.telling[rank] = any(part.grad is not None for part in shown.parts)
        # A rank that reports any gradient must report all.
        self._compare(table.AFTER_STEP, shown)
        if self._is_weighed(rank, step):
            self.bad.report(step, table.run_checks(table.WEIGHED, shown))

    def observe_params(self, rank: int, step: int, engine: EngineAdapter) -> None:
        """Judge a rank's working params once gathered; the last check of a step."""
        with self.book.aside(rank), engine.asked_once():
            # On every rank, whatever was found: see `_query_after_step`.
            params = engine.params()
            if self.group.recorder is not None and PARTS in self.group.unobserved:
                self.group.recorder.note_params(step, params)
            # On every rank too; the check gets the same answer within `asked_once`.
            engine.stray_padding()
            if not self.bad.is_before(step):
                shown = self._shown(rank, step, engine, params=params)
                if self._owed.steps.uncertified_step is None:
                    # Parts agreed with a shared step in `observe`; else steps are local by now.
                    self._compare(table.AFTER_GATHER, shown, agreed=shown.parts)
                self.bad.report(step, table.run_checks(table.AFTER_GATHER_ALWAYS, shown))
        self._shown_steps[rank] = step
        self._forget_shown(step)

    def step_unseen(self) -> None:
        """Let the references of all peers take a step in which no rank is observed."""
        if self._owed.steps.steps_unseen:
            self._owed.steps.advance()

    def ask_reference(self) -> None:
        """Take the step that a rank has begun, if the reference has not taken it yet.

        Raises:
            UntrainableError: If the step has no finite result.
        """
        steps = self._owed.steps
        # Steps with an unknown order need reported params, so they cannot be taken ahead.
        if steps.steps_unseen and self._coverage.taken_step < self.book.begun_step:
            steps.fall_back()
            steps.advance()

    def _shown(self, rank: int, step: int, engine: EngineAdapter, **seen: Any) -> Shown:
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
        """Report findings; findings on shared steps are replaced by those on the group's own.

        Args:
            checks: The checks.
            shown: State of a rank.
            agreed: Parts that agreed with this step before and have not changed since.
        """
        steps, step = self._owed.steps, shown.step
        if not steps.is_local:
            # Digests, or another case's steps: enough to pass, but not to report a finding.
            noted = self.group.noted()
            if next(table.run_checks(checks, shown), None) is None:
                return
            # Undo counts and notes, because the checks run once more.
            self.group.go_back(noted)
            steps.fall_back()
            for part in agreed:
                self._owed.exact.note_agreed(part, rank=shown.rank, step=step)
        self.bad.report(step, table.run_checks(checks, shown))

    def _take(self, taken: AnyStep) -> None:
        """Record a step that the reference has taken."""
        self._forget_shown(taken.step)
        self._after_step(taken.step)
        self.book.skipped[taken.step] = taken.skipped
        self._coverage.note(taken)
        # After a finding, the system's own mistake may be the cause.
        if not self.bad.findings:
            check_trainable(taken, self.group.scenario, world_ranks=self.group.world_ranks)

    def _forget_shown(self, step: int) -> None:
        """Drop a step once all observed ranks have passed it; at once if none is observed."""
        if all(last >= step for last in self._shown_steps.values()):
            self._owed.steps.forget(step)
            self._owed.exact.forget(step)
