"""Run of a case in one process, segment by segment, until there is a finding.

A simulated world has all ranks in one process, whereas each real rank has its own process. `Ranks`
covers the differences. Programs, judges and the blame for errors are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from zero_sim.errors import EnvironmentProblem, ProtocolError, UntrainableError, UsageError
from zero_sim.findings.records import Finding
from zero_sim.host.device import computing_on
from zero_sim.judge.comparison import AnyReference
from zero_sim.judge.harness import JudgeFailed, RankTime
from zero_sim.judge.judge import Judge
from zero_sim.run.contexts import View, build_contexts
from zero_sim.run.program import GroupContext, Outcome, Segment
from zero_sim.run.reports import Failure, FailureKind, Report
from zero_sim.sim import RankFailed
from zero_sim.targets import Target, check_supported, rules_of
from zero_sim.targets.rank_local import why_not_judged


class Ranks(Protocol):
    """Ranks that a process runs: a whole simulated world, or its own rank."""

    def run(self, segment: Segment, index: int, running: RunningCase, *, target: Target) -> None:
        """Run consecutive steps in one world.

        Args:
            segment: The steps.
            index: The segment's index in the case.
            running: Builds the ranks' contexts, and receives findings that judges do not have.
            target: The system under test.

        Raises:
            RankFailed: A rank raised.
        """
        ...

    def is_wrong_anywhere(self, index: int, is_wrong_here: bool) -> bool:
        """Return True if any process has a finding in a segment."""
        ...


@dataclass(kw_only=True, slots=True)
class RunningCase:
    """A running case's state in one process."""

    device: str = "cpu"
    """Device for ranks and references."""
    added_in: str | None = None
    """Order in which the backend adds; None for the case's order."""
    judges: list[Judge] = field(default_factory=list)
    references: dict[int, AnyReference] = field(default_factory=dict)
    """References by group index. They continue after a reload into another world."""
    outcome: Outcome = field(default_factory=Outcome)
    found: list[Finding] = field(default_factory=list)
    """Findings that judges do not have."""
    failure: Failure | None = None
    # The next three are as in `Report`.
    drifts: Sequence[str] = ()
    measured: Sequence[str] = ()
    other_version: str = ""
    raised_at: float | None = None
    """Time at which a rank raised; None for the time at which its failure is recorded."""

    def run(
        self,
        segments: Sequence[Segment],
        ranks: Ranks,
        *,
        find: Callable[[], Target],
        rank_threads: int = 1,
    ) -> None:
        """Run a case's segments until there is a finding.

        `find` returns the system under test. This process has at most `rank_threads` ranks.
        """
        try:
            with computing_on(self.device, rank_threads=rank_threads) as settled:
                self.outcome.notes.extend(settled)
                self._run(segments, ranks, find=find)
        except EnvironmentProblem as error:
            self.fail(error)

    def _run(
        self, segments: Sequence[Segment], ranks: Ranks, *, find: Callable[[], Target]
    ) -> None:
        segment = segments[0]
        try:
            # Within `try`, because finding a target may raise errors of the user or the machine.
            target = find()
            self.other_version = why_not_judged(target)
            check_supported(target, segment.scenario)
            for index, segment in enumerate(segments):
                ranks.run(segment, index, self, target=target)
                # Stop after a finding, because a checkpoint carries wrong values into the next
                # world.
                is_last = index + 1 == len(segments)
                if is_last or ranks.is_wrong_anywhere(index, self.is_wrong()):
                    break
        except RankFailed as failed:
            self._charge(failed, segment=segment)
        except (EnvironmentProblem, UsageError, JudgeFailed) as error:
            self.fail(error)

    def fail(
        self,
        error: BaseException,
        *,
        kind: FailureKind | None = None,
        rank: int | None = None,
        traceback_text: str = "",
    ) -> None:
        """Record the error that ends the case in this process.

        `kind` is the party to charge, by default derived from the error's type.
        """
        kind = kind or _kind_of(error)
        # Our own errors are worded for users. A system's error also needs its class name.
        name = f"{type(error).__name__}: " if kind == "system" else ""
        self.failure = Failure(
            kind=kind,
            message=f"{name}{error}",
            detail=error.traceback_text
            if isinstance(error, JudgeFailed)
            else traceback_text.rstrip(),
            rank=rank,
            time=time.time() if self.raised_at is None else self.raised_at,
        )

    def build_contexts(
        self, segment: Segment, *, target: Target, view: View
    ) -> Sequence[GroupContext]:
        """Build all dp-cp groups' contexts; arguments as for `contexts.build_contexts`."""
        contexts = build_contexts(
            segment,
            references=self.references,
            target=target,
            device=self.device,
            added_in=self.added_in,
            view=view,
        )
        self.judges.extend(context.judge for context in contexts)
        # Only once, because a later segment has the same rule.
        if segment.load is None:
            self._note_trust(contexts[0], target=target)
        return contexts

    def _note_trust(self, context: GroupContext, *, target: Target) -> None:
        """Note the things that this case takes on trust: a second layout, the target's own rule."""
        scenario = context.dp_cp_group.scenario
        if scenario.pair is not None:
            self.outcome.notes.append("params and state are compared with those of another layout")
        if scenario.pair is not None or scenario.optimizer.name != "own":
            return
        # Imported here, because few cases need it.
        from zero_sim.judge.nearest import trust_in_words

        rules = rules_of(target, scenario)
        module = context.workload.build()
        params = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self.outcome.notes.extend(trust_in_words(rules, spec=scenario.optimizer, params=params))

    def is_wrong(self) -> bool:
        """Return True if there is a finding."""
        return bool(self.found) or any(judge.findings() for judge in self.judges)

    def report(self, *, with_buffer_maps: bool = False) -> Report:
        """Return this process's report. Buffer maps need all ranks in this process."""
        return Report(
            judged=[judge.judge_report() for judge in self.judges],
            found=self.found,
            failure=self.failure,
            drifts=self.drifts,
            measured=self.measured,
            accuracy=self.outcome.accuracy,
            other_version=self.other_version,
            system_notes=self.outcome.notes,
            buffer_maps=[judge.buffer_map() for judge in self.judges] if with_buffer_maps else (),
        )

    def _charge(self, failed: RankFailed, *, segment: Segment) -> None:
        """Charge a rank's error to the machine, the user, the harness or the system."""
        error, kind = failed.error, _kind_of(failed.error)
        # While engines are built, a refusal of settings is the user's mistake. Later, or while a
        # checkpoint is loaded, it is the system's failure.
        has_started = bool(self.judges) and all(judge.has_started for judge in self.judges)
        is_refusal = kind == "user" and not isinstance(error, ProtocolError | UntrainableError)
        if is_refusal and (has_started or segment.load is not None):
            kind = "system"
        is_asked = has_started and not self.is_wrong() and not segment.scenario.faults
        if kind == "system" and is_asked:
            try:
                # If references cannot compute this step either, the system is not to blame.
                self._advance_references(segment)
            except (EnvironmentProblem, UntrainableError, JudgeFailed) as of_ours:
                error, kind = of_ours, _kind_of(of_ours)
        self.fail(error, kind=kind, rank=failed.rank, traceback_text=failed.traceback_text)

    def _advance_references(self, segment: Segment) -> None:
        """Let references compute the failed step; they raise if they cannot."""
        with RankTime().harness():
            for judge in self.judges:
                # Only judges of the failed segment.
                if judge.group.first_step == segment.start:
                    judge.advance_reference()


def _kind_of(error: BaseException) -> FailureKind:
    match error:
        case EnvironmentProblem():
            return "machine"
        case JudgeFailed():
            return "judge"
        case UsageError():
            return "user"
    return "system"
