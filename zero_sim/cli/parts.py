"""Options and checks that several commands share."""

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

# pytest's status if it collects no test, and the shell's status after SIGINT (128 + 2).
EXIT_NOTHING_SELECTED = 5
EXIT_INTERRUPTED = 130


def a_number(_: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Refuse NaN; a callback for number options."""
    # click's ranges accept NaN, because every comparison with it is False.
    if value is not None and math.isnan(value):
        raise click.BadParameter("expected a number, got nan.", param=option)
    return value


# Options of several commands. Defined once, so their help texts agree.
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
BUNDLES: dict[str, Any] = {
    "type": FOLDER,
    "default": DEFAULT_BUNDLES,
    "show_default": True,
    "metavar": "DIR",
    "help": "Folder for bundles of failed cases.",
}
DEVICE: dict[str, Any] = {
    "metavar": "NAME",
    "default": "cpu",
    "show_default": True,
    "help": "Device for the simulated ranks and the reference: cpu, cuda, cuda:1, or any other "
    "torch device.",
}
JSON: dict[str, Any] = {"is_flag": True, "help": "Print one JSON object on stdout, nothing else."}
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
    """Return a dataclass field for a command line option; see `takes`.

    Args:
        names: Names on the command line, such as `--order`.
        settings: Arguments of `click.option`.
    """
    return field(metadata={"option": (names, settings)})


def takes(record: type[Any], name: str) -> Callable[[Command], Command]:
    """Return a decorator that passes options to a command as a record.

    Args:
        record: Dataclass with a field made by `option` for each option.
        name: Parameter that receives the record.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def packed(**values: Any) -> Any:
            # click passes all options by name, so move the record's options into the record.
            chosen = record(**{each.name: values.pop(each.name) for each in fields(record)})
            return command(**{name: chosen}, **values)

        # Decorators apply from the bottom up, so reversed fields keep their order in --help.
        for each in reversed(fields(record)):
            names, settings = each.metadata["option"]
            packed = click.option(*names, each.name, **settings)(packed)
        return packed

    return decorate


def stdout_for(*, as_json: bool) -> AbstractContextManager[object]:
    """Return a context that redirects stdout to stderr if `as_json` is True."""
    # Models under test may print, but stdout must be pure JSON.
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def require_with(ctx: click.Context, flag: str, *names: str, given: bool) -> None:
    """Refuse options that would have no effect.

    Args:
        ctx: Context of the command.
        flag: Required option, such as `--freeze`.
        names: Parameters that require this option.
        given: True if the user gave the required option.

    Raises:
        UsageError: A parameter was given without the required option.
    """
    # Look at the source, because a given value may equal the default.
    for param in ctx.command.params:
        on_line = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if on_line and param.name in names and not given:
            raise UsageError(f"expected {param.opts[0]} with {flag}, got it alone. Try both.")


def echo_json(value: object) -> None:
    """Print a value as JSON on stdout. Dataclasses become objects."""
    click.echo(json.dumps(value, indent=2, default=asdict))


def echo_report(value: Mapping[str, object]) -> None:
    """Print a command's report as JSON on stdout, with its schema version."""
    from zero_sim.report.schemas import versioned

    echo_json(versioned(value))
