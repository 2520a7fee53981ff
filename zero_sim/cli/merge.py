"""The command `zero-sim merge`: what the shards of a campaign found together."""

from __future__ import annotations

from pathlib import Path

import click

from zero_sim.cli.fuzz import (
    EXIT_LOST,
    STORED_CORPORA,
    CorpusPlace,
    all_coverage,
    coverage_option,
    exit_status_of,
    resume_command,
    show_totals,
)
from zero_sim.cli.parts import echo_report, json_option
from zero_sim.host.packages import packages_needed


@click.command()
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    metavar="FOLDER|URL...",
    type=CorpusPlace(exists=True),
)
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    required=True,
    help="A new folder for the corpus of all shards, bundles included.",
)
@coverage_option
@json_option
@click.pass_context
def merge(
    ctx: click.Context, folders: tuple[str, ...], into: Path, coverage: bool, as_json: bool
) -> None:
    """Make one corpus of those that `zero-sim fuzz --shard I/N --corpus FOLDER` left.

    `zero-sim fuzz --corpus DIR`, with the seed and target of the campaign, goes on from it.

    Exit status: 0 nothing found, 1 findings, 2 the usage is wrong, 3 a shard is not there or a
    worker died.
    """
    with packages_needed():
        from zero_sim.fuzz.campaign import CampaignTotals, Plan
        from zero_sim.fuzz.corpus import counted
        from zero_sim.fuzz.merging import merge_corpora
        from zero_sim.fuzz.object_store import folder_for, is_url, open_stored
        from zero_sim.report.text_buffer_map import in_runs
    here = [
        open_stored(place, here=folder_for(place, within=STORED_CORPORA)).here
        if is_url(place)
        else Path(place)
        for place in folders
    ]
    merged = merge_corpora(here, into=into)
    totals = CampaignTotals()
    for report, counts in counted(merged.reports):
        if counts or report.lost:
            totals.take(report)
        else:
            totals.note(report.found)
    head = merged.head
    plan = Plan(
        target=head.target,
        device=head.device,
        options=head.options,
        family=head.family,
        seed=head.seed,
        corpus=into,
    )
    status = exit_status_of(totals)
    if merged.shards_missing and not totals.found:
        status = EXIT_LOST
    if as_json:
        echo_report(
            {
                **totals.as_dict(),
                **(all_coverage(totals, plan=plan) if coverage else {}),
                "device": plan.device,
                "corpus": str(into),
                "shards": merged.shard_count,
                "shards_missing": list(merged.shards_missing),
                "seconds": totals.busy_seconds,
                "exit_status": status,
            }
        )
    else:
        again = resume_command(plan, place=None)
        show_totals(totals, plan=plan, elapsed=totals.busy_seconds, coverage=coverage, again=again)
        if merged.shards_missing:
            missing = in_runs(merged.shards_missing)
            click.echo(f"Not there of {merged.shard_count:,} shards: {missing}.")
    ctx.exit(status)
