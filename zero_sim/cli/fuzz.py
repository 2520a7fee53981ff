"""The command `zero-sim fuzz`: a campaign with its progress and its report."""

from __future__ import annotations

import contextlib
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
_WITH_JOIN = ("join", "corpus", "coverage", "as_json", "html")
"""Parameters that have an effect with `--join`."""


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
class _Shown:
    """Forms in which a campaign is shown."""

    coverage: bool = option(
        "--coverage",
        is_flag=True,
        help="Also show the features of cases, alone and in pairs: those that never occurred, "
        "those that found a mutant, and what further cases would add.",
    )
    as_json: bool = option("--json", **JSON)
    html: Path | None = option(
        "--html",
        type=FILE,
        metavar="FILE",
        help="Write the campaign as an HTML page, with a heat map of pairs of features.",
    )


@click.command()
@click.option(
    "--target",
    default="zero_sim",
    show_default=True,
    metavar="NAME|MODULE:NAME",
    help="System under test: a registered one, or one to import.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    callback=a_number,
    metavar="S",
    help="Begin no case after so long, imports and what the corpus holds not counted; "
    f"{DEFAULT_SECONDS:.0f} if --cases is not given either.",
)
@device_option
@own_options
@click.option("--cases", type=click.IntRange(min=0), metavar="N", help="Cases of all shards.")
@click.option(
    "--family",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Judge up to N systems with each model, data and optimizer that are drawn, all of them "
    "against one reference's steps: cheaper a case, and fewer models.",
)
@click.option(
    "--order",
    metavar="NAME|unknown",
    help="Order in which reductions add in all cases, of those that the target declares; unknown: "
    "one that the judge is not told, so that sums are judged by proven bounds.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="S")
@click.option("--jobs", type=click.IntRange(min=1), metavar="J", help="Batches at a time.")
@click.option(
    "--scheduler", metavar="ADDRESS", help="Run on a Dask cluster; needs the extra `cluster`."
)
@click.option(
    "--shard",
    type=_Shard(),
    default="1/1",
    show_default=True,
    metavar="I/N",
    help="Run only this share of the batches, for job arrays.",
)
@click.option(
    "--corpus",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep everything in DIR, and go on from what is there; a link in it is refused.  "
    f"[default: a folder by target and seed in {DEFAULT_CORPUS}, begun anew]",
)
@click.option(
    "--join",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    metavar="FILE|DIR",
    help="Run nothing: make one corpus, in DIR of --corpus, of the files of a campaign's shards or "
    "of those in a folder, and show what they found; several times for several.",
)
@takes(_Shown, "shown")
@click.pass_context
def fuzz(
    ctx: click.Context,
    target: str,
    seconds: float | None,
    device: str,
    said: tuple[str, ...],
    cases: int | None,
    family: int,
    order: str | None,
    seed: int,
    jobs: int | None,
    scheduler: str | None,
    shard: tuple[int, int],
    corpus: Path | None,
    join: tuple[Path, ...],
    shown: _Shown,
) -> None:
    """Generate cases, judge them, and shrink those that fail.

    Cases concentrate on the edges of partitions: uneven shards, padding, empty shards, small
    buckets. With --corpus, earlier findings are judged again first; the bundles of fixed ones move
    to the folder `fixed` in DIR.

    Exit status: 0 nothing found, 1 findings, 2 the usage is wrong, 3 a worker died or the file of a
    shard is missing, 4 this machine cannot run it or store more of it, 5 no case was run, 130
    interrupted by Ctrl-C or SIGTERM, after which the corpus keeps everything so far.

    \b
    Examples:
      zero-sim fuzz --cases 200
      zero-sim fuzz --target engine:MyTarget --seconds 300 --jobs 2
      zero-sim fuzz --corpus nightly --seed 7 --coverage
    """
    if join:
        ctx.exit(_join(ctx, join, into=corpus, shown=shown))
    with packages_needed():
        from zero_sim.fuzz.campaign import Plan, open_pool, run_campaign
        from zero_sim.fuzz.records import Head, batch_cases
        from zero_sim.host.device import check_device
        from zero_sim.report.text import render_case
    if scheduler is None:
        # Before a folder is made for it; what a cluster has, it says itself.
        check_device(device)
    head = Head(
        seed=seed,
        target=target,
        cases=batch_cases(family),
        shard=shard,
        device=device,
        options=tuple(sorted(parse_own_options(said).items())),
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
    # What a model prints must not end up in the middle of the JSON.
    out = contextlib.redirect_stdout(sys.stderr) if shown.as_json else contextlib.nullcontext()
    with out, open_pool(jobs=jobs, scheduler=scheduler) as pool:
        totals = run_campaign(
            plan, pool=pool, render=render_case, tell=progress.tell, tell_converted=_tell_converted
        )
    progress.clear()
    if totals.unkept is not None:
        click.echo(f"Error: {totals.unkept}", err=True)
    status = exit_status_of(totals)
    _show(totals, plan=plan, elapsed=time.monotonic() - started, shown=shown, status=status)
    ctx.exit(status)


def _show(
    totals: CampaignTotals,
    *,
    plan: Plan,
    elapsed: float,
    shown: _Shown,
    status: int,
    **more: object,
) -> None:
    """Print a campaign, and write its page if the command line has `--html`.

    Args:
        totals: Results so far.
        plan: What was to run.
        elapsed: Seconds.
        shown: Forms of output.
        status: Exit status, for JSON.
        more: Further fields, for JSON.
    """
    if shown.as_json:
        fields = json_totals(totals, plan=plan, elapsed=elapsed, coverage=shown.coverage)
        echo_report({**fields, **more, "exit_status": status})
    else:
        show_totals(totals, plan=plan, elapsed=elapsed, coverage=shown.coverage)
    if shown.html is not None:
        from zero_sim.report.campaign_page import write_campaign_page

        names = drawable_features(plan)
        write_campaign_page(shown.html, totals, plan=plan, elapsed=elapsed, names=names)


def _join(
    ctx: click.Context,
    places: tuple[Path, ...],
    *,
    into: Path | None,
    shown: _Shown,
) -> int:
    """Join the corpora of shards, and show what is in them; the exit status."""
    for param in ctx.command.params:
        on_line = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if on_line and param.name not in _WITH_JOIN:
            raise UsageError(
                f"expected {param.opts[0]} without --join, which runs no case and reads of which "
                f"campaign files are in them, got both. Remove {param.opts[0]}."
            )
    if into is None:
        raise UsageError("expected --corpus with --join, a new folder for all shards, got none.")
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
    seconds = totals.counts.seconds
    status = EXIT_LOST if missing and not totals.found else exit_status_of(totals)
    shards = {"shards": joined.shard_count, "shards_missing": list(missing)}
    _show(totals, plan=plan, elapsed=seconds, shown=shown, status=status, **shards)
    if missing and not shown.as_json:
        click.echo(f"Not there of {joined.shard_count:,} shards: {in_runs(missing)}.")
    return status


def _tell_converted(old: Path) -> None:
    click.echo(
        printable(f"Converted {old}, of an earlier version, to SQLite. You can delete it."),
        err=True,
    )


def _fresh_folder(target: str, *, seed: int, device: str) -> Path:
    """A folder that no campaign was in: nobody who names none wants to resume one."""
    on = "" if device == "cpu" else f"-{device}"
    words = re.sub(r"[^\w.-]+", "_", f"{target}{on}")
    number = 1
    while (DEFAULT_CORPUS / f"{words}-{seed}-{number}").exists():
        number += 1
    return DEFAULT_CORPUS / f"{words}-{seed}-{number}"


def exit_status_of(totals: CampaignTotals) -> int:
    """By what a command ends that shows what came of a campaign."""
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
    """One line on stderr: rewritten on a terminal, and now and then a new one elsewhere."""

    LINE_SECONDS = 30.0

    def __init__(self, started: float) -> None:
        self._started = started
        self._shown_at = started
        self._known = 0

    def tell(self, totals: CampaignTotals) -> None:
        """Show how far it is."""
        now = time.monotonic()
        line = totals.progress(seconds=now - self._started)
        if takes_codes(sys.stderr):
            click.echo(f"\r\x1b[K{line}", err=True, nl=False)
        elif now - self._shown_at >= self.LINE_SECONDS or len(totals.found) > self._known:
            click.echo(line, err=True)
            self._shown_at = now
        self._known = len(totals.found)

    def clear(self) -> None:
        """Leave an empty line on a terminal."""
        if takes_codes(sys.stderr):
            click.echo("\r\x1b[K", err=True, nl=False)
