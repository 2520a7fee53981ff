"""The command line: thin commands over `scenario`, `verify` and `report`.

Exit status: 0 all cases passed; 1 a case failed, or an unexpected exception stopped one; 2 a usage
or scenario error; 3 a case was inconclusive; 4 this machine cannot run a case; 5 nothing was
selected; 130 interrupted. Of several, the first of 1, 2, 4, 3 is given.

torch is imported inside commands only, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

import zero_sim
from zero_sim.errors import EnvironmentProblem, ScenarioError, UsageError, ZeroSimError

if TYPE_CHECKING:
    from zero_sim.scenario.discover import Case
    from zero_sim.scenario.spec import Scenario
    from zero_sim.verify.records import CaseResult

EXIT_NOTHING_SELECTED = 5
EXIT_INTERRUPTED = 130
PROGRESS_AFTER_SECONDS = 0.5

Judge = Callable[["Scenario"], "CaseResult"]

_GRAVITY = (1, 2, 4, 3, 0)
"""Exit statuses, the one that outweighs the others first."""
_STATUS = {"pass": 0, "fail": 1, "error": 1, "inconclusive": 3}
_COLOURS = {"pass": "green", "fail": "red", "error": "red", "inconclusive": "yellow"}


class _Commands(click.Group):
    """Turns our errors into one message and an exit status; a traceback is for our own mistakes."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ZeroSimError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_status)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(zero_sim.__version__, prog_name="zero-sim")
def main() -> None:
    """Prove sharded data-parallel training right, bit for bit, or show where it goes wrong."""


