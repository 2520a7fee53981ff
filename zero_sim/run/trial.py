"""A trial: one case as one process runs it, segment by segment, until something is wrong.

A simulated world has all ranks in one process, a real one has a process for each. What differs
stands behind `Ranks`; what is run, who judges it and whom an error is charged to do not differ.
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
from zero_sim.targets import Target, check_asked, rules_of
from zero_sim.targets.rank_local import why_not_judged


class Ranks(Protocol):
    """The ranks that a process runs: those of a simulated world, or the one that it is."""

    def run(self, segment: Segment, index: int, trial: Trial, *, target: Target) -> None:
        """Run some consecutive steps in one world.

        Args:
            segment: The steps.
            index: Its number in the case.
            trial: Seats the ranks, and gets what is found besides the judges.
            target: The system under test.

        Raises:
            RankFailed: A rank raised.
        """
        ...

    def is_wrong_anywhere(self, index: int, is_wrong_here: bool) -> bool:
        """Whether anything was found in a segment, by this process or by another."""
        ...


@dataclass(kw_only=True, slots=True)
class Trial:
    """A case while it runs: what one process has seen so far."""

    device: str = "cpu"
    """Where its ranks and references compute."""
    added_in: str | None = None
    """The order in which the backend adds; None for the one that the case names."""
    judges: list[Judge] = field(default_factory=list)
    references: dict[int, AnyReference] = field(default_factory=dict)
    """By number of the group; they live on when a checkpoint moves the case to another world."""
    outcome: Outcome = field(default_factory=Outcome)
    found: list[Finding] = field(default_factory=list)
    """What is wrong besides what the judges found."""
    failure: Failure | None = None
    drifts: Sequence[str] = ()
    """Where the backend adds otherwise than the case relies on; then it was not judged."""
    measured: Sequence[str] = ()
    """How communicators were seen to add."""
    other_version: str = ""
    """The installed version of the judged library, in words; empty for the judged one."""
    raised_at: float | None = None
    """When a rank raised, where that was a while ago."""

    def run(
        self,
        segments: Sequence[Segment],
        ranks: Ranks,
        *,
        find: Callable[[], Target],
        rank_threads: int = 1,
    ) -> None:
        """Run the segments of a case until something is wrong.

        Args:
            segments: All of them, in order.
            ranks: Those of this process.
            find: Gives the system under test.
            rank_threads: Threads of this process that compute, at most.
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
            target = find()
            self.other_version = why_not_judged(target)
            check_asked(target, segment.scenario)
            for index, segment in enumerate(segments):
                ranks.run(segment, index, self, target=target)
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
        """Say why this process goes no further.

        Args:
            error: What was raised.
            kind: Whom it is charged to; left out where its type says so.
            rank: The rank that raised it.
            traceback_text: Its traceback.
        """
        kind = kind or _kind_of(error)
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
        """Build the context of every dp-cp group; arguments as for `contexts.build_contexts`."""
        contexts = build_contexts(
            segment,
            references=self.references,
            target=target,
            device=self.device,
            added_in=self.added_in,
            view=view,
        )
        self.judges.extend(context.judge for context in contexts)
        if segment.load is None:
            self._note_trust(contexts[0], target=target)
        return contexts

    def _note_trust(self, context: GroupContext, *, target: Target) -> None:
        """Note an update rule that the reference takes from the target."""
        scenario = context.dp_cp_group.scenario
        if scenario.pair is not None:
            self.outcome.notes.append("params and state are compared with those of another layout")
        if scenario.pair is not None or scenario.optimizer.name != "own":
            return
        # Here, because hardly any case needs it.
        from zero_sim.judge.nearest import trust_in_words

        rules = rules_of(target, scenario)
        module = context.workload.build()
        params = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self.outcome.notes.extend(trust_in_words(rules, spec=scenario.optimizer, params=params))

    def is_wrong(self) -> bool:
        """Whether anything was found so far."""
        return bool(self.found) or any(judge.findings() for judge in self.judges)

    def report(self, *, with_buffer_maps: bool = False) -> Report:
        """All there is to say.

        Args:
            with_buffer_maps: Whether buffers of findings are drawn; then all ranks are in one
                process.
        """
        return Report(
            judged=[judge.judge_report() for judge in self.judges],
            found=self.found,
            failure=self.failure,
            drifts=self.drifts,
            measured=self.measured,
            accuracy=self.outcome.accuracy,
            other_version=self.other_version,
            said=self.outcome.notes,
            buffer_maps=[judge.buffer_map() for judge in self.judges] if with_buffer_maps else (),
        )

    def _charge(self, failed: RankFailed, *, segment: Segment) -> None:
        """Charge what a rank raised to whom it belongs: the machine, the user, us, or the system.

        A refusal once all engines were built, or of a checkpoint, is the system's failure.
        """
        error, kind = failed.error, _kind_of(failed.error)
        has_started = bool(self.judges) and all(judge.has_started for judge in self.judges)
        is_refusal = kind == "user" and not isinstance(error, ProtocolError | UntrainableError)
        if is_refusal and (has_started or segment.load is not None):
            kind = "system"
        is_asked = has_started and not self.is_wrong() and not segment.scenario.faults
        if kind == "system" and is_asked:
            try:
                self._ask_references(segment)
            except (EnvironmentProblem, UntrainableError, JudgeFailed) as of_ours:
                error, kind = of_ours, _kind_of(of_ours)
        self.fail(error, kind=kind, rank=failed.rank, traceback_text=failed.traceback_text)

    def _ask_references(self, segment: Segment) -> None:
        """Let the references take the step in which a rank failed.

        Raises:
            UntrainableError: They cannot either.
            JudgeFailed: They fail otherwise.
        """
        with RankTime().harness():
            for judge in self.judges:
                if judge.group.first_step == segment.start:
                    judge.ask_reference()


def _kind_of(error: BaseException) -> FailureKind:
    """Whom an error is charged to by its type."""
    match error:
        case EnvironmentProblem():
            return "machine"
        case JudgeFailed():
            return "judge"
        case UsageError():
            return "user"
    return "system"
