"""Frozen cases: the case of a bundle as a separate scenario file, for regression tests."""

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
    """Return the path for the frozen case of a bundle.

    Args:
        bundle: The bundle.
        folder: Folder of the file.
        name: Name of the file without `.toml`; by default, the check and the bundle's id.
        force: True to allow an existing file.

    Raises:
        UsageError: If the file exists, or the name is no valid file name.
    """
    # With a part of the id, because several bundles may be of the same check.
    name = name or f"{bundle.findings[0].check.replace('.', '-')}-{bundle.id[:6]}"
    # Names may come from bundles of others: no folders, hidden files or control characters.
    if Path(name).name != name or name.startswith(".") or printable(name) != name:
        raise UsageError(
            "expected the name of a file, without a folder and without control characters, got "
            f"{name!r}. Choose another --name."
        )
    # Users give names with and without the suffix.
    path = folder / f"{name.removesuffix('.toml')}.toml"
    # lexists, so that a dangling link counts too.
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: expected a new file, got an old one. Use --force, or --name.")
    return path


def freeze(bundle: Bundle, path: Path) -> None:
    """Write the case of a bundle, with a description of its first finding.

    Args:
        bundle: The bundle.
        path: The file; an existing one is replaced.

    Raises:
        UsageError: If the file cannot be written.
        EnvironmentProblem: If the disk is full.
    """
    # Without a name, a case is named after its file.
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
    # The case's own description comes last, because the limit may cut it.
    before = bundle.scenario.description
    text = f"{found}{bundle.environment.zero_sim}{f'; {before}' if before else ''}"
    return printable(text, lines=True)[:DESCRIPTION_CHARS_MAX]
