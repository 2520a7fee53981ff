"""The command `zero-sim mutate`: how many small changes of a system's code are found."""

from __future__ import annotations

import time

import click

from zero_sim.cli.parts import (
    EXIT_INTERRUPTED,
    EXIT_NOTHING_SELECTED,
    cores_option,
    echo_report,
    json_option,
)
from zero_sim.host.packages import packages_needed


@click.command()
@click.argument("modules", metavar="[MODULE...]", nargs=-1)
@click.option(
    "--target",
    default="zero_sim",
    show_default=True,
    metavar="NAME|MODULE:NAME",
    help="System under test that runs the modules: a registered one, or one to import.",
)
@click.option(
    "--changes",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="How many are tried, chosen at random.",
)
@click.option(
    "--cases",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="Cases that a change may survive.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the cases and of the choice."
)
@cores_option
@json_option
@click.pass_context
def mutate(
    ctx: click.Context,
    modules: tuple[str, ...],
    target: str,
    changes: int,
    cases: int,
    seed: int,
    jobs: int,
    as_json: bool,
) -> None:
    """Change small things in the code of MODULEs, one at a time, and count those that are found.

    A comparison, a number, a bound, a condition or a call: what survives is a change of nothing
    that matters, or a mistake that no check would see. Without MODULE, the project's own system is
    changed.

    Exit status: 0 all were tried, 1 the judge failed on one, 2 the usage is wrong, 130
    interrupted; then those that were tried are told.
    """
    from zero_sim.report.changes import render_change, render_changes

    with packages_needed():
        from zero_sim.fuzz.mutating import OWN_MODULES, Mutating, choose_changes, try_changes
    started, tried = time.perf_counter(), []
    mutating = Mutating(modules=modules or OWN_MODULES, target=target, cases_max=cases, seed=seed)
    chosen, count = choose_changes(mutating, count=changes)
    if not chosen:
        click.echo("Nothing to change.", err=True)
        ctx.exit(EXIT_NOTHING_SELECTED)
    interrupted = False
    try:
        for one in try_changes(chosen, mutating=mutating, jobs=jobs):
            tried.append(one)
            if not as_json:
                click.echo(render_change(one))
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - started
    if as_json:
        told = [one.as_dict() for one in tried]
        echo_report({"of": count, "seconds": seconds, "changes": told, "interrupted": interrupted})
    else:
        click.echo(render_changes(tried, of=count, seconds=seconds))
    if interrupted:
        click.echo(f"Interrupted; {len(chosen) - len(tried)} changes were not tried.", err=True)
        ctx.exit(EXIT_INTERRUPTED)
    ctx.exit(int(any(one.verdict == "error" for one in tried)))
