"""One `zero-sim run`: its cases one after another, what is told of each, and the exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from zero_sim.cli.options import left_out_lines
from zero_sim.cli.parts import EXIT_INTERRUPTED, EXIT_NOTHING_SELECTED, echo_report
from zero_sim.errors import ScenarioError, UsageError, ZeroSimError
from zero_sim.host.packages import packages_needed
from zero_sim.host.terminal import takes_codes
from zero_sim.report.commands import replay_command, reproduce_command

if TYPE_CHECKING:
    from zero_sim.findings.records import CaseResult
    from zero_sim.scenario.discover import Case
    from zero_sim.scenario.spec import Scenario

PROGRESS_AFTER_SECONDS = 0.5
TRACE_NAME_CHARS_MAX = 120
CASES_SHOWN_MAX = 40
"""A screenful: of more cases, those that pass are only counted."""
_COVERED = "features and pairs of features are covered without it"

Judge = Callable[["Scenario"], "CaseResult"]

_GRAVITY = (1, 2, 4, 3, 0)
"""Exit statuses, the one that outweighs the others first."""
_STATUS = {"pass": 0, "fail": 1, "error": 1, "inconclusive": 3}
_COLOURS = {"pass": "green", "fail": "red", "error": "red", "inconclusive": "yellow"}


@dataclass(kw_only=True, slots=True)
class Session:
    """One `run`: what was asked, what came of it so far."""

    as_json: bool = False
    errors: Sequence[ScenarioError] = ()
    bundles: Path | None = None
    """Where bundles of failing cases go, if anywhere."""
    trace: Path | None = None
    """Where Chrome traces go, if anywhere."""
    junit: Path | None = None
    """Where JUnit XML goes, if anywhere."""
    stall_seconds: float | None = None
    """In place of what the scenarios say; None for theirs."""
    target: str | None = None
    """In place of what the scenarios say; None for theirs."""
    device: str = "cpu"
    """Where simulated ranks and the reference compute."""
    world: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `world` in place of what the scenarios say."""
    options: Sequence[str] = ()
    """Other options that the same verdict needs."""
    only_able: bool = False
    """Whether cases that their target cannot be asked for are left out; else they are errors."""
    covering: bool = False
    """True to run few cases that have every feature, and pair of features, of all."""
    verbose: bool = False
    """True to show every case that passes, with its notes."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """How many cases cannot be judged in the way that was asked for, by why."""
    selected: Sequence[Case] = ()
    results: list[CaseResult] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """All there is to say of each, where JUnit XML is asked for."""
    sources: list[dict[str, str | None]] = field(default_factory=list)
    """Of each result: the file, the command that runs it alone, and the id of its bundle."""
    statuses: list[int] = field(default_factory=list)
    left_out: int = 0
    interrupted: bool = False
    started: float = field(default_factory=time.perf_counter)
    begun: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    stdout: TextIO = field(default_factory=lambda: sys.stdout)

    def select(self, cases: Sequence[Case], why_left_out: Callable[[Scenario], str]) -> list[Case]:
        """The cases that can be judged as they are asked for; counts the others.

        Raises:
            UsageError: There is no such target.
        """
        asked = self.as_asked(cases)
        reasons = [
            self._why_order_needed(each)
            or why_left_out(each)
            or self._why_package_missing(each)
            or self._why_order_refused(each, case.scenario)
            or self._why_not_able(each)
            for each, case in zip(asked, cases, strict=True)
        ]
        self.passed_over.update(reason for reason in reasons if reason)
        able = [case for case, reason in zip(cases, reasons, strict=True) if not reason]
        return self._cover(able) if self.covering else able

    def _cover(self, cases: Sequence[Case]) -> list[Case]:
        """Few of the cases, one of each file and more for features and pairs; counts the others."""
        with packages_needed():
            from zero_sim.fuzz.covering import covering
        chosen = covering(self.as_asked(cases), labels=[str(case.source) for case in cases])
        self.passed_over[_COVERED] += len(cases) - len(chosen)
        return [cases[index] for index in chosen]

    def run(
        self, cases: Sequence[Case], judging: Callable[[], AbstractContextManager[Judge]]
    ) -> int:
        """Judge the cases, if any, and tell all; the exit status."""
        self.report_problems()
        if not cases and not self.errors:
            return self.finish_empty("no case that can be judged as asked")
        if cases:
            with judging() as judge:
                self.run_all(cases, judge)
        return self.finish()

    def finish_empty(self, have: str) -> int:
        """Say that there is nothing to run; the exit status."""
        left_out = "".join(f"; {line}" for line in left_out_lines(self.passed_over))
        click.echo(f"Nothing selected: {have}{left_out}.", err=True)
        if self.as_json:
            echo_report(self.as_dict(status=EXIT_NOTHING_SELECTED))
        self._write_junit()
        return EXIT_NOTHING_SELECTED

    def report_problems(self) -> None:
        """Show what is wrong with files that are no scenarios."""
        from zero_sim.report.text import render_problems

        if self.errors and not self.as_json:
            click.echo(render_problems(self.errors), err=True)
        self.statuses.extend(error.exit_status for error in self.errors)

    def run_all(self, cases: Sequence[Case], judge: Judge) -> None:
        """Judge one case after another, until all are or somebody interrupts."""
        self.selected = cases
        try:
            for index, case in enumerate(cases):
                with progress(f"{index + 1} of {len(cases)}  {case.id}"):
                    result, status = self._judge(case, judge)
                self._note(case, result, status)
                self._show_progress()
        except KeyboardInterrupt:
            self.interrupted = True
            self.left_out = len(cases) - len(self.results)
            where = cases[len(self.results)].id if self.left_out else "the last case"
            click.echo(f"\nInterrupted during {where}.", err=True)

    def _show_progress(self) -> None:
        """Print a line at each tenth of many cases, of which those that pass are not shown."""
        done, total = len(self.results), len(self.selected)
        is_tenth = done * 10 // total > (done - 1) * 10 // total
        if is_tenth and not self._shows_each and not self.as_json:
            passed = sum(result.verdict == "pass" for result in self.results)
            click.echo(f"{done:,} of {total:,} cases, {passed:,} passed", err=True)

    @property
    def _shows_each(self) -> bool:
        """True if each case that passes has its line."""
        return self.verbose or len(self.selected) <= CASES_SHOWN_MAX

    def _note(self, case: Case, result: CaseResult, status: int) -> None:
        """Keep a result, write what is asked of it, and show it."""
        from zero_sim.report.text import id_width, render_case
        from zero_sim.scenario.dump import to_chosen_toml

        index = len(self.results)
        command = reproduce_command(
            case.source,
            case.file_id,
            stall_seconds=self.stall_seconds,
            target=self.target,
            options=self.options,
        )
        bundle = self._write_bundle(case, result)
        if self.trace is not None and result.logs:
            self._write_trace(case, result, number=index if len(self.selected) > 1 else None)
        # Logs are large, and all that is told of them is told below.
        self.results.append(dataclasses.replace(result, logs=()))
        self.statuses.append(status)
        source = {"source": str(case.source), "reproduce": command, "bundle": bundle}
        self.sources.append(source)
        again = ""
        if bundle is not None and self.bundles is not None:
            again = replay_command(
                bundle, bundles=self.bundles, target=self.target, device=self.device
            )
        said = {
            "case": to_chosen_toml(result.twin or case.scenario),
            "reproduce": command,
            "replay": again,
        }
        if self.junit is not None:
            self.texts.append(render_case(result, **said))
        if not self.as_json and (self._shows_each or result.verdict != "pass"):
            width = id_width(case.id for case in self.selected)
            with_notes = self.verbose or len(self.selected) == 1
            text = render_case(result, width=width, with_notes=with_notes, **said)
            click.echo(coloured(text, result.verdict))

    def finish(self) -> int:
        """Show the summary; the exit status."""
        from zero_sim.findings.records import taken_notes
        from zero_sim.report.text import render_observed, render_summary

        self._write_junit()
        status = EXIT_INTERRUPTED if self.interrupted else _gravest(self.statuses)
        if self.as_json:
            echo_report(self.as_dict(status=status))
        else:
            summary = render_summary(
                self.results,
                seconds=self._seconds(),
                bad_files=len(self.errors),
                left_out=self.left_out,
            )
            if len(self.results) > 1 and (observed := render_observed(self.results)):
                click.echo(observed)
            if len(self.results) > 1:
                for taken in sorted({note for each in self.results for note in taken_notes(each)}):
                    click.echo(taken)
            click.echo(summary)
            for line in left_out_lines(self.passed_over):
                click.echo(line)
        return status

    def as_dict(self, *, status: int) -> dict[str, object]:
        """Everything, ready for JSON."""
        cases = [
            {**result.as_dict(), **source}
            for result, source in zip(self.results, self.sources, strict=True)
        ]
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

        rows = zip(self.selected, self.results, self.texts, strict=False)
        cases = [
            case_of(
                result, scenario=self._as_asked(case.scenario), source=str(case.source), text=text
            )
            for case, result, text in rows
        ]
        left = [
            TestCase(name=case.id, source=str(case.source), outcome="skipped", message="not run")
            for case in self.selected[len(self.results) :]
        ]
        files = [file_of(error) for error in self.errors]
        document = junit_xml(
            [*files, *cases, *left], seconds=self._seconds(), started=self.begun.isoformat()
        )
        try:
            write_junit(self.junit, document)
        except ZeroSimError as error:
            # Cases keep their verdicts.
            click.echo(f"Error: {error}", err=True)
            self.statuses.append(error.exit_status)

    def _seconds(self) -> float:
        return time.perf_counter() - self.started

    def _write_bundle(self, case: Case, result: CaseResult) -> str | None:
        if self.bundles is None or result.verdict != "fail" or not result.findings:
            return None
        from zero_sim.bundle import Ran, write_bundle

        try:
            scenario = result.twin or self._in_world_asked(case.scenario)
            ran = Ran(target=self._imported or "", device=self.device)
            return write_bundle(scenario, result, folder=self.bundles, ran=ran).name
        except OSError as error:
            # A full disk must not cost the other cases their verdict.
            click.echo(f"No bundle of {case.id} in {self.bundles}: {error.strerror}.", err=True)
            return None

    def _write_trace(self, case: Case, result: CaseResult, *, number: int | None) -> None:
        from zero_sim.report.chrome_trace import write_chrome_trace

        assert self.trace is not None
        path = self.trace
        if number is not None:
            words = re.sub(r"[^\w.=,+-]+", "_", case.id)
            path = path / f"{number:04}-{words[:TRACE_NAME_CHARS_MAX]}.json"
        try:
            write_chrome_trace(path, result.logs, name=case.id)
        except ZeroSimError as error:
            click.echo(f"No trace of {case.id}: {error}", err=True)
            self.statuses.append(error.exit_status)

    def _why_order_needed(self, scenario: Scenario) -> str:
        from zero_sim.scenario.conditions import why_order_matters

        why = why_order_matters(scenario)
        return (
            f"its order must be known: it has {why}" if why and "order_known" in self.world else ""
        )

    def _why_package_missing(self, scenario: Scenario) -> str:
        """Why a case's own target cannot run here; one that was asked for is an error instead."""
        from zero_sim.scenario.spec import SystemSpec

        if self.target is not None or scenario.system.target == SystemSpec().target:
            return ""
        with packages_needed():
            from zero_sim.targets import find_target, library_target_names, why_missing
        if scenario.system.target not in library_target_names():
            return ""
        return why_missing(find_target(scenario.system.target))

    def _why_order_refused(self, scenario: Scenario, as_written: Scenario) -> str:
        """Why its target refuses a case for the order that was asked for.

        What a target refuses of a case as it is written is a mistake in that case, and is told when
        the case is judged.
        """
        if "order" not in self.world:
            return ""
        with packages_needed():
            from zero_sim.targets import import_target, refusals
        # The cases of a registered one name it; see `of_target`.
        target = import_target(self._imported or scenario.system.target)
        problems = refusals(target, scenario)
        if not problems or refusals(target, as_written):
            return ""
        if "order_known" in self.world:
            paths = ", ".join(problem.path for problem in problems)
            return f"target {target.name!r} must know its order: {paths}"
        return f"target {target.name!r} does not support world.order = {scenario.world.order!r}"

    def _why_not_able(self, scenario: Scenario) -> str:
        """Why its target cannot be asked for a case, where such cases are not wanted."""
        if not self.only_able:
            return ""
        with packages_needed():
            from zero_sim.targets import import_target, refusals
        target = import_target(self._imported or scenario.system.target)
        problems = refusals(target, scenario)
        return f"target {target.name!r} cannot be asked for {problems[0].path}" if problems else ""

    @property
    def _imported(self) -> str | None:
        return self.target if self.target is not None and ":" in self.target else None

    def as_asked(self, cases: Sequence[Case]) -> list[Scenario]:
        """The scenarios of cases with what the command line puts in the place of what they say."""
        return [self._as_asked(case.scenario) for case in cases]

    def _as_asked(self, scenario: Scenario) -> Scenario:
        """A scenario with what the command line puts in the place of what it says."""
        return _with_stall_limit(self._in_world_asked(scenario), self.stall_seconds)

    def _in_world_asked(self, scenario: Scenario) -> Scenario:
        world = dataclasses.replace(scenario.world, **self.world)
        return dataclasses.replace(scenario, world=world)

    def _judge(self, case: Case, judge: Judge) -> tuple[CaseResult, int]:
        from zero_sim.findings.records import not_judged, unforeseen

        started = time.perf_counter()
        scenario = self._as_asked(case.scenario)
        # What a model prints must not end up in the middle of the JSON.
        out = contextlib.redirect_stdout(sys.stderr) if self.as_json else contextlib.nullcontext()
        try:
            with out:
                result = judge(scenario)
        except ZeroSimError as error:
            seconds = time.perf_counter() - started
            return not_judged(case.id, str(error), seconds=seconds), error.exit_status
        # One case's bug must not cost the others their verdict.
        except Exception as error:  # noqa: BLE001
            seconds = time.perf_counter() - started
            return unforeseen(error, id=case.id, seconds=seconds), _STATUS["error"]
        # Without a finding, the judge refused a scenario that only it could see is not possible.
        refused = result.verdict == "error" and not result.findings
        return result, UsageError.exit_status if refused else _STATUS[result.verdict]


