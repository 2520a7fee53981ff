"""The campaign report of `zero-sim fuzz`."""

from __future__ import annotations

import shlex
from textwrap import indent
from typing import TYPE_CHECKING

import click

from zero_sim.cli.options import own_options_again
from zero_sim.errors import ScenarioError, UsageError
from zero_sim.report.commands import replay_command
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zero_sim.fuzz.campaign import Plan
    from zero_sim.fuzz.records import Found
    from zero_sim.fuzz.totals import CampaignTotals
    from zero_sim.targets import Capabilities

DEFAULT_SECONDS = 60.0


def _resume_command(plan: Plan) -> str:
    words = ["--corpus", str(plan.corpus)]
    for option, value, default in (
        ("--target", plan.head.target, "zero_sim"),
        ("--seed", plan.head.seed, 0),
        ("--device", plan.head.device, "cpu"),
        ("--family", plan.head.family, 1),
        ("--order", plan.head.order, None),
        ("--shard", "/".join(map(str, plan.head.shard)), "1/1"),
        ("--cases", plan.cases, None),
        ("--seconds", plan.seconds, DEFAULT_SECONDS if plan.cases is None else None),
    ):
        # Non-default values only, to keep the command short.
        if value != default:
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(["zero-sim", "fuzz", *words, *own_options_again(dict(plan.head.options))])


def _why_empty(totals: CampaignTotals, plan: Plan) -> str:
    """Return the reason why a campaign ran no case, and the remedy."""
    if totals.earlier_cases:
        return (
            f"all {totals.earlier_cases} were run earlier. Try more --cases, another --seed or "
            "another --corpus"
        )
    # The plan itself may be empty: --cases 0, or more shards than batches.
    if not any(plan.batches()):
        shard = (
            ""
            if plan.head.shard == (1, 1)
            else f" for shard {plan.head.shard[0]}/{plan.head.shard[1]}"
        )
        return f"--cases {plan.cases} leaves none{shard}"
    if totals.futile:
        return totals.futile
    if plan.seconds is None:
        return "no batch was completed"
    return f"--seconds {plan.seconds:g} ran out before the first one. Try more"


_OUTCOMES = {
    "fixed": "now fixed: its case passes",
    "fails": "still fails",
    "fails-otherwise": "now fails in another way",
    "unknown": "could not be judged now",
}


def _show_rechecked(totals: CampaignTotals, *, plan: Plan) -> None:
    """Print how earlier findings were judged now."""
    # Messages in a corpus may come from a stranger, hence `printable`.
    for one in totals.rechecked:
        found, reason = one.found, f": {one.reason}" if one.reason else ""
        line = (
            f"Found earlier, {_OUTCOMES[one.outcome]}{reason}\n  {found.key.check}: {found.message}"
        )
        if one.outcome == "fixed" and found.bundle:
            line += f"\n  bundle      {plan.corpus / 'fixed' / found.bundle}"
        click.echo(printable(f"{line}\n", lines=True))


def json_totals(
    totals: CampaignTotals, *, plan: Plan, elapsed: float, coverage: bool, is_own: bool
) -> dict[str, object]:
    """Return a campaign's report for JSON. The arguments are those of `show_totals`.

    Raises:
        UsageError: The target does not exist.
    """
    from zero_sim.report.coverage import coverage_data

    data: dict[str, object] = totals.as_dict()
    if coverage:
        names, finders = drawable_features(plan, is_own=is_own), _finders()
        data["coverage"] = coverage_data(totals.coverage, names=names, finders=finders)
    where = {"device": plan.head.device, "corpus": str(plan.corpus), "seconds": elapsed}
    return {**data, **where, "shards": plan.head.shard[1], "shards_missing": []}


def _capabilities(plan: Plan, *, is_own: bool) -> Capabilities:
    """Return the capabilities of the campaign's target.

    Args:
        plan: The campaign.
        is_own: True if the user named the target; False if a corpus did.

    Raises:
        UsageError: The target does not exist.
    """
    from zero_sim.targets import EVERYTHING, capabilities_of, import_target

    # A corpus may come from a stranger, so its target is not imported. Assume that it supports
    # everything.
    if ":" in plan.head.target and not is_own:
        return EVERYTHING
    return capabilities_of(import_target(plan.head.target))


def drawable_features(plan: Plan, *, is_own: bool) -> tuple[str, ...]:
    """Return the features that the target's cases can have."""
    from zero_sim.fuzz.features import features_for

    return features_for(_capabilities(plan, is_own=is_own))


def _finders() -> Mapping[str, frozenset[str]]:
    """Return the features of each mutant's smallest known case, by mutant id."""
    from zero_sim.mutants.smallest import features_that_found

    return features_that_found()


def _not_generated(plan: Plan, *, is_own: bool) -> str:
    """Return settings of model, run and reload that the target does not follow."""
    from zero_sim.targets.declared import followed

    try:
        follows = _capabilities(plan, is_own=is_own).follows
    except UsageError:
        # Cluster workers import the target, which this machine may not have.
        return ""
    # `system` and `topology` are settings of sharded layouts, which many targets do not have.
    paths = [path for path in followed() if path.startswith(("model.", "run.", "reload"))]
    return ", ".join(path for path in paths if path not in follows)


