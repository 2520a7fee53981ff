"""The command `zero-sim walkthrough`: ZeRO step by step, with values from a real run."""

from __future__ import annotations

from pathlib import Path

import click

from zero_sim.cli.session import progress
from zero_sim.errors import UsageError
from zero_sim.host.packages import packages_needed

_NAMES = ("zero1", "ring", "lifecycle", "step")


@click.command()
@click.argument("name", type=click.Choice(_NAMES))
@click.option(
    "--scenario",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With `step`: the scenario to show.",
)
@click.option("--case", metavar="ID", help="Case of the scenario, if it has several.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write an HTML page instead; arrow keys go through its steps.",
)
def walkthrough(name: str, scenario: Path | None, case: str | None, html: Path | None) -> None:
    """Show ZeRO step by step, with values from a real run.

    zero1: a step of ZeRO-1 with 260 params on 2 ranks. ring: an all-reduce on 4 ranks, message by
        message. lifecycle: the units of stage 3 during a step, with and without prefetch. step: a
        step of any scenario, with layout, calls and live bytes.

    \b
    Examples:
      zero-sim walkthrough zero1 --html zero1.html
      zero-sim walkthrough step --scenario my.toml
    """
    if (name == "step") != (scenario is not None):
        raise UsageError(
            "expected --scenario FILE with `step` only. Try zero-sim walkthrough step --scenario "
            "FILE."
        )
    if case is not None and scenario is None:
        raise UsageError("expected --case with --scenario, got no --scenario. Remove --case.")
    # Usage errors first: the imports below take seconds.
    with packages_needed():
        from zero_sim import walkthrough as walks
        from zero_sim.report.walks import render_walk, write_walk
    with progress(f"walkthrough {name}"):
        if scenario is not None:
            from zero_sim.scenario.load import load_scenario

            walk = walks.walk_step(load_scenario(scenario, case=case))
        else:
            made = {
                "zero1": walks.walk_zero1,
                "ring": walks.walk_ring,
                "lifecycle": walks.walk_lifecycle,
            }
            walk = made[name]()
    if html is None:
        click.echo(render_walk(walk))
    else:
        write_walk(html, walk)
        click.echo(f"{html}: {len(walk.steps)} steps; arrow keys go from one to the next")
