"""The commands `explain` and `report`: findings for human readers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from zero_sim.cli.parts import bundles_option, echo_report, json_option
from zero_sim.errors import BundleError, UsageError
from zero_sim.host.packages import packages_needed
from zero_sim.report.commands import DEFAULT_BUNDLES


@click.command()
@click.argument("name", metavar="CHECK|ID|PATH")
@bundles_option
@json_option
def explain(name: str, bundles: Path, as_json: bool) -> None:
    """Explain a check: meaning, usual causes, next step, known cases.

    With a bundle, prints its case and explains the check of its first finding.

    \b
    Examples:
      zero-sim explain equality.grad
      zero-sim explain 4f2a
    """
    from zero_sim.report.explain import EXPLANATIONS
    from zero_sim.report.explain import explain as explain_check
    from zero_sim.report.text import render_bundle, render_explanation
    from zero_sim.scenario.suggest import nearest

    bundle, check = None, name
    # Checks first: they need no torch.
    if name not in EXPLANATIONS:
        with packages_needed():
            from zero_sim.bundle import find_bundle, read_bundle
        try:
            path = find_bundle(name, folder=bundles)
        except BundleError as error:
            raise UsageError(
                f"expected a check or a bundle, got {name!r}. Checks: "
                f"{nearest(name, EXPLANATIONS)}.\n{error}"
            ) from None
        bundle = read_bundle(path)
        # Findings are in order of dataflow, so the first is nearest to the cause.
        check = bundle.findings[0].check
    explanation = explain_check(check)
    if as_json:
        about = {"bundle": None, "finding": None, "strip": None}
        if bundle is not None:
            strip = None if bundle.strip is None else bundle.strip.as_dict()
            finding = bundle.findings[0].as_dict()
            about = {"bundle": bundle.id, "finding": finding, "strip": strip}
        echo_report({**asdict(explanation), **about})
        return
    if bundle is not None:
        click.echo(render_bundle(bundle))
    click.echo(render_explanation(explanation))


@click.command()
@click.argument("names", metavar="[ID|PATH]...", nargs=-1)
@bundles_option
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("zero-sim.html"),
    show_default=True,
    metavar="FILE",
    help="Output file. Refuses a named pipe that has no reader.",
)
def report(names: tuple[str, ...], bundles: Path, output: Path) -> None:
    """Write a self-contained HTML page about failed cases.

    Without ID or PATH, the page shows all bundles in the folder.

    \b
    Examples:
      zero-sim report
      zero-sim report 4f2a --output finding.html
    """
    with packages_needed():
        from zero_sim.bundle import find_bundles, read_bundle
        from zero_sim.report.html import write_page
    # Read all bundles before writing, so that a broken bundle leaves an old page alone.
    found = [read_bundle(path) for path in find_bundles(names, folder=bundles)]
    write_page(output, found, bundles_folder=None if bundles == DEFAULT_BUNDLES else bundles)
    click.echo(f"{output}: {len(found)} failed case{'' if len(found) == 1 else 's'}")