def _show_silent(totals: CampaignTotals, plan: Plan, *, is_own: bool) -> None:
    """Print inconclusive cases by check, unreported quantities and settings never generated."""
    for name, count in sorted(totals.counts.unproved.items()):
        click.echo(f"Inconclusive by {name}: {_counted(count, 'case')}; zero-sim explain {name}")
    if totals.counts.unobserved:
        silent = ", ".join(
            f"{what} (in {'all' if count == totals.counts.cases else count})"
            for what, count in sorted(totals.counts.unobserved.items())
        )
        click.echo(printable(f"Not observed, because the target does not report it: {silent}"))
    if skipped := _not_generated(plan, is_own=is_own):
        click.echo(printable(f"Not generated, because the target does not follow it: {skipped}"))
    # Print inferred rules, because the user should declare them if they are right.
    for taken in sorted(totals.counts.taken):
        click.echo(printable(taken))


def _case_of(found: Found) -> str:
    """Return a finding's case as TOML, without defaults if this version can read the case."""
    from zero_sim.scenario.dump import to_chosen_toml

    try:
        return to_chosen_toml(found.case_again())
    except ScenarioError:
        return found.scenario  # Another version wrote it, with other settings.


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _shares(found: Found, totals: CampaignTotals) -> bool:
    """Return True if a case with this finding may also count for another finding."""
    keys = [key for key in totals.counts.keys if found.is_met_by(key)]
    others = (each for each in totals.found if each is not found)
    return any(each.is_met_by(key) for each in others for key in keys)


def _in_order(found: Sequence[Found]) -> list[Found]:
    """Return findings by check in order of dataflow, the largest difference of each check first."""
    from zero_sim.findings.dataflow import CHECK_ORDER

    def place(each: Found) -> tuple[int, str, float]:
        # Findings about calls are in no phase, and may cause any other finding. The largest
        # difference is the easiest to understand, and smaller ones may share its cause.
        return CHECK_ORDER.get(each.key.check, -1), each.key.check, -each.apart

    return sorted(found, key=place)


def _show_heading(found: Found, totals: CampaignTotals) -> None:
    """Print a heading above the first of several findings with the same check."""
    alike = _in_order([each for each in totals.found if each.key.check == found.key.check])
    if len(alike) > 1 and alike[0] is found:
        click.echo(
            f"{found.key.check}: {len(alike)} findings, the largest difference first; smaller ones "
            "may have the same cause\n"
        )


def show_totals(
    totals: CampaignTotals, *, plan: Plan, elapsed: float, coverage: bool, is_own: bool
) -> None:
    """Print the report of a campaign.

    Args:
        totals: Results.
        plan: Settings of the campaign.
        elapsed: Seconds.
        coverage: True to print features and pairs, drawn and never drawn.
        is_own: True if the user named the target; False if a corpus did.
    """
    again = _resume_command(plan)
    # Earlier findings, new findings, lost batches, coverage, totals. The verdict comes last,
    # because a terminal shows the end.
    _show_rechecked(totals, plan=plan)
    for found in _in_order(totals.found):
        _show_heading(found, totals)
        count = totals.cases_with(found)
        size = f"so far      {found.size}; " if found.as_met else f"smallest    {found.size}"
        if found.as_met:
            size += f"to shrink it: {again}"
        click.echo(printable(f"{found.text}\n  {size}", lines=True))
        others = ", including cases of similar findings" if _shares(found, totals) else ""
        click.echo(f"  met         in {_counted(count, 'case')}{others}")
        if found.bundle:
            folder = plan.bundles / found.bundle
            replay = replay_command(str(folder), target=plan.head.target, device=plan.head.device)
            click.echo(f"  case        {folder / 'case.toml'}\n  replay      {replay}")
        elif found.scenario:
            # Printed in full, because no bundle contains it.
            # Unshrunk findings and errors have no bundle.
            why = f"none: {found.unkept}" if found.unkept else "none for this finding"
            click.echo(f"  bundle      {why}; its case is\n{indent(_case_of(found), '    ')}")
        click.echo("")
    for lost in totals.lost:
        what = f"Batch {lost.index} (seed {lost.seed}) was lost: {lost.lost}"
        click.echo(printable(what, lines=True))
    if coverage:
        from zero_sim.report.coverage import render_coverage

        names, finders = drawable_features(plan, is_own=is_own), _finders()
        click.echo(render_coverage(totals.coverage, names=names, finders=finders) + "\n")
    _show_silent(totals, plan, is_own=is_own)
    from zero_sim.report.text import count_verdicts

    verdicts = count_verdicts(totals.counts.verdicts, params_only=totals.counts.params_only)
    click.echo(f"{totals.progress(seconds=elapsed)}; {verdicts or 'nothing ran'}; {elapsed:.1f} s")
    if totals.is_empty and not totals.interrupted and totals.unkept is None:
        click.echo(f"No case was run: {_why_empty(totals, plan)}.")
    elif totals.futile:
        click.echo(printable(f"Stopped: {totals.futile}.", lines=True))
    if totals.interrupted:
        click.echo(
            printable(f"Interrupted. Results are saved. Resume with:\n  {again}", lines=True)
        )
    if totals.unkept is None:
        click.echo(printable(f"Saved in {plan.corpus}"))
