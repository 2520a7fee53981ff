"""Book of a run: where the steps of each rank lie in the event log, and the first bad step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from zero_sim.cost.volume import StepWindow
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding


class StepBook:
    """Notes when ranks begin and end their steps, in calls of the event log.

    Args:
        world_ranks: The ranks of the group, as findings name them.
        first_step: The first step that is judged.
        calls_made: Returns how many calls the world has logged; None if there is no log.
    """

    def __init__(
        self,
        world_ranks: Sequence[int],
        *,
        first_step: int,
        calls_made: Callable[[], int] | None,
    ) -> None:
        self.windows: list[StepWindow] = []
        """Where the steps of all ranks lie in the log."""
        self.begun_step = first_step - 1
        """The last step that any rank has begun."""
        self.skipped: dict[int, bool] = {}
        """By step: True if nothing was updated in it."""
        self._world_ranks = world_ranks
        self._calls_made = calls_made
        self._count = calls_made or int
        self._ends: dict[int, int] = {}
        """By rank: where its last step ended."""
        self._starts: dict[tuple[int, int], int] = {}
        """By rank and step: where its first backward began."""
        self._aside: dict[int, list[tuple[int, int]]] = {}
        """By rank: stretches of the log, since its last step, that belong to no step."""

    def begin(self, rank: int) -> None:
        """Note that the first step of a rank comes next."""
        self._ends[rank] = self._count()

    def begin_backward(self, rank: int, step: int) -> None:
        """Note that the first backward of a step comes next."""
        self.begun_step = max(self.begun_step, step)
        if self._calls_made is not None:
            self._starts[rank, step] = self._calls_made()
            # Params of the step before may be looked at in this one.
            self._starts.pop((rank, step - 2), None)

    @contextmanager
    def aside(self, rank: int) -> Iterator[None]:
        """A block in which what a rank calls belongs to no step: for the judge, or a checkpoint."""
        start = self._count()
        yield
        stop = self._count()
        if stop > start:
            self._aside.setdefault(rank, []).append((start, stop))

    def end(self, rank: int, step: int) -> None:
        """Note what the rank called since its last step ended."""
        start, stop = self._ends.get(rank, 0), self._count()
        self._ends[rank] = stop
        self.windows.append(
            StepWindow(
                rank=rank,
                world_rank=self._world_ranks[rank],
                step=step,
                start=start,
                stop=stop,
                skipped=self.skipped[step],
                looked=tuple(self._aside.pop(rank, ())),
            )
        )

    def dated(self, finding: Finding) -> Finding:
        """Return a finding with its place in the event log."""
        if self._calls_made is None:
            return finding
        started = None
        if finding.rank is not None and finding.step is not None:
            started = self._starts.get((finding.rank, finding.step))
        return replace(finding, call_start=started, call_stop=self._calls_made())


class FirstBadStep:
    """Findings of the first step at which anything is wrong.

    Args:
        first_step: The first step that is judged; more than 0 after a checkpoint was reloaded.
        book: Dates findings.
    """

    def __init__(self, *, first_step: int, book: StepBook) -> None:
        self.step: int | None = None
        """The step; None as long as nothing is wrong."""
        self.findings: list[Finding] = []
        self._first_step = first_step
        self._book = book

    def is_before(self, step: int) -> bool:
        """Return whether anything was wrong before a step."""
        return self.step is not None and self.step < step

    def report(self, step: int, found: Iterator[Finding]) -> None:
        """Add findings, if they are of the first bad step.

        Args:
            step: After which step.
            found: Findings; ranks are those of the group.
        """
        for finding in found:
            is_first = self._first_step and finding.step == self._first_step
            if is_first and finding.phase != Phase.LOAD:
                message = f"{finding.message}, in the first step after the checkpoint was loaded"
                finding = replace(finding, message=message)
            self.findings.append(self._book.dated(finding))
            self.step = step if self.step is None else min(self.step, step)
        if self.step is not None:
            # Only the first bad step tells where it began.
            self.findings = [each for each in self.findings if each.step in (None, self.step)]
