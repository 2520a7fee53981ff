"""The command `zero-sim fuzz`: a campaign with its progress and its report."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

import click

from zero_sim.cli.options import own_options, own_options_again, parse_own_options
from zero_sim.cli.parts import (
    EXIT_INTERRUPTED,
    EXIT_NOTHING_SELECTED,
    a_number,
    device_option,
    echo_report,
    json_option,
)
from zero_sim.errors import ScenarioError
from zero_sim.host.packages import packages_needed
from zero_sim.host.terminal import takes_codes
from zero_sim.report.commands import replay_command
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zero_sim.fuzz.campaign import CampaignTotals, Plan
    from zero_sim.fuzz.records import Found

EXIT_FOUND = 1
EXIT_LOST = 3
DEFAULT_SECONDS = 60.0
DEFAULT_CORPUS = Path(".zero-sim", "corpus")
STORED_CORPORA = Path(".zero-sim", "stored")
"""Folders that stand for those in object stores."""


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


class CorpusPlace(click.ParamType):
    """A folder of this machine, or the URL of one in an object store."""

    name = "dir|url"

    def __init__(self, *, exists: bool = False) -> None:
        self._folder = click.Path(file_okay=False, exists=exists)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """The place as it was given, if it may be one."""
        place = str(value)
        if "://" not in place:
            self._folder.convert(place, param, ctx)
        return place


coverage_option = click.option(
    "--coverage",
    is_flag=True,
    help="Also show which features cases had, alone and in pairs, which never, which of them ever "
    "found a mutant, and what further cases would bring.",
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
    type=CorpusPlace(),
    metavar="DIR|URL",
    help="Keep everything in DIR, and go on from what is there; a link in it is refused. A URL "
    "such as s3://bucket/nightly is a folder in an object store, written after each batch.  "
    f"[default: a folder by target and seed in {DEFAULT_CORPUS}, begun anew]",
)
@coverage_option
@json_option
@click.pass_context
def fuzz(
    ctx: click.Context,
    target: str,
    seconds: float | None,
    device: str,
    said: tuple[str, ...],
    cases: int | None,
    family: int,
    seed: int,
    jobs: int | None,
    scheduler: str | None,
    shard: tuple[int, int],
    corpus: str | None,
    coverage: bool,
    as_json: bool,
) -> None:
    """Draw cases at the edges of a partition, judge them, and shrink what fails.

    With --corpus, what was found earlier is judged again first: what is fixed is said to be, and
    its bundle goes to the folder `fixed` in DIR.

    Exit status: 0 nothing found, 1 findings, 2 the usage is wrong, 3 a worker died, 4 this machine
    cannot run it or keep more of it, 5 no case was run, 130 interrupted, by Ctrl-C or SIGTERM;
    then everything so far is kept.
    """
    with packages_needed():
        from zero_sim.fuzz.batch_pool import open_batch_pool
        from zero_sim.fuzz.campaign import Plan, run_campaign
        from zero_sim.fuzz.object_store import folder_for, is_url, open_stored
        from zero_sim.host.device import check_device
        from zero_sim.report.text import render_case
    if scheduler is None:
        # Before a folder is made for it; what a cluster has, it says itself.
        check_device(device)
    stored = None
    if corpus is not None and is_url(corpus):
        stored = open_stored(corpus, here=folder_for(corpus, within=STORED_CORPORA))
        folder = stored.here
    else:
        folder = Path(corpus) if corpus else _fresh_folder(target, seed=seed, device=device)
    plan = Plan(
        target=target,
        device=device,
        options=tuple(parse_own_options(said).items()),
        family=family,
        seed=seed,
        cases=cases,
        seconds=DEFAULT_SECONDS if seconds is None and cases is None else seconds,
        shard=shard,
        corpus=folder,
    )
    progress = _Progress(started := time.monotonic())
    # What a model prints must not end up in the middle of the JSON.
    out = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with out, open_batch_pool(render=render_case, jobs=jobs, scheduler=scheduler) as batch_pool:
        send = (lambda: None) if stored is None else stored.send
        totals = run_campaign(plan, batch_pool=batch_pool, tell=progress.tell, send=send)
    progress.clear()
    elapsed = time.monotonic() - started
    status = exit_status_of(totals)
    if totals.unkept is not None:
        click.echo(f"Error: {totals.unkept}", err=True)
    if as_json:
        where = {"device": plan.device, "corpus": corpus or str(plan.corpus)}
        of_all = {**totals.as_dict(), **(all_coverage(totals, plan=plan) if coverage else {})}
        echo_report({**of_all, **where, "seconds": elapsed, "exit_status": status})
    else:
        again = resume_command(plan, place=corpus)
        show_totals(totals, plan=plan, elapsed=elapsed, coverage=coverage, again=again)
    ctx.exit(status)


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


def resume_command(plan: Plan, *, place: str | None) -> str:
    """The command that goes on with a campaign.

    Args:
        plan: Of the campaign.
        place: Its corpus, if not the folder in `plan`.
    """
    words = ["--corpus", place or str(plan.corpus)]
    for option, value, default in (
        ("--target", plan.target, "zero_sim"),
        ("--seed", plan.seed, 0),
        ("--device", plan.device, "cpu"),
        ("--family", plan.family, 1),
        ("--shard", "/".join(map(str, plan.shard)), "1/1"),
        ("--cases", plan.cases, None),
        ("--seconds", plan.seconds, DEFAULT_SECONDS if plan.cases is None else None),
    ):
        if value != default:
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(["zero-sim", "fuzz", *words, *own_options_again(dict(plan.options))])


def _why_empty(totals: CampaignTotals, plan: Plan) -> str:
    """Why a campaign ran no case, and what to try."""
    if totals.earlier_cases:
        return (
            f"all {totals.earlier_cases} were run earlier. Try more --cases, another --seed, or "
            "another --corpus"
        )
    if not any(plan.batches()):
        shard = "" if plan.shard == (1, 1) else f" for shard {plan.shard[0]}/{plan.shard[1]}"
        return f"--cases {plan.cases} leaves none{shard}"
    if totals.futile:
        return totals.futile
    if plan.seconds is None:
        return "its corpora hold none"
    return f"--seconds {plan.seconds:g} ran out before the first one. Try more"


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


_OUTCOMES = {
    "fixed": "is fixed: its case passes now",
    "fails": "still fails",
    "fails-otherwise": "fails in another way now",
    "unknown": "could not be judged now",
}


def _show_rechecked(totals: CampaignTotals, *, plan: Plan) -> None:
    """Say what came of what earlier runs found."""
    for one in totals.rechecked:
        found, said = one.found, f": {one.said}" if one.said else ""
        line = (
            f"Found earlier, {_OUTCOMES[one.outcome]}{said}\n  {found.key.check}: {found.message}"
        )
        if one.outcome == "fixed" and found.bundle:
            line += f"\n  bundle      {plan.corpus / 'fixed' / found.bundle}"
        click.echo(printable(f"{line}\n", lines=True))


def all_coverage(totals: CampaignTotals, *, plan: Plan) -> dict[str, object]:
    """What a campaign had of features and pairs, ready for JSON, in place of the counts alone.

    Raises:
        UsageError: There is no such target.
    """
    from zero_sim.report.coverage import coverage_data

    names, finders = _drawable(plan), _finders()
    return {"coverage": coverage_data(totals.coverage, names=names, finders=finders)}


def _drawable(plan: Plan) -> tuple[str, ...]:
    """Features that cases for the target of a campaign can have."""
    from zero_sim.fuzz.features import features_for
    from zero_sim.targets import capabilities_of, import_target

    return features_for(capabilities_of(import_target(plan.target)))


def _finders() -> Mapping[str, frozenset[str]]:
    """What of features is left in the smallest case that finds a mutant, by its id."""
    from zero_sim.mutants.smallest import features_that_found

    return features_that_found()


def _show_silent(totals: CampaignTotals) -> None:
    """Say of which cases nothing was shown, and what of the others was not looked at."""
    for name, count in sorted(totals.unproved.items()):
        click.echo(f"Inconclusive by {name}: {_counted(count, 'case')}; zero-sim explain {name}")
    if totals.unobserved:
        silent = ", ".join(
            f"{what} (in {'all' if count == totals.cases else count})"
            for what, count in sorted(totals.unobserved.items())
        )
        click.echo(printable(f"Not observed, since the target does not tell it: {silent}"))
    for taken in sorted(totals.taken):
        click.echo(printable(taken))


def _case_of(found: Found) -> str:
    """The case of a finding as TOML, without what is as by default if it can be read."""
    from zero_sim.scenario.dump import to_chosen_toml

    try:
        return to_chosen_toml(found.case_again())
    except ScenarioError:
        return found.scenario  # Of another version, which had other settings.


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _shares(found: Found, totals: CampaignTotals) -> bool:
    """Whether cases that can be of a finding can be of another one, too."""
    keys = [key for key in totals.keys if found.is_met_by(key)]
    others = (each for each in totals.found if each is not found)
    return any(each.is_met_by(key) for each in others for key in keys)


def _largest_first(found: Sequence[Found]) -> list[Found]:
    """Findings of one check together, those whose values are furthest apart first."""
    checks = {each.key.check: place for place, each in reversed([*enumerate(found)])}
    return sorted(found, key=lambda each: (checks[each.key.check], -each.apart))


def _show_heading(found: Found, totals: CampaignTotals) -> None:
    """Print the heading that findings of one check share, above the first of several."""
    alike = _largest_first([each for each in totals.found if each.key.check == found.key.check])
    if len(alike) > 1 and alike[0] is found:
        click.echo(
            f"{found.key.check}: {len(alike)} findings, the largest difference first; smaller ones "
            "may have the same cause\n"
        )


def show_totals(
    totals: CampaignTotals, *, plan: Plan, elapsed: float, coverage: bool, again: str
) -> None:
    """Print what came of a campaign.

    Args:
        totals: All of it.
        plan: What it was to do.
        elapsed: Seconds that it took.
        coverage: Whether to show which features and pairs were drawn, and which never.
        again: The command that goes on with it.
    """
    _show_rechecked(totals, plan=plan)
    for found in _largest_first(totals.found):
        _show_heading(found, totals)
        count = sum(count for key, count in totals.keys.items() if found.is_met_by(key))
        size = f"so far      {found.size}; " if found.as_met else f"smallest    {found.size}"
        if found.as_met:
            size += f"to have it made smaller: {again}"
        click.echo(printable(f"{found.text}\n  {size}", lines=True))
        others = ", those of findings like it included" if _shares(found, totals) else ""
        click.echo(f"  met         in {_counted(count, 'case')}{others}")
        if found.bundle:
            folder = plan.bundles / found.bundle
            replay = replay_command(str(folder), target=plan.target, device=plan.device)
            click.echo(f"  case        {folder / 'case.toml'}\n  replay      {replay}")
        elif found.scenario:
            # Kept nowhere else where somebody would look.
            why = f"none: {found.unkept}" if found.unkept else "none of such a finding"
            click.echo(f"  bundle      {why}; its case is\n{indent(_case_of(found), '    ')}")
        click.echo("")
    for lost in totals.lost:
        what = f"Batch {lost.index} (seed {lost.seed}) was lost: {lost.lost}"
        click.echo(printable(what, lines=True))
    if coverage:
        from zero_sim.report.coverage import render_coverage

        names, finders = _drawable(plan), _finders()
        click.echo(render_coverage(totals.coverage, names=names, finders=finders) + "\n")
    _show_silent(totals)
    from zero_sim.report.text import count_verdicts

    verdicts = count_verdicts(totals.verdicts, params_only=totals.params_only)
    click.echo(f"{totals.progress(seconds=elapsed)}; {verdicts or 'nothing ran'}; {elapsed:.1f} s")
    if totals.is_empty and not totals.interrupted and totals.unkept is None:
        click.echo(f"No case was run: {_why_empty(totals, plan)}.")
    elif totals.futile:
        click.echo(printable(f"Stopped: {totals.futile}.", lines=True))
    if totals.interrupted:
        click.echo(
            printable(f"Interrupted; everything so far is kept. Go on with:\n  {again}", lines=True)
        )
    if totals.unkept is None:
        click.echo(printable(f"Kept in {plan.corpus}"))
