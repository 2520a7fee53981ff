"""Frozen cases: a bundle's case as a separate scenario file, for regression tests."""

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
    """Return the path for a bundle's frozen case.

    Args:
        bundle: The bundle.
        folder: Folder of the file.
        name: File name without `.toml`; by default, the check and the bundle's id.
        force: True to allow an existing file.

    Raises:
        UsageError: The file exists, or the name is no valid file name.
    """
    # Includes a part of the id, because several bundles may have the same check.
    name = name or f"{bundle.findings[0].check.replace('.', '-')}-{bundle.id[:6]}"
    # The name may come from someone else's bundle, so refuse folders, hidden files and control
    # characters.
    if Path(name).name != name or name.startswith(".") or printable(name) != name:
        raise UsageError(
            "expected a file name, without a folder and without control characters, got "
            f"{name!r}. Choose another --name."
        )
    # Users may write the suffix or not.
    path = folder / f"{name.removesuffix('.toml')}.toml"
    # lexists, because a dangling link counts too.
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: expected a new file, but it exists. Use --force, or --name.")
    return path


def freeze(bundle: Bundle, path: Path) -> None:
    """Write a bundle's case, with a description of the first finding.

    Raises:
        UsageError: The file cannot be written.
        EnvironmentProblem: The disk is full.
    """
    # No name, so the case gets the file's name.
    scenario = dataclasses.replace(bundle.scenario, name="", description=_description(bundle))
    text = f"# Frozen from bundle {bundle.id}.\n{to_chosen_toml(scenario)}"
    try:
        # Names in bundles may contain lone surrogates, which UTF-8 cannot encode.
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
    found = f"{first.check}: {first.message}{place}; found{day} by zero_sim "
    # The case's description comes last, because the limit may cut it.
    before = bundle.scenario.description
    text = f"{found}{bundle.environment.zero_sim}{f'; {before}' if before else ''}"
    return printable(text, lines=True)[:DESCRIPTION_CHARS_MAX]
