"""Command lines that people are told: they run a case, a bundle or a file again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

DEFAULT_BUNDLES = Path(".zero-sim", "bundles")
"""Default folder for bundles of failing cases."""


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


def replay_command(
    bundle: str, *, bundles: Path | None = None, target: str | None = None, device: str = "cpu"
) -> str:
    """The command that repeats a bundle's case.

    Args:
        bundle: Its id, or a path to it.
        bundles: The folder it is in; None for where commands look anyway.
        target: `module:name` of a system under test that is imported; other names the bundle has.
        device: Where it computes.
    """
    where = [] if bundles in (None, DEFAULT_BUNDLES) else ["--bundles", str(bundles)]
    named = ["--target", target] if target is not None and ":" in target else []
    on = ["--device", device] if device != "cpu" else []
    return shlex.join(["zero-sim", "replay", bundle, *where, *named, *on])


def run_command(path: Path, *, target: str | None = None, device: str = "cpu") -> str:
    """The command that runs the cases of a file.

    Args:
        path: The file.
        target: `module:name` of a system under test that is imported; other names the file has.
        device: Where it computes.
    """
    named = ["--target", target] if target is not None and ":" in target else []
    on = ["--device", device] if device != "cpu" else []
    return shlex.join(["zero-sim", "run", str(path), *named, *on])