@main.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "-k", "expression", metavar="EXPR", default="", help="Cases by id: words, and, or, not, ()."
)
@click.option(
    "--backend",
    type=click.Choice(["sim"]),
    default="sim",
    show_default=True,
    help="What carries the collectives.",
)
@click.option(
    "--stall-seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Longest time without a call of torch.distributed, whatever the scenarios say.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
@click.pass_context
def run(
    ctx: click.Context,
    paths: tuple[str, ...],
    expression: str,
    backend: str,
    stall_seconds: float | None,
    as_json: bool,
) -> None:
    """Run every scenario in PATH..., files or folders, and judge it.

    Exit status: 0 all passed, 1 a case failed, 2 a scenario or the usage is wrong, 3 a case was
    inconclusive, 4 this machine cannot run a case, 5 nothing was selected.
    """
    from zero_sim.scenario.discover import discover

    found = discover(paths, expression=expression)
    if not found.cases and not found.errors:
        have = f"{found.passed_over_count} cases, none matches -k {expression!r}"
        click.echo(f"Nothing selected: {have}.", err=True)
        if as_json:
            _echo_json(_Session().as_dict(status=EXIT_NOTHING_SELECTED))
        ctx.exit(EXIT_NOTHING_SELECTED)
    session = _Session(as_json=as_json, errors=found.errors, stall_seconds=stall_seconds)
    session.report_problems()
    if found.cases:
        with open_judge(backend=backend) as judge:
            session.run_all(found.cases, judge)
    ctx.exit(session.finish())


@main.command()
def schema() -> None:
    """Print the JSON Schema of a scenario file."""
    from zero_sim.scenario.schema import scenario_schema

    _echo_json(scenario_schema())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON list on stdout.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Say what this machine can run, and why it cannot run the rest."""
    from zero_sim.doctor import examine
    from zero_sim.report.text import render_facts

    facts = examine()
    if as_json:
        _echo_json([fact.as_dict() for fact in facts])
    else:
        click.echo(render_facts(facts))
    can_run = all(fact.ok for fact in facts if fact.required)
    ctx.exit(0 if can_run else EnvironmentProblem.exit_status)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON list on stdout.")
def bench(as_json: bool) -> None:
    """Measure speed and memory on this machine, beside the goals. Never fails for being slow."""
    from zero_sim.report.text import render_measurements

    measurements = importlib.import_module("zero_sim.bench").run_benchmarks()
    if as_json:
        _echo_json([row.as_dict() for row in measurements])
    else:
        click.echo(render_measurements(measurements))


@contextlib.contextmanager
def open_judge(*, backend: str) -> Iterator[Judge]:
    """What judges one case after another; the one place where the command line meets `verify`.

    Worlds are kept from case to case, so that setting one up is paid for once.
    """
    assert backend == "sim", backend
    try:
        from zero_sim.launch import WorldPool
        from zero_sim.verify.runner import run_case
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "zero_sim":
            raise
        raise EnvironmentProblem(
            f"expected the package {error.name!r}, which is not installed. Try `zero-sim doctor`."
        ) from None
    # What is loaded now stays: the collector need not walk through torch again and again.
    gc.collect()
    gc.freeze()
    with WorldPool() as pool:
        yield lambda scenario: run_case(scenario, pool=pool)


@dataclass(kw_only=True, slots=True)
class _Session:
    """One `run`: what was asked, what came of it so far."""

    as_json: bool = False
    errors: Sequence[ScenarioError] = ()
    stall_seconds: float | None = None
    """In place of what the scenarios say; None for theirs."""
    results: list[CaseResult] = field(default_factory=list)
    sources: list[dict[str, str]] = field(default_factory=list)
    """Of each result: the file, and the command that runs it alone."""
    statuses: list[int] = field(default_factory=list)
    left_out: int = 0
    interrupted: bool = False
    started: float = field(default_factory=time.perf_counter)

    def report_problems(self) -> None:
        from zero_sim.report.text import render_problems

        if self.errors and not self.as_json:
            click.echo(render_problems(self.errors), err=True)
        self.statuses.extend(error.exit_status for error in self.errors)

    def run_all(self, cases: Sequence[Case], judge: Judge) -> None:
        from zero_sim.report.text import id_width, render_case

        width = id_width(case.id for case in cases)
        try:
            for index, case in enumerate(cases):
                with _progress(f"{index + 1} of {len(cases)}  {case.id}"):
                    result, status = self._judge(case, judge)
                command = _reproduce(case, stall_seconds=self.stall_seconds)
                self.results.append(result)
                self.statuses.append(status)
                self.sources.append({"source": str(case.source), "reproduce": command})
                if not self.as_json:
                    text = render_case(result, width=width, reproduce=command)
                    click.echo(_coloured(text, result.verdict))
        except KeyboardInterrupt:
            self.interrupted = True
            self.left_out = len(cases) - len(self.results)
            where = cases[len(self.results)].id if self.left_out else "the last case"
            click.echo(f"\nInterrupted during {where}.", err=True)

    def finish(self) -> int:
        from zero_sim.report.text import render_summary

        status = EXIT_INTERRUPTED if self.interrupted else _gravest(self.statuses)
        if self.as_json:
            _echo_json(self.as_dict(status=status))
        else:
            summary = render_summary(
                self.results,
                seconds=self._seconds(),
                bad_files=len(self.errors),
                left_out=self.left_out,
            )
            click.echo(summary)
        return status

    def as_dict(self, *, status: int) -> dict[str, object]:
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
            "exit_status": status,
        }

    def _seconds(self) -> float:
        return time.perf_counter() - self.started

    def _judge(self, case: Case, judge: Judge) -> tuple[CaseResult, int]:
        from zero_sim.verify.records import CaseResult, Finding

        started = time.perf_counter()
        scenario = _with_stall_limit(case.scenario, self.stall_seconds)
        # What a model prints must not end up in the middle of the JSON.
        out = contextlib.redirect_stdout(sys.stderr) if self.as_json else contextlib.nullcontext()
        try:
            with out:
                result = judge(scenario)
        except ZeroSimError as error:
            seconds = time.perf_counter() - started
            failed = CaseResult(id=case.id, verdict="error", seconds=seconds, error=str(error))
            return failed, error.exit_status
        # One case's bug must not cost the others their verdict.
        except Exception as error:  # noqa: BLE001
            seconds = time.perf_counter() - started
            finding = Finding(
                check="internal.error",
                message="zero_sim raised an error that it did not foresee; please report it",
                detail=traceback.format_exc(),
            )
            what = f"{type(error).__name__}: {error}"
            failed = CaseResult(
                id=case.id, verdict="error", seconds=seconds, error=what, findings=(finding,)
            )
            return failed, _STATUS["error"]
        # Without a finding, the judge refused a scenario that only it could see is not possible.
        refused = result.verdict == "error" and not result.findings
        return result, UsageError.exit_status if refused else _STATUS[result.verdict]


def _gravest(statuses: Sequence[int]) -> int:
    return min(statuses, key=_GRAVITY.index, default=0)


def _with_stall_limit(scenario: Scenario, seconds: float | None) -> Scenario:
    if seconds is None:
        return scenario
    return dataclasses.replace(
        scenario, run=dataclasses.replace(scenario.run, stall_seconds=seconds)
    )


def _reproduce(case: Case, *, stall_seconds: float | None) -> str:
    words = case.file_id
    if any(char in " ()\"'" for char in words):
        words = f'"{words}"'
    limit = [] if stall_seconds is None else ["--stall-seconds", f"{stall_seconds:g}"]
    return shlex.join(["zero-sim", "run", str(case.source), "-k", words, *limit])


def _coloured(text: str, verdict: str) -> str:
    if "NO_COLOR" in os.environ or not sys.stdout.isatty():
        return text
    mark, _, rest = text.partition(" ")
    return f"{click.style(mark, fg=_COLOURS[verdict], bold=True)} {rest}"


@contextlib.contextmanager
def _progress(label: str) -> Iterator[None]:
    """Show what runs and for how long, on a terminal's stderr only; gone before the result is.

    A case that is over sooner than one would begin to wonder never shows anything.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
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


def _echo_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))
