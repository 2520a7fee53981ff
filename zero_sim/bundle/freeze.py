"""Frozen cases: the case of a bundle as a scenario file of its own, to be run from then on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from zero_sim.bundle.records import Bundle
from zero_sim.errors import UsageError
from zero_sim.host.files import unwritten, write_whole
from zero_sim.scenario.dump import to_chosen_toml
from zero_sim.scenario.texts import DESCRIPTION_CHARS_MAX
from zero_sim.untrusted import printable


def frozen_path(bundle: Bundle, *, folder: Path, name: str = "", force: bool = False) -> Path:
    """Where the case of a bundle is to be frozen.

    Args:
        bundle: The bundle.
        folder: Where the file goes.
        name: What it is called, without `.toml`; by default after the check and the bundle's id.
        force: Whether a file that is there may be replaced.

    Raises:
        UsageError: There is such a file, or the name is no name of a file.
    """
    name = name or f"{bundle.findings[0].check.replace('.', '-')}-{bundle.id[:6]}"
    if Path(name).name != name or name.startswith(".") or printable(name) != name:
        raise UsageError(
            "expected the name of a file, without a folder and without control characters, got "
            f"{name!r}."
        )
    path = folder / f"{name.removesuffix('.toml')}.toml"
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: expected no such file yet, got one. Try --force, or --name.")
    return path


def freeze(bundle: Bundle, path: Path) -> None:
    """Write the case of a bundle, with a line that says what was found and when.

    Args:
        bundle: The bundle.
        path: The file; one that is there is replaced.

    Raises:
        UsageError: It cannot be written there.
        EnvironmentProblem: There is no room for it.
    """
    # The file's name is the case's.
    scenario = dataclasses.replace(bundle.scenario, name="", description=_description(bundle))
    text = f"# Frozen from bundle {bundle.id}.\n{to_chosen_toml(scenario)}"
    try:
        write_whole(path, text.encode(errors="replace"))
    except OSError as error:
        raise unwritten("a scenario", path, error) from None


def _description(bundle: Bundle) -> str:
    first = bundle.findings[0]
    day = f" on {bundle.written}" if bundle.written else ""
    where = [
        f"{word} {value}"
        for word, value in (("step", first.step), ("rank", first.rank), ("param", first.param))
        if value is not None
    ]
    place = f" ({', '.join(where)})" if where else ""
    said = f"{first.check}: {first.message}{place}; found{day} by zero_sim "
    before = bundle.scenario.description
    text = f"{said}{bundle.environment.zero_sim}{f'; {before}' if before else ''}"
    return printable(text, lines=True)[:DESCRIPTION_CHARS_MAX]
