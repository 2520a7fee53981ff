"""The command `zero-sim shrink`: find the smallest case with the same finding."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zero_sim.cli.options import imported, own_options, with_target
from zero_sim.cli.parts import FILE, a_number, bundles_option, echo_report, json_option, stdout_for
from zero_sim.cli.session import coloured, progress
from zero_sim.errors import UsageError, ZeroSimError
from zero_sim.host.files import unwritten, write_whole
from zero_sim.host.packages import packages_needed
from zero_sim.report.commands import replay_command, run_command

if TYPE_CHECKING:
    from zero_sim.bundle import Ran
    from zero_sim.findings.records import CaseResult
    from zero_sim.scenario.spec import Scenario
    from zero_sim.shrink import Reduced
    from zero_sim.targets import Target

EXIT_FAILS = 1
EXIT_REFUSED = 2
EXIT_INCONCLUSIVE = 3
DEFAULT_SECONDS = 60.0


@click.command()
@click.argument("name", metavar="PATH|ID")
@click.option(
    "-k",
    "expression",
    metavar="EXPR",
    default="",
    help="Id of the case, if the file has several cases.",
)
@click.option(
    "--target",
    metavar="NAME|MODULE:NAME",
    help="Override the case's target: a registered name, or module:name to import.",
)
@own_options
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    callback=a_number,
    default=DEFAULT_SECONDS,
    show_default=True,
    metavar="S",
    help="Start no case after S seconds.",
)
@click.option(
    "--device",
    metavar="NAME",
    help="Device of the simulated ranks and the reference.  [default: the bundle's device, else "
    "cpu]",
)
@bundles_option
@click.option(
    "--output",
    type=FILE,
    metavar="FILE",
    help="Also write the smallest case as a scenario file. Refuses a named pipe that has no "
    "reader.",
)
@json_option
@click.pass_context
def shrink(
    ctx: click.Context,
    name: str,
    expression: str,
    target: str | None,
    option_values: tuple[str, ...],
    device: str | None,
    seconds: float,
    bundles: Path,
    output: Path | None,
    as_json: bool,
) -> None:
    """Reduce a failing case to the smallest case with the same finding.

    PATH is a scenario file or a bundle, ID a bundle's id. The search tries fewer ranks, then fewer
    and smaller params, fewer steps and fewer features, until no smaller case fails. It writes the
    result as a new bundle. Ctrl-C or SIGTERM ends the search after the current case and keeps the
    smallest case so far. A second signal ends it at once.

    Exit status: 1 the case fails (the smallest case is shown), 0 it passes, 2 the usage is wrong,
    the case is refused or FILE cannot be written, 3 the case is inconclusive, 4 this machine cannot
    run it or has no room for FILE, 130 interrupted before a case failed, or twice.

    \b
    Examples:
      zero-sim shrink 4f2a --output small.toml
      zero-sim shrink my.toml -k fp16 --target engine:MyTarget
    """
    scenario, device_then = _case_of(name, expression=expression, bundles=bundles)
    device = device or device_then
    with packages_needed():
        from zero_sim.bundle import Ran
        from zero_sim.host.device import check_device
        from zero_sim.targets import import_target
    # Before the first run, which may take minutes.
    check_device(device)
    scenario = with_target(scenario, target, option_values)
    system = import_target(target or scenario.system.target)
    with stdout_for(as_json=as_json), progress(f"shrink {scenario.name}"):
        done = _shrink(scenario, system, seconds=seconds, device=device)
    again, smaller = "", ""
    # A bundle stores the name of an imported target. A registered target is named in the case.
    ran = Ran(target=imported(target) or "", device=device)
    bundle = _write_bundle(done, bundles, ran=ran)
    if bundle:
        again = replay_command(bundle, bundles=bundles, target=target, device=device)
    unwritten_output: ZeroSimError | None = None
    if done.reduced is not None and output is not None:
        # Show the result even if FILE cannot be written, and raise at the end.
        try:
            _write(done.reduced.scenario, output)
            smaller = run_command(output, target=target, device=device)
        except ZeroSimError as error:
            unwritten_output = error
    if as_json:
        commands = {"replay": again or None, "reproduce": smaller or None}
        echo_report({**done.as_dict(bundle=bundle), **commands})
    else:
        _show(done, replay=again, reproduce=smaller)
    if unwritten_output is not None:
        raise unwritten_output
    ctx.exit(done.exit_status)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    scenario: Scenario
    """Original case."""
    result: CaseResult
    """Result for the smallest case, or for the original if it was not shrunk."""
    reduced: Reduced | None = None

    @property
    def exit_status(self) -> int:
        if self.reduced is not None:
            return EXIT_FAILS
        return {"pass": 0, "inconclusive": EXIT_INCONCLUSIVE}.get(self.result.verdict, EXIT_REFUSED)

    def as_dict(self, *, bundle: str) -> dict[str, object]:
        """Return all fields, ready for JSON."""
        from zero_sim.scenario.dump import to_chosen_toml
        from zero_sim.shrink import size_of

        small = self.reduced
        return {
            "id": self.scenario.name,
            "before": size_of(self.scenario).as_dict(),
            "after": None if small is None else small.size.as_dict(),
            "scenario": None if small is None else to_chosen_toml(small.scenario),
            "cases": 0 if small is None else small.cases,
            "seconds": 0.0 if small is None else small.seconds,
            "complete": None if small is None else small.complete,
            "stopped": None if small is None else small.stopped,
            "bundle": bundle or None,
            "result": self.result.as_dict(),
            "exit_status": self.exit_status,
        }


def _case_of(name: str, *, expression: str, bundles: Path) -> tuple[Scenario, str]:
    """Return the selected case of a scenario file or bundle, and its device.

    Raises:
        UsageError: No case or several cases are selected, or the bundle's case ran on processes.
    """
    # A file is a scenario; a folder is a bundle, and any other name a bundle id. lexists is True
    # for a dangling link too, which is no id.
    if os.path.isdir(name) or not os.path.lexists(name):
        with packages_needed():
            from zero_sim.bundle import find_bundle, read_bundle
        bundle = read_bundle(find_bundle(name, folder=bundles))
        if bundle.ran.backend != "sim":
            raise UsageError(
                f"expected a bundle of the simulated world, got {bundle.id}, which ran on "
                f"{bundle.ran.backend}. Try `zero-sim replay`, or shrink its case.toml."
            )
        return bundle.scenario, bundle.ran.device
    from zero_sim.scenario.discover import discover

    found = discover([name], expression=expression)
    # A single case is wanted, so the first invalid file ends the command.
    for error in found.errors:
        raise error
    if len(found.cases) != 1:
        ids = ", ".join(case.id for case in found.cases[:3])
        have = f"{len(found.cases)} ({ids}{', ...' if len(found.cases) > 3 else ''})"
        raise UsageError(
            f"{name}: expected one case to shrink, got {have if found.cases else 'none'}. "
            "Add -k with the id of one of them."
        )
    return found.cases[0].scenario, "cpu"


def _shrink(scenario: Scenario, target: Target, *, seconds: float, device: str) -> _Done:
    """Judge a case and, if it fails, search for the smallest case with the same finding.

    Raises:
        UsageError: The finding depends on the case's size, so smaller cases cannot have it.
    """
    with packages_needed():
        from zero_sim.backends.stop import Stop, interrupts_ask
        from zero_sim.backends.worlds import WorldPool
        from zero_sim.rules.judging import run_case
        from zero_sim.shrink import Limits, key_of, may_shrink, right_judge, shrink_finding
        from zero_sim.targets import refusals

    with WorldPool() as pool:
        judge = partial(run_case, pool=pool, target=target, device=device)
        result = judge(scenario)
        # The key is the finding without its numbers. Smaller cases must have the same key.
        key = key_of(result)
        # Without a finding there is nothing to shrink. An error is a refusal or a bug in the judge.
        if key is None or result.verdict == "error":
            return _Done(scenario=scenario, result=result)
        if not may_shrink(key):
            raise UsageError(
                f"expected a finding that smaller cases can have, got {key.check}, which depends "
                "on this case's size. Try `zero-sim run`."
            )
        # The first interrupt only sets a flag, so that the current case ends and the smallest case
        # so far is kept.
        stop = Stop()
        with interrupts_ask(stop):
            reduced, best = shrink_finding(
                scenario,
                result,
                judge=judge,
                # Skip cases that the target refuses: they have no finding to compare.
                may_run=lambda other: not refusals(target, other),
                limits=Limits(seconds=seconds),
                is_over=lambda: stop.requested,
                right=right_judge(target, pool=pool, device=device),
            )
    return _Done(scenario=scenario, result=best, reduced=reduced)


def _write_bundle(done: _Done, folder: Path, *, ran: Ran) -> str:
    """Write a bundle of the smallest case and return its id; empty if no bundle is written."""
    from zero_sim.bundle import write_bundle

    # An inconclusive case has nothing to replay.
    if done.reduced is None or done.result.verdict != "fail":
        return ""
    try:
        return write_bundle(done.reduced.scenario, done.result, folder=folder, ran=ran).name
    except OSError as error:
        click.echo(f"No bundle in {folder}: {error.strerror}.", err=True)
        return ""


def _write(scenario: Scenario, path: Path) -> None:
    from zero_sim.scenario.dump import to_chosen_toml

    # Names from untrusted files may contain lone surrogates, which UTF-8 cannot encode.
    try:
        write_whole(path, to_chosen_toml(scenario).encode(errors="replace"))
    except OSError as error:
        raise unwritten("a scenario", path, error) from None


def _show(done: _Done, *, replay: str, reproduce: str) -> None:
    from zero_sim.report.text import render_case, render_reduced
    from zero_sim.scenario.dump import to_chosen_toml

    text = render_case(done.result, reproduce=reproduce, replay=replay)
    click.echo(coloured(text, done.result.verdict))
    small = done.reduced
    if small is None:
        return
    # The TOML already ends with a line break.
    click.echo(f"{render_reduced(small)}\n\n{to_chosen_toml(small.scenario)}", nl=False)
