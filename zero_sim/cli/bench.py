"""The command `zero-sim bench`: speed and memory on this machine."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from zero_sim.cli.parts import echo_report, json_option


@click.command()
@click.option("--only", metavar="TEXT", default="", help="Only figures with TEXT in their names.")
@click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Append this run to FILE, as one line of JSON.",
)
@click.option(
    "--check",
    is_flag=True,
    help="With --history: exit with 1 if a ratio is 15 % worse than the median of the last five "
    "runs in FILE, in two measurements. Such a run is not appended.",
)
@json_option
def bench(*, only: str, history: Path | None, check: bool, as_json: bool) -> int:
    """Measure the speed and memory of zero-sim on this machine.

    Goals are printed next to the figures; a missed goal is not a failure. Times are CPU times of
    all processes. The two sides of a ratio are measured in turns, so ratios hold on a busy machine.

    \b
    Examples:
      zero-sim bench --only mlp
      zero-sim bench --history bench.jsonl --check
    """
    from zero_sim.report.records import render_measurements, render_worse

    if check and history is None:
        raise click.UsageError("expected --check with --history, got it alone. Add --history FILE.")
    # Imported by name, because `bench` is the command in this module.
    module = importlib.import_module("zero_sim.bench")
    earlier = module.read_history(history) if history is not None else []
    if check and not earlier:
        raise click.UsageError(
            f"expected earlier runs in {history} for --check, got none. Run without --check first."
        )
    measurements = list(module.run_benchmarks(only=only))
    worse = []
    if check:
        worse = module.find_worse(
            measurements,
            history=earlier,
            again=lambda name: next(
                each for each in module.run_benchmarks(only=name) if each.name == name
            ),
        )
    if as_json:
        echo_report({"measurements": measurements, "worse": worse})
    else:
        click.echo(render_measurements(measurements))
        if worse:
            click.echo(render_worse(worse))
    # A bad run must not get into the history, because it would shift the median of later checks.
    if history is not None and not worse:
        module.append_history(history, measurements)
    return int(bool(worse))
