"""The command `zero-sim mutants`: count the deliberate faults that zero-sim finds."""

from __future__ import annotations

import time
from pathlib import Path

import click

from zero_sim.cli.parts import (
    EXIT_INTERRUPTED,
    EXIT_NOTHING_SELECTED,
    cores_option,
    echo_report,
    json_option,
)
from zero_sim.errors import UsageError
from zero_sim.host.packages import packages_needed


@click.command()
@click.argument("ids", metavar="[ID...]", nargs=-1)
@click.option("--class", "kind", metavar="CLASS", help="Only mutants of this class, such as NORM.")
@click.option("--core", is_flag=True, help="Only the core mutants.")
@click.option(
    "--cases",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    help="Cases per mutant before giving up.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the cases.")
@cores_option
@click.option(
    "--every-case",
    is_flag=True,
    help="Judge cases in the order in which they are drawn. By default, cases that lack features "
    "of the mutant's smallest known case come last. This takes a fifth of the time, but may "
    "report a later case than the first that finds the mutant.",
)
@click.option("--shrink", is_flag=True, help="Find the smallest case that detects each mutant.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --shrink: write the smallest case of each mutant to FILE, such as the shipped "
    "zero_sim/mutants/smallest.json. Entries of other mutants stay.",
)
@json_option
@click.pass_context
def mutants(
    ctx: click.Context,
    ids: tuple[str, ...],
    kind: str | None,
    core: bool,
    cases: int,
    seed: int,
    jobs: int,
    every_case: bool,
    shrink: bool,
    record: Path | None,
    as_json: bool,
) -> None:
    """Break zero-sim's own system on purpose and count the faults found.

    Exit status: 0 all were found, 1 a mutant survived, 2 the usage is wrong, 130 interrupted. After
    an interrupt, the score covers the mutants tried so far.

    \b
    Examples:
      zero-sim mutants --core
      zero-sim mutants M01 M57 --cases 50 --shrink
    """
    from zero_sim.report.mutants import render_hunt, render_score

    with packages_needed():
        from zero_sim.mutants import find_mutants
        from zero_sim.mutants.campaign import Budget, run_campaign
        from zero_sim.mutants.score import score_of
        from zero_sim.mutants.smallest import record_smallest
    if record is not None and not shrink:
        raise UsageError("expected --shrink with --record, got it alone. Try both.")
    chosen = find_mutants(ids, kind=kind, core=core)
    if not chosen:
        click.echo("Nothing selected.", err=True)
        ctx.exit(EXIT_NOTHING_SELECTED)
    # Workers receive ids, because mutants cannot be pickled.
    by_id = {mutant.id: mutant for mutant in chosen}
    started, trials = time.perf_counter(), []
    budget = Budget(cases_max=cases, seed=seed, shrinks=shrink, every_case=every_case)
    interrupted = False
    try:
        for result in run_campaign(tuple(by_id), budget=budget, jobs=jobs):
            trials.append(result)
            # Record after each mutant, because a full run takes long and may be interrupted.
            if record is not None:
                record_smallest([result], record)
            if not as_json:
                click.echo(render_hunt(result, by_id[result.id]))
    # Print the score of the mutants tried so far.
    except KeyboardInterrupt:
        interrupted = True
    score = score_of(trials, chosen, seconds=time.perf_counter() - started)
    if as_json:
        echo_report(score.as_dict())
    else:
        click.echo(render_score(score))
    if interrupted:
        click.echo(f"Interrupted; {len(chosen) - len(trials)} mutants were not tried.", err=True)
        ctx.exit(EXIT_INTERRUPTED)
    ctx.exit(score.exit_status)
