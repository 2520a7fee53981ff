"""The command `zero-sim fuzz`: run a campaign, show progress and a report."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from zero_sim.cli.fuzz_text import (
    DEFAULT_SECONDS,
    drawable_features,
    json_totals,
    show_totals,
)
from zero_sim.cli.options import own_options, parse_own_options
from zero_sim.cli.parts import (
    EXIT_INTERRUPTED,
    EXIT_NOTHING_SELECTED,
    FILE,
    JSON,
    a_number,
    device_option,
    echo_report,
    option,
    stdout_for,
    takes,
)
from zero_sim.errors import UsageError
from zero_sim.host.packages import packages_needed
from zero_sim.host.terminal import takes_codes
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.fuzz.campaign import Plan
    from zero_sim.fuzz.totals import CampaignTotals

EXIT_FOUND = 1
EXIT_LOST = 3
DEFAULT_CORPUS = Path(".zero-sim", "corpus")
# Parameters that `--join` accepts; others would be ignored.
_WITH_JOIN = ("join", "corpus", "coverage", "as_json", "html")


class _Shard(click.ParamType):
    name = "i/n"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)/(\d+)", str(value))
        if match is None:
            self.fail(f"expected two numbers such as 1/4, got {value!r}", param, ctx)
        return int(match[1]), int(match[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Display:
    """Output formats of a campaign."""

    coverage: bool = option(
        "--coverage",
        is_flag=True,
        help="Also show features and pairs of features: which never occurred, which find mutants, "
        "and how many more to expect.",
    )
    as_json: bool = option("--json", **JSON)
    html: Path | None = option(
        "--html",
        type=FILE,
        metavar="FILE",
        help="Write an HTML page about the campaign, with a heat map of feature pairs.",
    )


@click.command()
@click.option(
    "--target",
    default="zero_sim",
    show_default=True,
    metavar="NAME|MODULE:NAME",
    help="System under test: a registered name, or module:name to import.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    callback=a_number,
    metavar="S",
    help="Start no case after S seconds, without imports and earlier results. Default "
    f"{DEFAULT_SECONDS:.0f}, or no limit with --cases.",
)
@device_option
@own_options
@click.option("--cases", type=click.IntRange(min=0), metavar="N", help="Cases on all shards.")
@click.option(
    "--family",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Judge up to N systems with the same model, data and optimizer against the same "
    "reference steps. Cases become cheaper, but cover fewer models.",
)
@click.option(
    "--order",
    metavar="NAME|unknown",
    help="Summation order of all cases; the target must declare it. With `unknown`, the order is "
    "hidden from the judge and sums are checked against proven bounds.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="S")
@click.option("--jobs", type=click.IntRange(min=1), metavar="J", help="Batches run in parallel.")
@click.option(
    "--scheduler", metavar="ADDRESS", help="Run on a Dask cluster; needs the extra `cluster`."
)
@click.option(
    "--shard",
    type=_Shard(),
    default="1/1",
    show_default=True,
    metavar="I/N",
    help="Run only share I of N of the batches, for job arrays.",
)
@click.option(
    "--corpus",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Save results in DIR and resume from it. Symlinks in it are refused.  "
    f"[default: a new folder in {DEFAULT_CORPUS}, named by target and seed]",
)
@click.option(
    "--join",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    metavar="FILE|DIR",
    help="Run nothing. Join the corpora of a campaign's shards (files, or all in a folder) into "
    "the new folder of --corpus, and show their findings. Repeatable.",
)
@takes(_Display, "display")
@click.pass_context
def fuzz(
    ctx: click.Context,
    target: str,
    seconds: float | None,
    device: str,
    option_values: tuple[str, ...],
    cases: int | None,
    family: int,
    order: str | None,
    seed: int,
    jobs: int | None,
    scheduler: str | None,
    shard: tuple[int, int],
    corpus: Path | None,
    join: tuple[Path, ...],
    display: _Display,
) -> None:
    """Generate cases, judge them, and shrink those that fail.

    Cases concentrate on the edges of partitions: uneven shards, padding, empty shards, small
    buckets. With --corpus, earlier findings are judged again first. Bundles of fixed findings move
    to DIR/fixed.

    Exit status: 0 no findings, 1 findings, 2 the usage is wrong, 3 a worker died or a shard's file
    is missing, 4 this machine cannot run it or store results, 5 no case was run, 130 interrupted.

    \b
    Examples:
      zero-sim fuzz --cases 200
      zero-sim fuzz --target engine:MyTarget --seconds 300 --jobs 2
      zero-sim fuzz --corpus nightly --seed 7 --coverage
    """
    if join:
        ctx.exit(_join(ctx, join, into=corpus, display=display))
    with packages_needed():
        from zero_sim.fuzz.campaign import Plan, open_pool, run_campaign
        from zero_sim.fuzz.records import Head, batch_cases
        from zero_sim.host.device import check_device
        from zero_sim.report.text import render_case
    if scheduler is None:  # Workers of a cluster check their own devices.
        check_device(device)
    head = Head(
        seed=seed,
        target=target,
        cases=batch_cases(family),
        shard=shard,
        device=device,
        options=tuple(sorted(parse_own_options(option_values).items())),
        family=family,
        order=order,
    )
    plan = Plan(
        head=head,
        cases=cases,
        seconds=DEFAULT_SECONDS if seconds is None and cases is None else seconds,
        corpus=corpus or _fresh_folder(target, seed=seed, device=device),
    )
    progress = _Progress(started := time.monotonic())
    with stdout_for(as_json=display.as_json), open_pool(jobs=jobs, scheduler=scheduler) as pool:
        totals = run_campaign(
            plan, pool=pool, render=render_case, on_batch=progress.update, on_converted=_note_old
        )
    # The report must not begin on the progress line.
    progress.clear()
    if totals.unkept is not None:
        click.echo(f"Error: {totals.unkept}", err=True)
    status = exit_status_of(totals)
    _show(totals, plan=plan, elapsed=time.monotonic() - started, display=display, status=status)
    ctx.exit(status)


def _show(
    totals: CampaignTotals,
    *,
    plan: Plan,
    elapsed: float,
    display: _Display,
    status: int,
    is_own: bool = True,
    **more: object,
) -> None:
    """Print the report of a campaign; write the page of `--html`.

    Args:
        totals: Results so far.
        plan: Settings of the campaign.
        elapsed: Seconds.
        display: Output formats.
        status: Exit status, for JSON.
        is_own: True if the user named the target; False if a corpus did.
        more: Further fields, for JSON.
    """
    if display.as_json:
        fields = json_totals(
            totals, plan=plan, elapsed=elapsed, coverage=display.coverage, is_own=is_own
        )
        echo_report({**fields, **more, "exit_status": status})
    else:
        show_totals(totals, plan=plan, elapsed=elapsed, coverage=display.coverage, is_own=is_own)
    if display.html is not None:
        from zero_sim.report.campaign_page import write_campaign_page

        names = drawable_features(plan, is_own=is_own)
        write_campaign_page(display.html, totals, plan=plan, elapsed=elapsed, names=names)


def _join(
    ctx: click.Context,
    places: tuple[Path, ...],
    *,
    into: Path | None,
    display: _Display,
) -> int:
    """Join the corpora of shards, print their findings, and return the exit status."""
    # Settings come from the joined files, so refuse options that would set them again.
    for param in ctx.command.params:
        on_line = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if on_line and param.name not in _WITH_JOIN:
            raise UsageError(
                f"expected {param.opts[0]} without --join, which runs no case and reads settings "
                f"from the files, got both. Remove {param.opts[0]}."
            )
    if into is None:
        raise UsageError(
            "expected --corpus with --join, got none. Add --corpus with a new folder to join into."
        )
    with packages_needed():
        from zero_sim.fuzz.campaign import Plan
        from zero_sim.fuzz.joining import join_corpora
        from zero_sim.fuzz.totals import CampaignTotals
        from zero_sim.report.text_buffer_map import in_runs
    joined = join_corpora(places, into=into)
    totals = CampaignTotals()
    totals.take_all(joined.kept)
    missing = joined.shards_missing
    plan = Plan(head=joined.kept.head, corpus=into)
    # Show the seconds of the shards' cases, because the time to join files interests no reader.
    seconds = totals.counts.seconds
    # If shards are missing, a finding still counts, but a pass does not.
    status = EXIT_LOST if missing and not totals.found else exit_status_of(totals)
    shards = {"shards": joined.shard_count, "shards_missing": list(missing)}
    _show(
        totals, plan=plan, elapsed=seconds, display=display, status=status, is_own=False, **shards
    )
    if missing and not display.as_json:
        click.echo(f"Missing of {joined.shard_count:,} shards: {in_runs(missing)}.")
    return status


def _note_old(old: Path) -> None:
    click.echo(
        printable(f"Converted {old}, of an earlier version, to SQLite. You can delete it."),
        err=True,
    )


def _fresh_folder(target: str, *, seed: int, device: str) -> Path:
    """Return a folder that does not exist yet."""
    # Without --corpus, a campaign starts anew. A rerun that resumed silently would run no case.
    on = "" if device == "cpu" else f"-{device}"
    words = re.sub(r"[^\w.-]+", "_", f"{target}{on}")
    # Numbered, so that campaigns with the same target and seed do not overwrite each other.
    number = 1
    while (DEFAULT_CORPUS / f"{words}-{seed}-{number}").exists():
        number += 1
    return DEFAULT_CORPUS / f"{words}-{seed}-{number}"


def exit_status_of(totals: CampaignTotals) -> int:
    """Return the exit status for the results of a campaign."""
    # The gravest first: a finding counts even if the disk is full or workers died.
    if totals.interrupted:
        return EXIT_INTERRUPTED
    if totals.found:
        return EXIT_FOUND
    if totals.unkept is not None:
        return totals.unkept.exit_status
    if totals.is_empty:
        return EXIT_NOTHING_SELECTED
    return EXIT_LOST if totals.lost else 0


class _Progress:
    """Progress on stderr: a line that is rewritten on a terminal, else a new line now and then."""

    LINE_SECONDS = 30.0
    """Interval of lines without a terminal, such as in CI logs."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._shown_at = started
        self._known = 0

    def update(self, totals: CampaignTotals) -> None:
        """Show the progress."""
        now = time.monotonic()
        line = totals.progress(seconds=now - self._started)
        # Without a terminal, a new finding is shown at once, else a line per interval.
        if takes_codes(sys.stderr):
            # Go to the start of the line, then erase it by an ANSI code.
            click.echo(f"\r\x1b[K{line}", err=True, nl=False)
        elif now - self._shown_at >= self.LINE_SECONDS or len(totals.found) > self._known:
            click.echo(line, err=True)
            self._shown_at = now
        self._known = len(totals.found)

    def clear(self) -> None:
        """Erase the line on a terminal."""
        if takes_codes(sys.stderr):
            click.echo("\r\x1b[K", err=True, nl=False)
