"""What the commands of the command line share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
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
