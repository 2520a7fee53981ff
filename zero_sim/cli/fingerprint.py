"""The command `zero-sim fingerprint`: identify the ZeRO stage of a trace."""

from __future__ import annotations

from pathlib import Path

import click

from zero_sim.cli.parts import echo_report, json_option, require_with
from zero_sim.cli.session import progress
from zero_sim.errors import UsageError
from zero_sim.host.packages import packages_needed


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE|FOLDER")
@click.option("--case", metavar="ID", help="Case of a scenario file, if it has several.")
@click.option(
    "--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Rank to analyse."
)
@json_option
@click.pass_context
def fingerprint(ctx: click.Context, path: Path, case: str | None, rank: int, as_json: bool) -> None:
    """Identify the ZeRO stage, overlap and odd calls of a trace.

    FILE is a Chrome trace (from torch's profiler on NCCL, or on gloo with record_shapes=True; from
    `run --trace` or `export`), a Flight Recorder dump as JSON, or a scenario file, which is run
    first. FOLDER contains several traces or dumps.

    \b
    Examples:
      zero-sim fingerprint trace.json --rank 1
      zero-sim fingerprint scenarios/smoke/mlp.toml --case mlp
    """
    with packages_needed():
        from zero_sim.calculators.fingerprint import fingerprint as look
        from zero_sim.report.fingerprints import (
            calls_of_log,
            read_calls,
            render_fingerprint,
            traces_in,
        )
    # A TOML file is a scenario. Run it and read its event log.
    if path.suffix == ".toml":
        from zero_sim.calculators.measure import measure
        from zero_sim.scenario.load import load_scenario

        scenario = load_scenario(path, case=case)
        if rank >= scenario.world.size:
            raise UsageError(
                f"expected --rank to be below the {scenario.world.size} ranks of {scenario.name}, "
                f"got {rank}. Choose a smaller one."
            )
        with progress(f"measure {scenario.name}"):
            found = {path: look(calls_of_log(measure(scenario).log, rank=rank))}
    else:
        require_with(ctx, "a scenario file", "case", given=False)
        found = {file: look(read_calls(file, rank=rank)) for file in traces_in(path)}
    if as_json:
        sources = [{"source": str(file), **each.as_dict()} for file, each in found.items()]
        echo_report({"fingerprints": sources})
    elif len(found) == 1:
        click.echo(render_fingerprint(*found.values()))
    else:
        texts = [f"{file}\n{render_fingerprint(each)}" for file, each in found.items()]
        click.echo("\n\n".join(texts))