def of_target(case: Case, target: str | None, *, options: Mapping[str, str]) -> Case:
    """The case of a registered target, so that its bundle names it, with options of its own.

    Args:
        case: As its file has it.
        target: What `--target` says; one that is imported a case does not name.
        options: What `--option` says, by name.
    """
    from zero_sim.scenario.derived import with_options

    scenario = with_options(case.scenario, options) if options else case.scenario
    if target is not None and ":" not in target:
        system = dataclasses.replace(scenario.system, target=target)
        scenario = dataclasses.replace(scenario, system=system)
    return case if scenario is case.scenario else dataclasses.replace(case, scenario=scenario)


def _gravest(statuses: Sequence[int]) -> int:
    return min(statuses, key=_GRAVITY.index, default=0)


def _with_stall_limit(scenario: Scenario, seconds: float | None) -> Scenario:
    if seconds is None:
        return scenario
    return dataclasses.replace(
        scenario, run=dataclasses.replace(scenario.run, stall_seconds=seconds)
    )


def coloured(text: str, verdict: str) -> str:
    """The text with its first word in the verdict's colour, on a terminal."""
    if not takes_codes(sys.stdout):
        return text
    mark, _, rest = text.partition(" ")
    return f"{click.style(mark, fg=_COLOURS[verdict], bold=True)} {rest}"


@contextlib.contextmanager
def progress(label: str) -> Iterator[None]:
    """Show what runs and for how long, on a terminal's stderr only; gone before the result is.

    A case that is over sooner than one would begin to wonder never shows anything.
    """
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
    progress.add_task(label)
    timer = threading.Timer(PROGRESS_AFTER_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
