"""What the commands of the command line share."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from zero_sim.errors import EnvironmentProblem

DEFAULT_BUNDLES = Path(".zero-sim", "bundles")

bundles_option = click.option(
    "--bundles",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_BUNDLES,
    show_default=True,
    metavar="DIR",
    help="Folder with the bundles of failing cases.",
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


def reproduce_command(
    source: Path,
    file_id: str,
    *,
    stall_seconds: float | None = None,
    target: str | None = None,
    options: Sequence[str] = (),
) -> str:
    """The command that runs one case of a file.

    Args:
        source: The file.
        file_id: Id of the case, as the file alone has it.
        stall_seconds: In place of what the scenario says; None for that.
        target: In place of the one that the scenario names; None for that.
        options: What else has to be said again.
    """
    words = file_id
    if any(char in " ()\"'" for char in words):
        words = f'"{words}"'
    limit = [] if stall_seconds is None else ["--stall-seconds", f"{stall_seconds:g}"]
    named = [] if target is None else ["--target", target]
    return shlex.join(["zero-sim", "run", str(source), "-k", words, *limit, *named, *options])


def replay_command(bundle: str, *, bundles: Path | None = None, target: str | None = None) -> str:
    """The command that repeats a bundle's case.

    Args:
        bundle: Its id, or a path to it.
        bundles: The folder it is in; None for where commands look anyway.
        target: `module:name` of a system under test that is imported; other names the bundle has.
    """
    where = [] if bundles in (None, DEFAULT_BUNDLES) else ["--bundles", str(bundles)]
    named = ["--target", target] if target is not None and ":" in target else []
    return shlex.join(["zero-sim", "replay", bundle, *where, *named])


def run_command(path: Path, *, target: str | None = None) -> str:
    """The command that runs the cases of a file.

    Args:
        path: The file.
        target: `module:name` of a system under test that is imported; other names the file has.
    """
    named = ["--target", target] if target is not None and ":" in target else []
    return shlex.join(["zero-sim", "run", str(path), *named])


@contextlib.contextmanager
def packages_needed() -> Iterator[None]:
    """Around imports: a package that is missing is a problem of the machine."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "zero_sim":
            raise
        raise EnvironmentProblem(
            f"expected the package {error.name!r}, which is not installed. Try `zero-sim doctor`."
        ) from None


def echo_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    click.echo(json.dumps(value, indent=2))


def echo_report(value: Mapping[str, object]) -> None:
    """Print what a command has to tell as JSON on stdout, with the version of its schema."""
    from zero_sim.report.schemas import versioned

    echo_json(versioned(value))
