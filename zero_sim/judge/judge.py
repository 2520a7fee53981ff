"""The judge: compares each rank's state with the reference after every step.

Rank programs call the judge directly after a step, one rank at a time, before anything changes the
state. So the judge copies tensors only if they differ.

If each rank is a process, its judge observes only this rank. It receives the other ranks' facts
before the first step, and may receive the reference's steps from another process.
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
from zero_sim.judge.checks.observed_step import ObservedStep, RankNotes
from zero_sim.judge.comparison import AnyReference, expected_steps_of
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
    """Judges a group of ranks, and collects findings in its first bad step.

    If groups share a norm, connect their judges by `join_peers`.

    Args:
        group: The judged group.
        reference: The oracle, before the first step.
        order_seed: World seed, from which orders are drawn.
        observed_ranks: Group ranks that this judge observes.
        weighed_step: The only step whose memory is compared, because measuring is slow.
        calls_made: Returns the length of the world's call log; None without a log.
        after_step: Called with the index of each step that the reference has taken.
        shared: Steps from other processes or earlier cases; None to take all steps here.
    """

    def __init__(
        self,
        group: JudgedGroup,
        *,
        reference: AnyReference | LateReference,
        order_seed: int,
        observed_ranks: Iterable[int],
        weighed_step: int,
        calls_made: Callable[[], int] | None,
        after_step: Callable[[int], None],
        shared: SharedSteps | None,
    ) -> None:
        first_step = group.first_step
        self.group = group
        self.weighed_step = weighed_step
        self.notes: dict[int, RankNotes] = {}
        """Notes by rank, from `begin` on."""
        self.book = StepBook(group.world_ranks, first_step=first_step, calls_made=calls_made)
        self.bad = FirstBadStep(first_step=first_step, book=self.book)
        self._coverage = Coverage(group.scenario, first_step=first_step)
        self._observed_steps = dict.fromkeys(observed_ranks, first_step - 1)
        """Last observed step, by observed rank."""
        self._parts: dict[int, Sequence[OwnedPart]] = {}
        """Owned parts after a rank's last step, by rank."""
        self._expected = expected_steps_of(
            group, reference=reference, order_seed=order_seed, shared=shared
        )
        self._expected.steps.on_step = self._take
        self._after_step = after_step

    @staticmethod
    def join_peers(judges: Sequence[Judge]) -> None:
        """Connect judges whose groups share a norm, so their references step together.

        Args:
            judges: All judges of the world, once all ranks have built their engines.
        """
        for judge in judges:
            # The list includes the judge's own steps.
            judge._expected.steps.peers = [each._expected.steps for each in judges]

    @property
    def has_started(self) -> bool:
        """True if every rank has built its engine and reported its facts."""
        return self.group.ownership.are_all_there

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of the first bad step, in dataflow order."""
        return self.judge_report().merged()

    def judge_report(self) -> JudgeReport:
        """Return this judge's report as plain data."""
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
            uncertified_step=self._expected.steps.uncertified_step,
            unobserved=self._coverage.unobserved.union(self.group.unobserved),
            guarantees=self._coverage.guarantees,
            bad_step=self.bad.step,
            # Findings have group ranks until here. Reports have world ranks.
            findings=tuple(
                found
                if found.rank is None
                else replace(found, rank=self.group.world_ranks[found.rank])
                for found in placed
            ),
        )
        return self._expected.exact.add_to(judged)

    def buffer_map(self) -> BufferMap | None:
        """Return the buffer map of the first finding that lies in a flat buffer."""
        judged = self.judge_report()
        for first in judged.merged():
            # Only ranks that share the param own parts of its buffer.
            sharing = self.group.ownership.places_beside(first.param)
            places = {self.group.world_ranks[rank]: places for rank, places in sharing.items()}
            # All findings of this check, so that the map shows their pattern.
            found = [finding for finding in judged.findings if finding.check == first.check]
            buffer_map = build_buffer_map(first, found=found, places=places)
            if buffer_map is not None:
                return buffer_map
        return None

    def note_facts(self, rank: int, facts: Facts) -> None:
        """Record a rank's facts, before the first step. Every rank must report, observed or not.

        Args:
            rank: Group rank.
            facts: Facts about its engine.
        """
        ownership, step = self.group.ownership, self.group.first_step
        ownership.note_facts(rank, facts)
        self.group.unobserved.update(facts.unreported)
        if self.has_started:
            # All ranks have reported, so set up the reference and check ownership. Start values
            # before addresses, as `Steps.start_from` requires.
            if ownership.drawn:
                self._expected.steps.start_from(ownership.drawn)
            self._expected.steps.set_addresses(ownership.addresses)
            has_parts = PARTS not in self.group.unobserved
            self.bad.report(step, ownership.check(step, has_parts=has_parts))

    def observe_load(self, rank: int, engine: EngineAdapter) -> None:
        """Judge a rank's state after it has loaded a checkpoint.

        Args:
            rank: Group rank.
            engine: Its engine, with readable params.
        """
        with engine.queried_once():
            # Query on every rank, even if the reference is past the load, because queries may be
            # collective.
            engine.parts()
            engine.params()
            engine.settings()
            found = self._expected.exact.compare_loaded(engine, rank=rank)
            self.bad.report(self.group.first_step, found)

    def begin(self, rank: int, notes: RankNotes) -> None:
        """Start judging a rank, from its next step on.

        Args:
            rank: Group rank.
            notes: Sizes of its module, declared costs, and recorders.
        """
        self.notes[rank] = notes
        self.book.begin(rank)

    def before_backward(self, rank: int, step: int, engine: EngineAdapter) -> None:
        """Check a rank directly before the first backward of a step."""
        self.book.begin_backward(rank, step)
        if self.bad.is_before(step):
            # This group has a finding, so other processes must take their own steps.
            self._expected.steps.stop_sharing(step)
        with self.book.aside(rank):
            observed = self._observed_step(rank, step, engine)
            self.bad.report(step, table.run_checks(table.BEFORE_BACKWARD, observed))

    def observe_evaluation(self, rank: int, step: int, trained: Tensor, evaluated: Tensor) -> None:
        """Compare a rank's loss under `no_grad` with the training loss of the same micro-batch."""
        # Both forwards read the same params, so the losses must be equal. The reference does not
        # compute a loss under `no_grad`.
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
            rank: Group rank.
            step: The completed step.
            losses: Losses by micro-batch.
            result: Returned by the engine's step.
            engine: The engine. Its params may still be in flight.
        """
        with self.book.aside(rank), engine.queried_once():
            # Before any early return, so that all ranks make the same queries.
            self._query_after_step(rank, step, engine)
            if self.bad.is_before(step):
                # Findings of later steps are consequences of the first.
                return
            self._observe(self._observed_step(rank, step, engine, losses=losses, result=result))
        # Outside of the block, which excludes the judge's own calls from the step.
        self.book.end(rank, step)

    def _query_after_step(self, rank: int, step: int, engine: EngineAdapter) -> None:
        """Query an engine for everything that may be compared after a step."""
        # Queries may be collective, so they must only depend on the case. If they depended on a
        # rank's findings or reports, ranks would make different calls and deadlock.
        # Views of live state, read again once params are gathered.
        self._parts[rank] = list(engine.parts())
        if self.group.recorder is not None:
            self.group.recorder.note_parts(step, self._parts[rank])
        engine.stray_gradients(padding_only=True)
        if self.group.shows_grads_of_params:
            engine.gradients()
        if self._is_weighed(rank, step):
            engine.held_bytes()

    def _is_weighed(self, rank: int, step: int) -> bool:
        """Return True if memory is compared after this step and the target declares its memory."""
        return step == self.weighed_step and self.notes[rank].costs.held is not None

    def _observe(self, observed: ObservedStep) -> None:
        steps, rank, step, skipped = (
            self._expected.steps,
            observed.rank,
            observed.step,
            self.book.skipped,
        )
        if not steps.follows(step):
            # The reference cannot take this step, so only record the system's skip.
            skipped.setdefault(step, bool(observed.result.skipped))
            return
        # With numerics norm = "reported", the reference clips by the reported norm.
        steps.get(step, reported_norm=observed.result.norm)
        if steps.uncertified_step is not None:
            # Overflow may depend on the order of addition, so even a skip is not judged.
            skipped[step] = bool(observed.result.skipped)
            return
        # A rank that reports any gradient must report all.
        self.group.reporting[rank] = any(part.grad is not None for part in observed.parts)
        self._compare(table.AFTER_STEP, observed)
        if self._is_weighed(rank, step):
            self.bad.report(step, table.run_checks(table.WEIGHED, observed))

    def observe_params(self, rank: int, step: int, engine: EngineAdapter) -> None:
        """Judge a rank's working params once they are gathered; the last checks of a step."""
        with self.book.aside(rank), engine.queried_once():
            # On every rank, regardless of findings: see `_query_after_step`.
            params = engine.params()
            if self.group.recorder is not None and PARTS in self.group.unobserved:
                self.group.recorder.note_params(step, params)
            # Also on every rank. `queried_once` caches the result for the check.
            engine.stray_padding()
            if not self.bad.is_before(step):
                observed = self._observed_step(rank, step, engine, params=params)
                if self._expected.steps.uncertified_step is None:
                    # If steps are still shared, `observe` found that these parts agree.
                    self._compare(table.AFTER_GATHER, observed, agreed=observed.parts)
                self.bad.report(step, table.run_checks(table.AFTER_GATHER_ALWAYS, observed))
        self._observed_steps[rank] = step
        self._forget_observed(step)

    def step_unseen(self) -> None:
        """Take a step with the references of all peers, if no rank is observed in it."""
        if self._expected.steps.steps_unseen:
            self._expected.steps.advance()

    def advance_reference(self) -> None:
        """Take the begun step with the reference, unless it was taken already.

        Raises:
            UntrainableError: If the step's result is not finite.
        """
        steps = self._expected.steps
        # With an unknown order, a step needs reported params, so it cannot be taken ahead.
        if steps.steps_unseen and self._coverage.taken_step < self.book.begun_step:
            steps.fall_back()
            steps.advance()

    def _observed_step(
        self, rank: int, step: int, engine: EngineAdapter, **seen: Any
    ) -> ObservedStep:
        return ObservedStep(
            rank=rank,
            step=step,
            engine=engine,
            notes=self.notes[rank],
            group=self.group,
            expected_steps=self._expected,
            parts=self._parts.get(rank, ()),
            **seen,
        )

    def _compare(
        self,
        checks: Sequence[table.RankCheck],
        observed: ObservedStep,
        *,
        agreed: Sequence[OwnedPart] = (),
    ) -> None:
        """Run checks and report their findings.

        If steps are shared and a check fails, fall back to local steps and run all checks again.

        Args:
            checks: The checks.
            observed: The rank's state.
            agreed: Parts that agreed with this step in an earlier check.
        """
        steps, step = self._expected.steps, observed.step
        if not steps.is_local:
            # Digests and another case's steps suffice for a pass, but not for a finding.
            noted = self.group.noted()
            if next(table.run_checks(checks, observed), None) is None:
                return
            # Undo counts and notes, because the checks run again.
            self.group.go_back(noted)
            steps.fall_back()
            for part in agreed:
                self._expected.exact.note_agreed(part, rank=observed.rank, step=step)
        self.bad.report(step, table.run_checks(checks, observed))

    def _take(self, taken: AnyStep) -> None:
        """Record a step of the reference."""
        self._forget_observed(taken.step)
        self._after_step(taken.step)
        self.book.skipped[taken.step] = taken.skipped
        self._coverage.note(taken)
        # After a finding, the system's bug may be the cause.
        if not self.bad.findings:
            check_trainable(taken, self.group.scenario, world_ranks=self.group.world_ranks)

    def _forget_observed(self, step: int) -> None:
        """Drop a step once all observed ranks have passed it, or at once without any."""
        if all(last >= step for last in self._observed_steps.values()):
            self._expected.steps.forget(step)
            self._expected.exact.forget(step)
