"""The command `zero-sim init`: write working files to start from."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import click

from zero_sim.cli.parts import FOLDER
from zero_sim.errors import UsageError

# Files in `templates/` by option.
_FILES = {
    "engine": ("engine.py", "test_engine.py", "engine.toml"),
    "script": ("train.py",),
    "test": ("test_ranks.py",),
}
_NEXT = {
    "engine": (
        "pytest test_engine.py",
        "zero-sim run engine.toml --target engine:MyTarget",
        "zero-sim fuzz --target engine:MyTarget --cases 200",
    ),
    "script": ("zero-sim torchrun --against 1 --nproc-per-node 2 train.py",),
    "test": ("pytest test_ranks.py",),
}


@click.command()
@click.argument("folder", metavar="[DIR]", type=FOLDER, default=Path())
@click.option("--engine", is_flag=True, help="An engine, its test and a scenario.  [default]")
@click.option("--script", is_flag=True, help="A training script for `zero-sim torchrun`.")
@click.option("--test", is_flag=True, help="Tests that run on several ranks, for pytest.")
def init(folder: Path, engine: bool, script: bool, test: bool) -> None:
    """Write an engine, script or test to start from.

    The files work without changes; replace the code in them with yours. DIR is the current folder
    by default. Existing files are never overwritten.

    \b
    Examples:
      zero-sim init
      zero-sim init --script --test first
    """
    chosen = {"engine": engine or not (script or test), "script": script, "test": test}
    kinds = [kind for kind, is_chosen in chosen.items() if is_chosen]
    # Check all names before the first write, so that either all files are written or none.
    names = [name for kind in kinds for name in _FILES[kind]]
    if existing := [name for name in names if (folder / name).exists()]:
        raise UsageError(
            f"expected none of {', '.join(names)} in {folder}, got {', '.join(existing)}. "
            "Choose another DIR, or move them."
        )
    folder.mkdir(parents=True, exist_ok=True)
    templates = resources.files("zero_sim.cli").joinpath("templates")
    for name in names:
        # Mode x refuses a file that another process wrote after the check above.
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(templates.joinpath(name).read_text("utf-8"))
        click.echo(f"wrote {folder / name}")
    click.echo("\n".join(("next:", *_next(folder, kinds))))


def _next(folder: Path, kinds: list[str]) -> Iterator[str]:
    if folder != Path():
        yield f"  cd {folder}"
    for kind in kinds:
        yield from (f"  {command}" for command in _NEXT[kind])
