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

# pytest's status if no test was collected, and the shell's after SIGINT (128 + 2).
EXIT_NOTHING_SELECTED = 5
EXIT_INTERRUPTED = 130


def a_number(_: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Refuse NaN; a callback for options of numbers."""
    # click's ranges accept NaN, because every comparison with it is False.
    if value is not None and math.isnan(value):
        raise click.BadParameter("expected a number, got nan.", param=option)
    return value


# Types and settings of options that several commands have, so that their help texts agree.
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
    "help": "Device of the simulated ranks and the reference: cpu, cuda, cuda:1, or any other "
    "device of torch.",
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
    """Return a dataclass field that is a command line option, for `takes`.

    Args:
        names: Names on the command line, such as `--order`.
        settings: Arguments of `click.option`.
    """
    return field(metadata={"option": (names, settings)})


def takes(record: type[Any], name: str) -> Callable[[Command], Command]:
    """Return a decorator that gives a command a record of options in one parameter.

    Args:
        record: A dataclass whose fields are all made by `option`.
        name: Parameter of the command for the record.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def packed(**values: Any) -> Any:
            # click passes all options by name; those of the record are taken out.
            chosen = record(**{each.name: values.pop(each.name) for each in fields(record)})
            return command(**{name: chosen}, **values)

        # Decorators apply from the bottom up, so reversed fields keep their order in --help.
        for each in reversed(fields(record)):
            names, settings = each.metadata["option"]
            packed = click.option(*names, each.name, **settings)(packed)
        return packed

    return decorate


def stdout_for(*, as_json: bool) -> AbstractContextManager[object]:
    """Return a context that sends prints of models to stderr if stdout must be pure JSON."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def require_with(ctx: click.Context, flag: str, *names: str, given: bool) -> None:
    """Refuse options that would have no effect.

    Args:
        ctx: Context of the command.
        flag: The required option, such as `--freeze`.
        names: Parameters of the command that require it.
        given: True if the required option was given.

    Raises:
        UsageError: A parameter was given without its required option.
    """
    # The source, not the value, because a value may equal its default.
    for param in ctx.command.params:
        on_line = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if on_line and param.name in names and not given:
            raise UsageError(f"expected {param.opts[0]} with {flag}, got it alone. Try both.")


def echo_json(value: object) -> None:
    """Print a value as JSON on stdout; dataclasses in it as objects."""
    click.echo(json.dumps(value, indent=2, default=asdict))


def echo_report(value: Mapping[str, object]) -> None:
    """Print the report of a command as JSON on stdout, with the version of its schema."""
    from zero_sim.report.schemas import versioned

    echo_json(versioned(value))
