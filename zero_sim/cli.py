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
import re
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

import zero_sim
from zero_sim.cli_fuzz import fuzz
from zero_sim.errors import EnvironmentProblem, ScenarioError, UsageError, ZeroSimError

if TYPE_CHECKING:
    from zero_sim.scenario.discover import Case
    from zero_sim.scenario.spec import Scenario
    from zero_sim.verify.records import CaseResult

EXIT_NOTHING_SELECTED = 5
EXIT_INTERRUPTED = 130
PROGRESS_AFTER_SECONDS = 0.5
DEFAULT_BUNDLES = Path(".zero-sim", "bundles")
TRACE_NAME_CHARS_MAX = 120

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


bundles_option = click.option(
    "--bundles",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_BUNDLES,
    show_default=True,
    metavar="DIR",
    help="Folder with the bundles of failing cases.",
)


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
@bundles_option
@click.option("--no-bundles", is_flag=True, help="Write no bundles of failing cases.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a Chrome trace: a file for one case, a folder for several.",
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
    bundles: Path,
    no_bundles: bool,
    trace: Path | None,
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
    session = _Session(
        as_json=as_json,
        errors=found.errors,
        bundles=None if no_bundles else bundles,
        trace=trace,
        stall_seconds=stall_seconds,
    )
    session.report_problems()
    if found.cases:
        with open_judge(backend=backend, keep_logs=trace is not None) as judge:
            session.run_all(found.cases, judge)
    ctx.exit(session.finish())


@main.command()
@click.argument("name", metavar="ID|PATH")
@bundles_option
@click.option(
    "--target", metavar="MODULE:NAME", help="System under test, where `fuzz` imported it."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
@click.pass_context
def replay(ctx: click.Context, name: str, bundles: Path, target: str | None, as_json: bool) -> None:
    """Repeat the case of a bundle, turn by turn: FIXED, FAILED or ERROR.

    Exit status: 0 nothing is wrong now, 1 it fails, 2 the bundle cannot be read or its case is
    refused, 3 the case is inconclusive now, 4 this machine cannot run it.
    """
    from zero_sim.report.text import render_replay

    with _packages_needed():
        from zero_sim.bundle import find_bundle, read_bundle, replay_bundle
    bundle = read_bundle(find_bundle(name, folder=bundles))
    system = None
    if target is not None:
        with _packages_needed():
            from zero_sim.fuzz.batch import load_target
        system = load_target(target)
    # What a model prints must not end up in the middle of the JSON.
    out = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with out, _progress(f"replay {bundle.id}  {bundle.scenario.name}"):
        replayed = replay_bundle(bundle, target=system)
    if as_json:
        _echo_json(replayed.as_dict())
    else:
        colour = {"fixed": "pass", "failed": "fail", "error": "error"}[replayed.outcome]
        click.echo(_coloured(render_replay(replayed), colour))
    ctx.exit(replayed.exit_status)


@main.command()
@click.argument("name", metavar="ID|PATH")
@bundles_option
@click.option(
    "--chrome",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Chrome trace, for Perfetto; compressed where FILE ends in .gz.",
)
@click.option(
    "--flight-recorder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="One Flight Recorder dump a rank, for torchfrtrace.",
)
def export(name: str, bundles: Path, chrome: Path | None, flight_recorder: Path | None) -> None:
    """Write the events of a bundle for other tools."""
    if chrome is None and flight_recorder is None:
        raise UsageError("expected what to export. Try --chrome FILE or --flight-recorder DIR.")
    with _packages_needed():
        from zero_sim.bundle import find_bundle, read_bundle
        from zero_sim.report.chrome_trace import write_chrome_trace
        from zero_sim.report.flight_recorder import write_flight_recorder
    bundle = read_bundle(find_bundle(name, folder=bundles))
    if not bundle.logs:
        raise UsageError(f"expected a bundle with events, got {bundle.id}, which has none.")
    if chrome is not None:
        write_chrome_trace(chrome, bundle.logs, name=bundle.scenario.name)
        click.echo(f"{chrome}: open it in https://ui.perfetto.dev")
    if flight_recorder is not None:
        files = write_flight_recorder(flight_recorder, bundle.logs[-1])
        click.echo(f"{flight_recorder}: {len(files)} dumps; try `torchfrtrace {flight_recorder}`")


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


main.add_command(fuzz)


@contextlib.contextmanager
def _packages_needed() -> Iterator[None]:
    """Around imports: a package that is missing is a problem of the machine."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "zero_sim":
            raise
        raise EnvironmentProblem(
            f"expected the package {error.name!r}, which is not installed. Try `zero-sim doctor`."
        ) from None


@contextlib.contextmanager
def open_judge(*, backend: str, keep_logs: bool = False) -> Iterator[Judge]:
    """What judges one case after another; the one place where the command line meets `verify`.

    Worlds are kept from case to case, so that setting one up is paid for once.
    """
    assert backend == "sim", backend
    with _packages_needed():
        from zero_sim.launch import WorldPool
        from zero_sim.verify.runner import run_case
    # What is loaded now stays: the collector need not walk through torch again and again.
    gc.collect()
    gc.freeze()
    with WorldPool() as pool:
        yield lambda scenario: run_case(scenario, pool=pool, keep_logs=keep_logs)


@dataclass(kw_only=True, slots=True)
class _Session:
    """One `run`: what was asked, what came of it so far."""

    as_json: bool = False
    errors: Sequence[ScenarioError] = ()
    bundles: Path | None = None
    """Where bundles of failing cases go, if anywhere."""
    trace: Path | None = None
    """Where Chrome traces go, if anywhere."""
    stall_seconds: float | None = None
    """In place of what the scenarios say; None for theirs."""
    results: list[CaseResult] = field(default_factory=list)
    sources: list[dict[str, str | None]] = field(default_factory=list)
    """Of each result: the file, the command that runs it alone, and the id of its bundle."""
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
                bundle = self._write_bundle(case, result)
                if self.trace is not None and result.logs:
                    self._write_trace(case, result, number=index if len(cases) > 1 else None)
                # Logs are large, and all that is told of them has been told.
                self.results.append(dataclasses.replace(result, logs=()))
                self.statuses.append(status)
                source = {"source": str(case.source), "reproduce": command, "bundle": bundle}
                self.sources.append(source)
                if not self.as_json:
                    again = self._replay(bundle) if bundle else ""
                    text = render_case(result, width=width, reproduce=command, replay=again)
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

    def _write_bundle(self, case: Case, result: CaseResult) -> str | None:
        if self.bundles is None or result.verdict != "fail" or not result.findings:
            return None
        from zero_sim.bundle import write_bundle

        try:
            return write_bundle(case.scenario, result, folder=self.bundles).name
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
        except UsageError as error:
            click.echo(f"No trace of {case.id}: {error}", err=True)
            self.statuses.append(error.exit_status)

    def _replay(self, bundle: str) -> str:
        where = [] if self.bundles == DEFAULT_BUNDLES else ["--bundles", str(self.bundles)]
        return shlex.join(["zero-sim", "replay", bundle, *where])

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
