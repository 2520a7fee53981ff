"""A session of `zero-sim run`: judge and report cases in turn, return the exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zero_sim.cli.options import RunRequest, imported, left_out_lines
from zero_sim.cli.parts import (
    BUNDLES,
    EXIT_INTERRUPTED,
    EXIT_NOTHING_SELECTED,
    FILE,
    JSON,
    echo_report,
    option,
    stdout_for,
)
from zero_sim.errors import ScenarioError, UsageError, ZeroSimError
from zero_sim.host.packages import packages_needed
from zero_sim.host.terminal import columns_of, takes_codes
from zero_sim.report.commands import replay_command, reproduce_command

if TYPE_CHECKING:
    from zero_sim.findings.records import CaseResult
    from zero_sim.scenario.discover import Case
    from zero_sim.scenario.spec import Scenario

# The progress of a shorter case would only flicker.
PROGRESS_AFTER_SECONDS = 0.5
# File systems limit names to 255 bytes; an index and a suffix are added.
TRACE_NAME_CHARS_MAX = 120
CASES_SHOWN_MAX = 40
"""About a screen. If there are more cases, passing cases are counted instead of listed."""
_COVERED = "features and pairs of features are covered without it"

Judge = Callable[["Scenario"], "CaseResult"]

# Exit statuses, the gravest first.
_GRAVITY = (1, 2, 4, 3, 0)
# `error` here has findings. An error without findings is a refused case, status 2; see `_judge`.
_STATUS = {"pass": 0, "fail": 1, "error": 1, "inconclusive": 3}
_DOTS = {"pass": ".", "fail": "F", "error": "E", "inconclusive": "?"}
DOTS_A_ROW = 50
_COLOURS = {"pass": "green", "fail": "red", "error": "red", "inconclusive": "yellow"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Options for the output of a run."""

    bundles: Path = option("--bundles", **BUNDLES)
    no_bundles: bool = option(
        "--no-bundles", is_flag=True, help="Write no bundles of failed cases."
    )
    trace: Path | None = option(
        "--trace",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write a Chrome trace. With several cases, FILE becomes a folder with a trace per "
        "case. Refuses a named pipe that has no reader.",
    )
    junit: Path | None = option(
        "--junit",
        type=FILE,
        metavar="FILE",
        help="Write JUnit XML for CI services. Refuses a named pipe that has no reader.",
    )
    verbose: bool = option(
        "-v",
        "--verbose",
        is_flag=True,
        help="Show every passing case with its notes. By default, passing cases are only counted "
        "if there are more than 40 cases.",
    )
    as_json: bool = option("--json", **JSON)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    result: CaseResult
    source: dict[str, str | None]
    """Scenario file, command that runs only this case, and bundle id."""
    text: str
    """Full report for JUnit XML; empty without `--junit`."""


