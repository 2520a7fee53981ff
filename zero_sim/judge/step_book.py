"""Positions of steps in the event log, and findings of the first bad step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from zero_sim.cost.volume import StepWindow
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding


class StepBook:
    """Records where steps begin and end, as lengths of the event log.

    Args:
        world_ranks: The group's world ranks, for findings.
        first_step: The first judged step.
        calls_made: Returns the current length of the log; None without a log.
    """

    def __init__(
        self,
        world_ranks: Sequence[int],
        *,
        first_step: int,
        calls_made: Callable[[], int] | None,
    ) -> None:
        self.windows: list[StepWindow] = []
        """Log intervals of all steps, of all ranks."""
        self.begun_step = first_step - 1
        """Last step that any rank has begun."""
        self.skipped: dict[int, bool] = {}
        """True if the step was skipped, by step."""
        self._world_ranks = world_ranks
        self._calls_made = calls_made
        # `int()` is 0, so without a log all intervals are empty.
        self._count = calls_made or int
        self._ends: dict[int, int] = {}
        """End of each rank's last step."""
        self._starts: dict[tuple[int, int], int] = {}
        """Start of the first backward, by rank and step."""
        self._aside: dict[int, list[tuple[int, int]]] = {}
        """Intervals outside of any step, since a rank's last step, by rank."""

    def begin(self, rank: int) -> None:
        """Record that a rank's first step begins."""
        self._ends[rank] = self._count()

    def begin_backward(self, rank: int, step: int) -> None:
        """Record that the first backward of a step begins."""
        self.begun_step = max(self.begun_step, step)
        if self._calls_made is not None:
            self._starts[rank, step] = self._calls_made()
            # Keep the previous step, because its params may be compared during this step.
            self._starts.pop((rank, step - 2), None)

    @contextmanager
    def aside(self, rank: int) -> Iterator[None]:
        """Make a block for calls outside of any step, such as the judge's or a checkpoint's."""
        start = self._count()
        yield
        stop = self._count()
        if stop > start:
            self._aside.setdefault(rank, []).append((start, stop))

    def end(self, rank: int, step: int) -> None:
        """Record the end of a step."""
        # A step includes all calls since the previous step, except for those set aside.
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
        """Add the log interval to a finding."""
        if self._calls_made is None:
            return finding
        started = None
        # Findings about the whole group have no start.
        if finding.rank is not None and finding.step is not None:
            started = self._starts.get((finding.rank, finding.step))
        return replace(finding, call_start=started, call_stop=self._calls_made())


class FirstBadStep:
    """Findings of the first bad step.

    Args:
        first_step: The first judged step. Greater than 0 after a reload.
        book: Locates findings in the event log.
    """

    def __init__(self, *, first_step: int, book: StepBook) -> None:
        self.step: int | None = None
        """The step; None if there are no findings."""
        self.findings: list[Finding] = []
        self._first_step = first_step
        self._book = book

    def is_before(self, step: int) -> bool:
        """Return True if an earlier step has findings."""
        return self.step is not None and self.step < step

    def report(self, step: int, found: Iterator[Finding]) -> None:
        """Add findings if they belong to the first bad step.

        Args:
            step: The checked step.
            found: Findings with group ranks.
        """
        for finding in found:
            # In the first step after a load, the load is the likely cause.
            is_first = self._first_step and finding.step == self._first_step
            if is_first and finding.phase != Phase.LOAD:
                message = f"{finding.message}, in the first step after the checkpoint was loaded"
                finding = replace(finding, message=message)
            self.findings.append(self._book.dated(finding))
            self.step = step if self.step is None else min(self.step, step)
        if self.step is not None:
            # Ranks may be a step apart, so an earlier step's finding may arrive later.
            self.findings = [each for each in self.findings if each.step in (None, self.step)]
