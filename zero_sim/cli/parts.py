"""Parts that several commands share."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from zero_sim.errors import UsageError
from zero_sim.report.commands import DEFAULT_BUNDLES

EXIT_NOTHING_SELECTED = 5
EXIT_INTERRUPTED = 130


def a_number(_: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Callback of an option: NaN lies in no range, but click lets it through every one."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("expected a number, got nan.", param=option)
    return value


FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
BUNDLES: dict[str, Any] = {
    "type": FOLDER,
    "default": DEFAULT_BUNDLES,
    "show_default": True,
    "metavar": "DIR",
    "help": "Folder with the bundles of failing cases.",
}
DEVICE: dict[str, Any] = {
    "metavar": "NAME",
    "default": "cpu",
    "show_default": True,
    "help": "Where the simulated ranks and the reference compute: cpu, cuda, cuda:1, or any other "
    "device that torch knows here.",
}
JSON: dict[str, Any] = {"is_flag": True, "help": "One JSON object on stdout, nothing else."}
STALL_SECONDS: dict[str, Any] = {
    "type": click.FloatRange(min=0.001, max=10**6),
    "callback": a_number,
}
bundles_option = click.option("--bundles", **BUNDLES)
device_option = click.option("--device", **DEVICE)
json_option = click.option("--json", "as_json", **JSON)
cores_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=os.cpu_count() or 1,
    show_default="cores",
    help="Processes.",
)

Command = Callable[..., Any]


def option(*names: str, **settings: Any) -> Any:
    """Field of a record of options, for `takes`.

    Args:
        names: As on the command line, such as `--order`.
        settings: As `click.option` takes them.
    """
    return field(metadata={"option": (names, settings)})


def takes(record: type[Any], name: str) -> Callable[[Command], Command]:
    """Give a command the options of a record, in one argument.

    Args:
        record: A dataclass, each field of which is made by `option`.
        name: Parameter of the command that takes it.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def packed(**values: Any) -> Any:
            chosen = record(**{each.name: values.pop(each.name) for each in fields(record)})
            return command(**{name: chosen}, **values)

        for each in reversed(fields(record)):
            names, settings = each.metadata["option"]
            packed = click.option(*names, each.name, **settings)(packed)
        return packed

    return decorate


def stdout_for(*, as_json: bool) -> AbstractContextManager[object]:
    """Send what a model prints to stderr, if stdout is to hold a JSON object alone."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


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
    click.echo(json.dumps(value, indent=2, default=asdict))


def echo_report(value: Mapping[str, object]) -> None:
    """Print what a command has to tell as JSON on stdout, with the version of its schema."""
    from zero_sim.report.schemas import versioned

    echo_json(versioned(value))