@dataclass(kw_only=True, slots=True)
class Session:
    """Options and results so far."""

    request: RunRequest
    outputs: Outputs
    junit: Path | None
    """File for JUnit XML. None without `--junit`, and on all processes but the first."""
    errors: Sequence[ScenarioError] = ()
    passed_over: Counter[str] = field(default_factory=Counter)
    """Number of skipped cases by reason."""
    selected: Sequence[Case] = ()
    judged: list[_Judged] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    traced: int = 0
    """Number of trace files written."""
    interrupted: bool = False
    started: float = field(default_factory=time.perf_counter)
    begun: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))

    def select(self, cases: Sequence[Case], why_left_out: Callable[[Scenario], str]) -> list[Case]:
        """Return the cases that can be judged with these options, and count the skipped cases.

        Raises:
            UsageError: The target does not exist.
        """
        overridden = [self.request.with_overrides(case.scenario) for case in cases]
        # Cheap checks first: the last two import the target.
        reasons = [
            self.request.why_order_needed(each)
            or why_left_out(each)
            or self.request.why_package_missing(each)
            or self.request.why_refused(each, as_written=case.scenario)
            for each, case in zip(overridden, cases, strict=True)
        ]
        # The summary lists skipped cases by reason, so that none is dropped silently.
        self.passed_over.update(reason for reason in reasons if reason)
        able = [case for case, reason in zip(cases, reasons, strict=True) if not reason]
        return self._cover(able) if self.request.covering else able

    @property
    def results(self) -> list[CaseResult]:
        """Results of all cases so far."""
        return [each.result for each in self.judged]

    @property
    def left_out(self) -> int:
        """Number of cases not judged after an interrupt."""
        return len(self.selected) - len(self.judged) if self.interrupted else 0

    @property
    def _bundles(self) -> Path | None:
        """Folder for bundles of failed cases; None to write no bundles."""
        # Real processes record no events, so a run on them cannot be replayed.
        none = self.outputs.no_bundles or self.request.backend != "sim"
        return None if none else self.outputs.bundles

    def _cover(self, cases: Sequence[Case]) -> list[Case]:
        """Return a subset that covers each file, feature and feature pair."""
        with packages_needed():
            from zero_sim.fuzz.coverage import covering
        overridden = [self.request.with_overrides(case.scenario) for case in cases]
        # With the file as label, each file keeps at least one case.
        chosen = covering(overridden, labels=[str(case.source) for case in cases])
        self.passed_over[_COVERED] += len(cases) - len(chosen)
        return [cases[index] for index in chosen]

    def run(
        self, cases: Sequence[Case], judging: Callable[[], AbstractContextManager[Judge]]
    ) -> int:
        """Judge the cases, print everything, and return the exit status."""
        # Invalid files are reported, and valid files are still judged.
        self.report_problems()
        if not cases and not self.errors:
            return self.finish_empty("no case that can be judged with these options")
        # Open the judge only now, because this imports torch and starts worlds.
        if cases:
            with judging() as judge:
                self.run_all(cases, judge)
        return self.finish()

    def finish_empty(self, have: str) -> int:
        """Report that nothing was selected, and return the exit status."""
        left_out = "".join(f"; {line}" for line in left_out_lines(self.passed_over))
        click.echo(f"Nothing selected: {have}{left_out}.", err=True)
        # Write JSON and JUnit even without a case, because consumers expect a file.
        if self.outputs.as_json:
            echo_report(self.as_dict(status=EXIT_NOTHING_SELECTED))
        self._write_junit()
        return EXIT_NOTHING_SELECTED

    def report_problems(self) -> None:
        """Print the problems of invalid scenario files."""
        from zero_sim.report.text import render_problems

        if self.errors and not self.outputs.as_json:
            click.echo(render_problems(self.errors), err=True)
        self.statuses.extend(error.exit_status for error in self.errors)

    def run_all(self, cases: Sequence[Case], judge: Judge) -> None:
        """Judge cases in turn; stop at an interrupt."""
        self.selected = cases
        try:
            for index, case in enumerate(cases):
                with progress(f"{index + 1} of {len(cases)}  {case.id}"):
                    result, status = self._judge(case, judge)
                self._note(case, result, status)
                self._show_progress()
        except KeyboardInterrupt:
            # Do not raise again: the results so far are still printed.
            self.interrupted = True
            where = cases[len(self.judged)].id if self.left_out else "the last case"
            click.echo(f"\nInterrupted during {where}.", err=True)

    def _show_progress(self) -> None:
        """Print a dot or letter for the last case on stderr, if cases are not listed."""
        if self._shows_each or self.outputs.as_json:
            return
        done, total = len(self.judged), len(self.selected)
        click.echo(_DOTS[self.results[-1].verdict], err=True, nl=False)
        if done % DOTS_A_ROW == 0 or done == total:
            padding = " " * (-done % DOTS_A_ROW)
            click.echo(f"{padding}  [{done:,}/{total:,}]", err=True)

    def _end_row(self) -> None:
        """Begin a new line after dots, because the report of a case follows."""
        # Minus one, because the current case is in `judged` but has no dot yet.
        if not self._shows_each and (len(self.judged) - 1) % DOTS_A_ROW:
            click.echo(err=True)

    @property
    def _shows_each(self) -> bool:
        """True if passing cases are listed."""
        return self.outputs.verbose or len(self.selected) <= CASES_SHOWN_MAX

    def _note(self, case: Case, result: CaseResult, status: int) -> None:
        """Keep a result, write its files, and print it."""
        from zero_sim.report.text import id_width, render_case
        from zero_sim.scenario.dump import to_chosen_toml

        # If a twin failed, show and reproduce the twin.
        request, scenario = self.request, result.twin or case.scenario
        command = reproduce_command(
            case.source,
            case.file_id,
            stall_seconds=request.stall_seconds,
            target=request.target,
            options=request.again,
        )
        bundle, again = self._write_bundle(case, result), ""
        if bundle is not None:
            again = replay_command(
                bundle, bundles=self._bundles, target=request.target, device=request.device
            )
        if result.logs:
            self._write_trace(case, result)
        texts = {"case": to_chosen_toml(scenario), "reproduce": command, "replay": again}
        self.judged.append(
            _Judged(
                # Drop the logs: they are large and no longer needed.
                result=dataclasses.replace(result, logs=()),
                source={"source": str(case.source), "reproduce": command, "bundle": bundle},
                text="" if self.junit is None else render_case(result, **texts),
            )
        )
        self.statuses.append(status)
        if not self.outputs.as_json and (self._shows_each or result.verdict != "pass"):
            self._end_row()
            # All ids of a run share a column.
            width = id_width(case.id for case in self.selected)
            with_notes = self.outputs.verbose or len(self.selected) == 1
            columns = columns_of(sys.stdout)
            text = render_case(result, width=width, columns=columns, with_notes=with_notes, **texts)
            click.echo(coloured(text, result.verdict))

    def finish(self) -> int:
        """Print the summary and return the exit status."""
        from zero_sim.findings.records import taken_notes
        from zero_sim.report.text import render_observed, render_summary

        self._write_junit()
        # After the JUnit file, because a failed write adds its status.
        status = EXIT_INTERRUPTED if self.interrupted else _gravest(self.statuses)
        if self.outputs.as_json:
            echo_report(self.as_dict(status=status))
        else:
            results = self.results
            summary = render_summary(
                results,
                seconds=self._seconds(),
                bad_files=len(self.errors),
                left_out=self.left_out,
            )
            # A single case already shows this in its notes.
            if len(results) > 1:
                if observed := render_observed(results):
                    click.echo(observed)
                for taken in sorted({note for each in results for note in taken_notes(each)}):
                    click.echo(taken)
            click.echo(summary)
            if self.traced > 1:
                click.echo(
                    f"traces: {self.traced} files in the folder {self.outputs.trace}; "
                    f"`zero-sim fingerprint {self.outputs.trace}` reads them"
                )
            for line in left_out_lines(self.passed_over):
                click.echo(line)
        return status

    def as_dict(self, *, status: int) -> dict[str, object]:
        """Return all results, ready for JSON."""
        cases = [{**each.result.as_dict(), **each.source} for each in self.judged]
        problems = [
            {
                "source": error.source,
                "path": problem.path,
                "message": problem.message,
                "suggestion": problem.suggestion,
            }
            for error in self.errors
            for problem in error.problems
        ]
        return {
            "cases": cases,
            "problems": problems,
            "seconds": self._seconds(),
            "interrupted": self.interrupted,
            "not_run": self.left_out,
            "left_out": dict(self.passed_over),
            "exit_status": status,
        }

    def _write_junit(self) -> None:
        if self.junit is None:
            return
        from zero_sim.report.junit import TestCase, case_of, file_of, junit_xml, write_junit

        cases = [
            case_of(
                each.result,
                scenario=self.request.with_overrides(case.scenario),
                source=str(case.source),
                text=each.text,
            )
            # Not strict: after an interrupt, fewer cases are judged than selected.
            for case, each in zip(self.selected, self.judged, strict=False)
        ]
        # Report cases after an interrupt as skipped, so that test counts of runs are comparable.
        left = [
            TestCase(name=case.id, source=str(case.source), outcome="skipped", message="not run")
            for case in self.selected[len(self.judged) :]
        ]
        files = [file_of(error) for error in self.errors]
        document = junit_xml(
            [*files, *cases, *left], seconds=self._seconds(), started=self.begun.isoformat()
        )
        try:
            write_junit(self.junit, document)
        except ZeroSimError as error:
            # Do not raise: verdicts must still be printed. The exit status reports the failed
            # write.
            click.echo(f"Error: {error}", err=True)
            self.statuses.append(error.exit_status)

    def _seconds(self) -> float:
        return time.perf_counter() - self.started

    def _write_bundle(self, case: Case, result: CaseResult) -> str | None:
        folder = self._bundles
        if folder is None or result.verdict != "fail" or not result.findings:
            return None
        from zero_sim.bundle import Ran, write_bundle

        try:
            scenario = result.twin or self.request.in_world(case.scenario)
            ran = Ran(target=imported(self.request.target) or "", device=self.request.device)
            return write_bundle(scenario, result, folder=folder, ran=ran).name
        except OSError as error:
            # A full disk must not cost the other cases their verdict.
            click.echo(f"No bundle of {case.id} in {folder}: {error.strerror}.", err=True)
            return None

    def _write_trace(self, case: Case, result: CaseResult) -> None:
        from zero_sim.report.traces import write_chrome_trace

        path = self.outputs.trace
        if path is None:
            return
        # Ids are cut and lose characters, so the index keeps names unique.
        if len(self.selected) > 1:
            words = re.sub(r"[^\w.=,+-]+", "_", case.id)
            path = path / f"{len(self.judged):04}-{words[:TRACE_NAME_CHARS_MAX]}.json"
        try:
            write_chrome_trace(path, result.logs, name=case.id)
            self.traced += 1
        except ZeroSimError as error:
            # The case keeps its verdict; the exit status reports the failed write.
            click.echo(f"No trace of {case.id}: {error}", err=True)
            self.statuses.append(error.exit_status)

    def _judge(self, case: Case, judge: Judge) -> tuple[CaseResult, int]:
        from zero_sim.findings.records import not_judged, unforeseen

        started = time.perf_counter()
        scenario = self.request.with_overrides(case.scenario)
        try:
            with stdout_for(as_json=self.outputs.as_json):
                result = judge(scenario)
        except ZeroSimError as error:
            seconds = time.perf_counter() - started
            return not_judged(case.id, str(error), seconds=seconds), error.exit_status
        # A bug in one case must not cost the other cases their verdicts.
        except Exception as error:  # noqa: BLE001
            seconds = time.perf_counter() - started
            return unforeseen(error, id=case.id, seconds=seconds), _STATUS["error"]
        # An error without findings means that the judge found the scenario impossible.
        refused = result.verdict == "error" and not result.findings
        return result, UsageError.exit_status if refused else _STATUS[result.verdict]


def _gravest(statuses: Sequence[int]) -> int:
    # Several statuses may apply, but a process has a single one.
    return min(statuses, key=_GRAVITY.index, default=0)


def coloured(text: str, verdict: str) -> str:
    """Return the text with its first word in the verdict's colour if stdout is a terminal."""
    if not takes_codes(sys.stdout):
        return text
    mark, _, rest = text.partition(" ")
    return f"{click.style(mark, fg=_COLOURS[verdict], bold=True)} {rest}"


@contextlib.contextmanager
def progress(label: str) -> Iterator[None]:
    """Show a label and the elapsed time if stderr is a terminal; erase them at the end."""
    if not takes_codes(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # Redirecting would send a piped stdout to the terminal.
    progress = Progress(
        SpinnerColumn("line"),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    # The length of a case is unknown, so show elapsed time, not a bar.
    progress.add_task(label)
    timer = threading.Timer(PROGRESS_AFTER_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # Wait for a start in progress, or the display would start after it was stopped.
        timer.join()
        progress.stop()
