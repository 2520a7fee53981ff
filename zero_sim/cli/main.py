"""The command line: thin commands over `scenario`, `run` and `report`.

Exit status: 0 all cases passed; 1 a case failed or crashed; 2 a usage or scenario error; 3 a case
was inconclusive; 4 this machine cannot run a case; 5 nothing was selected; 130 interrupted by
Ctrl-C, SIGTERM or SIGHUP. If several of these apply, 1 beats 2, 2 beats 4, and 4 beats 3.

Commands import torch in their bodies, because this import takes seconds and `--help` works without.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import zero_sim
from zero_sim.cli.against import replay_script, script_bundle
from zero_sim.cli.bench import bench
from zero_sim.cli.costs import memory, traffic
from zero_sim.cli.findings import explain, report
from zero_sim.cli.fingerprint import fingerprint
from zero_sim.cli.fuzz import fuzz
from zero_sim.cli.init import init
from zero_sim.cli.mutants import mutants
from zero_sim.cli.options import (
    RunRequest,
    imported,
    own_options,
    own_options_again,
    parse_own_options,
)
from zero_sim.cli.parts import (
    EXIT_INTERRUPTED,
    FILE,
    FOLDER,
    bundles_option,
    echo_json,
    echo_report,
    json_option,
    option,
    require_with,
    stdout_for,
    takes,
)
from zero_sim.cli.rank_globals import print_rank_globals
from zero_sim.cli.rules import rules
from zero_sim.cli.session import Outputs, Session, coloured, progress
from zero_sim.cli.shrink import shrink
from zero_sim.cli.torchrun import torchrun
from zero_sim.cli.walkthrough import walkthrough
from zero_sim.errors import EnvironmentProblem, UsageError, ZeroSimError
from zero_sim.host import supervisor
from zero_sim.host.files import unwritten
from zero_sim.host.frames import show_error
from zero_sim.host.garbage import collect_seldom
from zero_sim.host.packages import packages_needed
from zero_sim.host.signals import at_second, interrupt, listening, received_name
from zero_sim.host.warnings_once import showing_warnings_once
from zero_sim.report.commands import replay_command, run_command
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.cli.session import Judge
    from zero_sim.scenario.spec import Scenario

_SCENARIO = "scenario"
END_SECONDS = 2.0
"""Seconds that a second signal leaves to save and print results."""
DEFAULT_REGRESSIONS = Path("scenarios", "regressions")
GROUPS = {
    "Judge": ("run", "fuzz", "torchrun", "replay", "shrink"),
    "Your system": ("init", "rules", "fingerprint"),
    "Understand": ("explain", "report", "export", "walkthrough"),
    "Costs": ("memory", "traffic"),
    "Project": ("doctor", "schema", "bench", "mutants"),
}
"""Command names by `--help` heading."""


class _Commands(click.Group):
    """Root command, which turns our errors into a message and an exit status.

    A traceback means a bug in zero_sim.
    """

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by group, each with the first line of its help in full."""
        for heading, names in GROUPS.items():
            # By default, click cuts a help line after 45 characters.
            lines = [(name, self.commands[name].get_short_help_str(200)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(lines, col_max=12)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command of this process, or the given arguments."""
        # Tests and embedders pass arguments. Their signals and garbage collector are left alone.
        if args or options:
            return super().main(*args, **options)
        collect_seldom()
        # A user's target may kill or hang this process, so a supervisor runs it in a child. The
        # child attaches to its supervisor and goes on below.
        target = supervisor.foreign_target(sys.argv[1:])
        if not supervisor.attach() and target:
            sys.exit(supervisor.supervise(target))
        at_second(_end_soon)
        try:
            return super().main()
        except SystemExit as ended:
            # Like Python itself: None becomes status 0, a message becomes 1.
            supervisor.confirm(ended.code if isinstance(ended.code, int) else int(bool(ended.code)))
            raise

    def invoke(self, ctx: click.Context) -> object:
        try:
            with listening(interrupt), showing_warnings_once():
                supervisor.listen()
                return super().invoke(ctx)
        except ZeroSimError as error:
            # A message may quote untrusted file names, which may contain control characters.
            click.echo(printable(f"Error: {error.report}", lines=True), err=True)
            ctx.exit(error.exit_status)
        except KeyboardInterrupt:
            name = received_name()
            by = f" by {name}" if name not in ("", "SIGINT") else ""
            click.echo(f"Interrupted{by}.", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # The reader closed the pipe, as `head` does: click exits silently.
            # Report files raise our own errors, so this error comes from another file or stream.
            where = error.filename or "a file or pipe"
            failed = unwritten("output or read input", where, error)
            click.echo(printable(f"Error: {failed}", lines=True), err=True)
            ctx.exit(failed.exit_status)
        # click does not exit by SystemExit here, so this exit comes from code under test.
        except SystemExit as ended:
            message = (
                "Error: expected the command to finish, got code under test that ended the "
                f"process with {ended.code!r}:\n{show_error(ended)}"
            )
            click.echo(printable(message, lines=True), err=True)
            ctx.exit(UsageError.exit_status)


def _end_soon() -> None:
    """End the process in two seconds, even if a rank is in code that ignores interrupts."""

    def end() -> None:
        # `end_process` skips the flush that Python does at exit.
        sys.stdout.flush()
        click.echo("Interrupted.", err=True)
        # sys.exit would only end the timer's thread.
        supervisor.end_process(EXIT_INTERRUPTED)

    timer = threading.Timer(END_SECONDS, end)
    # A run that ends in time must not wait for the timer.
    timer.daemon = True
    timer.start()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(zero_sim.__version__, prog_name="zero-sim")
def main() -> None:
    """Prove sharded data-parallel training right, bit for bit, or show where it goes wrong."""


@main.command()
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option(
    "-k",
    "expression",
    metavar="EXPR",
    default="",
    help="Run only cases whose id matches EXPR: words with and, or, not and ().",
)
@takes(RunRequest, "request")
@takes(Outputs, "outputs")
@click.pass_context
def run(
    ctx: click.Context,
    paths: tuple[str, ...],
    expression: str,
    request: RunRequest,
    outputs: Outputs,
) -> None:
    """Judge scenarios.

    PATH is a scenario file or a folder of scenario files. Without a PATH, runs the small scenarios
    that ship with zero-sim.

    Exit status: 0 all passed, 1 a case failed, 2 a scenario or the usage is wrong, 3 a case was
    inconclusive, 4 this machine cannot run a case, 5 nothing was selected.

    \b
    Examples:
      zero-sim run
      zero-sim run scenarios/smoke -k "mlp and bf16" -v
      zero-sim run scenarios --target torch-ddp --able --jobs 2
      zero-sim run my.toml --target engine:MyTarget --junit results.xml
    """
    from zero_sim.scenario.discover import discover

    # Files first, so that a wrong path or expression is reported before torch is imported.
    found = discover(paths or [_shipped_scenarios()], expression=expression)
    session = Session(request=request, outputs=outputs, junit=outputs.junit, errors=found.errors)
    if not found.cases and not found.errors:
        have = f"{found.passed_over_count} cases, none matches -k {expression!r}"
        ctx.exit(session.finish_empty(have))
    request.check(traced=outputs.trace is not None)
    cases = [request.of_target(case) for case in found.cases]
    # Real processes select cases by what their backend can run, and have their own judge.
    if request.backend == "sim":
        chosen = session.select(cases, lambda scenario: "")
        judging = partial(
            _open_judge, [request.with_overrides(case.scenario) for case in chosen], session
        )
        ctx.exit(session.run(chosen, judging))
    with packages_needed():
        from zero_sim.rules.judging import EXPLAINER
        from zero_sim.run.on_processes import run_on_processes
    ctx.exit(
        run_on_processes(
            session,
            cases,
            backend=request.backend,
            native=request.native,
            target=imported(request.target),
            explainer=EXPLAINER,
        )
    )


def _shipped_scenarios() -> Path:
    """Return the folder of the shipped scenarios in the wheel or in a checkout."""
    package = Path(zero_sim.__file__).parent
    shipped = package / "smoke"
    return shipped if shipped.is_dir() else package.parent / "scenarios" / "smoke"


def _open_judge(cases: Sequence[Scenario], session: Session) -> AbstractContextManager[Judge]:
    with packages_needed():
        from zero_sim.rules.judging import EXPLAINER
        from zero_sim.run import judges
    request, traced = session.request, session.outputs.trace is not None
    chosen = judges.Chosen(
        keep_logs=traced, device=request.device, target=request.target, explainer=EXPLAINER
    )
    # A worker process imports torch again, which does not pay for a single case.
    if request.jobs > 1 and len(cases) > 1:
        return judges.JobsJudge(cases, jobs=request.jobs, chosen=chosen)
    return judges.open_judge(chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Freezing:
    """Options of `replay` that save the case as a scenario file."""

    frozen: bool = option("--freeze", is_flag=True, help="Save the case as a scenario file.")
    folder: Path = option(
        "--folder",
        type=FOLDER,
        default=DEFAULT_REGRESSIONS,
        show_default=True,
        metavar="DIR",
        help="Folder for --freeze.",
    )
    file_name: str = option(
        "--name", default="", metavar="NAME", help="Name of the file for --freeze."
    )
    force: bool = option("--force", is_flag=True, help="Let --freeze overwrite a file.")


@main.command()
@click.argument("name", metavar="ID|PATH")
@bundles_option
@takes(_Freezing, "freezing")
@click.option(
    "--target",
    metavar="MODULE:NAME",
    help="System under test. Required if the bundle's target was imported.",
)
@click.option(
    "--device", metavar="NAME", help="Device for the run.  [default: the bundle's device]"
)
@click.option(
    "--trust", is_flag=True, help="Allow the script in a `torchrun --against` bundle to run."
)
@own_options
@json_option
@click.pass_context
def replay(
    ctx: click.Context,
    name: str,
    bundles: Path,
    trust: bool,
    freezing: _Freezing,
    target: str | None,
    device: str | None,
    option_values: tuple[str, ...],
    as_json: bool,
) -> None:
    """Repeat a failed case from its bundle, turn by turn.

    Prints FIXED, FAILED or ERROR. A gloo or nccl case runs on the same number of processes again,
    but in no fixed order.

    Exit status: 0 the case passes now, 1 it fails, 2 the bundle cannot be read or its case is
    refused, 3 the case is inconclusive, 4 this machine cannot run it.

    \b
    Examples:
      zero-sim replay 4f2a
      zero-sim replay 4f2a --target engine:MyTarget
      zero-sim replay 4f2a --freeze --name uneven-bucket
    """
    from zero_sim.report.text import render_replay

    require_with(ctx, "--freeze", "folder", "file_name", "force", given=freezing.frozen)
    # Bundles of scripts come from `torchrun --against`. They contain code, hence --trust.
    if (script := script_bundle(name, folder=bundles)) is not None:
        ctx.exit(replay_script(script, trust=trust))
    with packages_needed():
        from zero_sim.bundle import find_bundle, freeze, frozen_path, read_bundle, replay_bundle
        from zero_sim.targets import import_target, with_options
    bundle = read_bundle(find_bundle(name, folder=bundles))
    if own := parse_own_options(option_values):
        bundle = replace(bundle, scenario=with_options(bundle.scenario, own))
    system = None if target is None else import_target(target)
    path = None
    # Before the replay, so that an existing file is refused at once.
    if freezing.frozen:
        path = frozen_path(
            bundle, folder=freezing.folder, name=freezing.file_name, force=freezing.force
        )
        freeze(bundle, path)
    with stdout_for(as_json=as_json), progress(f"replay {bundle.id}  {bundle.scenario.name}"):
        replayed = replay_bundle(bundle, target=system, device=device)
    # Print a command with the same options, so that it repeats this replay.
    on = device or bundle.ran.device_named
    again = replay_command(name, bundles=bundles, target=target, device=on)
    again = " ".join([again, *own_options_again(own)])
    if as_json:
        where = {"frozen": None if path is None else str(path), "replay": again}
        echo_report({**replayed.as_dict(), **where})
    else:
        # `coloured` takes verdicts. FIXED is green, like a pass.
        colour = {"fixed": "pass", "failed": "fail", "error": "error"}[replayed.outcome]
        click.echo(coloured(render_replay(replayed), colour))
        if replayed.outcome != "fixed":
            click.echo(f"  replay: {again}")
        if path is not None:
            click.echo(
                f"  frozen: {path}\n  reproduce: {run_command(path, target=target, device=on)}"
            )
    ctx.exit(replayed.exit_status)


@main.command()
@click.argument("name", metavar="ID|PATH")
@bundles_option
@click.option(
    "--chrome",
    type=FILE,
    metavar="FILE",
    help="Write a Chrome trace for Perfetto, compressed if FILE ends in .gz. Refuses a named pipe "
    "that has no reader.",
)
@click.option(
    "--flight-recorder",
    type=FOLDER,
    metavar="DIR",
    help="Write one Flight Recorder dump per rank, for torchfrtrace.",
)
def export(name: str, bundles: Path, chrome: Path | None, flight_recorder: Path | None) -> None:
    """Write the events of a bundle for Perfetto or torchfrtrace.

    \b
    Examples:
      zero-sim export 4f2a --chrome trace.json
      zero-sim export 4f2a --flight-recorder dumps
    """
    if chrome is None and flight_recorder is None:
        raise UsageError("expected a format, got none. Try --chrome FILE or --flight-recorder DIR.")
    with packages_needed():
        from zero_sim.bundle import find_bundle, read_bundle
        from zero_sim.report.traces import write_chrome_trace, write_flight_recorder
    bundle = read_bundle(find_bundle(name, folder=bundles))
    if not bundle.logs:
        raise UsageError(
            f"expected a bundle with events, got {bundle.id}, which has none. Choose a bundle of "
            "the simulated world."
        )
    if chrome is not None:
        write_chrome_trace(chrome, bundle.logs, name=bundle.scenario.name)
        click.echo(f"{chrome}: open it in https://ui.perfetto.dev")
    if flight_recorder is not None:
        # A case with `reload` runs in several worlds. The finding stopped the last world.
        files = write_flight_recorder(flight_recorder, bundle.logs[-1])
        click.echo(f"{flight_recorder}: {len(files)} dumps; try `torchfrtrace {flight_recorder}`")


main.add_command(explain)
main.add_command(report)


@main.command()
@click.argument("what", metavar="[WHAT]", default=_SCENARIO)
def schema(what: str) -> None:
    """Print the JSON Schema of scenario files or of --json output.

    WHAT is `scenario` (the default) or the name of a command: run, replay, explain, fuzz, shrink,
    mutants, memory, traffic, fingerprint, rules, doctor, bench or torchrun.

    \b
    Examples:
      zero-sim schema > scenario.schema.json
      zero-sim schema run
    """
    from zero_sim.report.schemas import COMMANDS, output_schema
    from zero_sim.scenario.schema import scenario_schema
    from zero_sim.scenario.suggest import nearest

    if what == _SCENARIO:
        echo_json(scenario_schema())
        return
    if what in COMMANDS:
        with packages_needed():
            echo_json(output_schema(what))
        return
    # Script verdicts have their own records, outside report/schemas.
    if what == "torchrun":
        with packages_needed():
            from zero_sim.against.text import verdicts_schema
        echo_json(verdicts_schema())
        return
    names = nearest(what, (_SCENARIO, *COMMANDS, "torchrun"))
    raise UsageError(f"expected the name of a schema, got {what!r}. Choose {names}.")


@main.command()
@json_option
@click.option(
    "--gpu",
    is_flag=True,
    help="Run all checks that need GPUs, cheapest first, and write a report.",
)
@click.option(
    "--gpu-report",
    type=FILE,
    default=Path("zero-sim-gpu.json"),
    show_default=True,
    metavar="FILE",
    help="File for the report of --gpu, as JSON.",
)
@click.option(
    "--step",
    "only",
    multiple=True,
    metavar="NAME",
    help="Run only this step of --gpu. Repeatable.",
)
@click.option(
    "--target",
    metavar="NAME|MODULE:NAME",
    help="Instead, find globals of this target's library that simulated ranks would share, and "
    "print the declaration that keeps them apart.",
)
@click.option(
    "--package",
    "packages",
    multiple=True,
    metavar="NAME",
    help="Top-level package for --target to search. Repeatable.  [default: the target's library, "
    "or the target's own package]",
)
@click.pass_context
def doctor(
    ctx: click.Context,
    as_json: bool,
    gpu: bool,
    gpu_report: Path,
    only: tuple[str, ...],
    target: str | None,
    packages: tuple[str, ...],
) -> None:
    """Check this machine: versions, backends, GPUs, and what is missing.

    Exit status: 0 everything required is present (with --gpu: all steps pass; with --target: its
    cases pass), 1 a step or case fails, 4 a requirement is missing.

    \b
    Examples:
      zero-sim doctor
      zero-sim doctor --gpu --gpu-report gpu.json
      zero-sim doctor --target torch-ddp
    """
    if target is not None:
        if as_json or gpu:
            raise UsageError("expected --target without --json and --gpu. Try it by itself.")
        # The output is Python to paste into the target, hence no JSON.
        ctx.exit(print_rank_globals(target, packages=packages))
    require_with(ctx, "--target", "packages", given=False)
    if gpu:
        if as_json:
            raise UsageError("expected --gpu without --json: its report is JSON. Try --gpu-report.")
        ctx.exit(_visit(gpu_report, only=only))
    # These options have no effect without --gpu.
    require_with(ctx, "--gpu", "only", "gpu_report", given=False)
    from zero_sim.doctor import examine
    from zero_sim.report.records import render_facts

    facts = examine()
    if as_json:
        echo_report({"facts": facts})
    else:
        click.echo(render_facts(facts))
    # Only required facts decide the status: optional parts may be missing.
    can_run = all(fact.ok for fact in facts if fact.required)
    ctx.exit(0 if can_run else EnvironmentProblem.exit_status)


def _visit(report: Path, *, only: Sequence[str]) -> int:
    with packages_needed():
        from zero_sim.visit import Step, bundles_of, visit

    def show_step(step: Step) -> None:
        state = "ok" if step.ok else "NO"
        click.echo(printable(f"{state}  {step.name:10} {step.seconds:6.1f} s  {step.proves}"))
        for line in step.lines:
            click.echo(printable(f"      {line}"))

    # Print each step when it ends, because steps take minutes.
    steps = visit(report, only=only, on_step=show_step)
    kept = sum(bool(failure.get("bundle")) for step in steps for failure in step.failures)
    click.echo(
        f"report: {report}" + (f", and {kept} bundles in {bundles_of(report)}" if kept else "")
    )
    return 0 if all(step.ok for step in steps) else 1


main.add_command(bench)
main.add_command(fingerprint)
main.add_command(fuzz)
main.add_command(init)
main.add_command(memory)
main.add_command(mutants)
main.add_command(rules)
main.add_command(shrink)
main.add_command(torchrun)
main.add_command(traffic)
main.add_command(walkthrough)
