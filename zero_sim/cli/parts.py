"""Parts that several commands share."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import click
from click.core import ParameterSource

from zero_sim.errors import UsageError
from zero_sim.report.commands import DEFAULT_BUNDLES

bundles_option = click.option(
    "--bundles",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_BUNDLES,
    show_default=True,
    metavar="DIR",
    help="Folder with the bundles of failing cases.",
)
device_option = click.option(
    "--device",
    metavar="NAME",
    default="cpu",
    show_default=True,
    help="Where the simulated ranks and the reference compute: cpu, cuda, cuda:1, or any other "
    "device that torch knows here.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else."
)
cores_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=os.cpu_count() or 1,
    show_default="cores",
    help="Processes.",
)

EXIT_NOTHING_SELECTED = 5
EXIT_INTERRUPTED = 130


def a_number(_: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Callback of an option: NaN lies in no range, but click lets it through every one."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("expected a number, got nan.", param=option)
    return value


def require_with(ctx: click.Context, flag: str, *names: str, given: bool) -> None:
    """Refuse options that would have no effect.

    Args:
        ctx: Of the command.
        flag: The option that they need, such as `--freeze`.
        names: Parameters of the command.
        given: True if the option that they need was given.

    Raises:
        UsageError: One of them was given without it.
    """
    for param in ctx.command.params:
        on_line = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if on_line and param.name in names and not given:
            raise UsageError(f"expected {param.opts[0]} with {flag}, got it alone. Try both.")


def echo_json(value: object) -> None:
    """Print a value as JSON on stdout; dataclasses in it as objects."""
    click.echo(json.dumps(value, indent=2, default=dataclasses.asdict))


def echo_report(value: Mapping[str, object]) -> None:
    """Print what a command has to tell as JSON on stdout, with the version of its schema."""
    from zero_sim.report.schemas import versioned

    echo_json(versioned(value))
