"""Command lines in reports, to run a case, a bundle or a file again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

DEFAULT_BUNDLES = Path(".zero-sim", "bundles")
"""Default folder for bundles."""


def reproduce_command(
    source: Path,
    file_id: str,
    *,
    stall_seconds: float | None = None,
    target: str | None = None,
    options: Sequence[str] = (),
) -> str:
    """Return the command that runs a single case of a file.

    Args:
        source: The file.
        file_id: Id of the case within its file.
        stall_seconds: Overrides the scenario's limit; None to keep it.
        target: Overrides the scenario's target; None to keep it.
        options: Further options of the original command.
    """
    words = file_id
    # -k takes an expression, so quote an id that contains its syntax.
    if any(char in " ()\"'" for char in words):
        words = f'"{words}"'
    limit = [] if stall_seconds is None else ["--stall-seconds", f"{stall_seconds:g}"]
    named = [] if target is None else ["--target", target]
    return shlex.join(["zero-sim", "run", str(source), "-k", words, *limit, *named, *options])


def replay_command(
    bundle: str, *, bundles: Path | None = None, target: str | None = None, device: str = "cpu"
) -> str:
    """Return the command that replays a bundle.

    Args:
        bundle: Its id or path.
        bundles: Its folder; None for the default folder.
        target: `module:name` of an imported target. Registered names are omitted, because the
            bundle contains them.
        device: Compute device.
    """
    # Omit defaults, to keep commands short.
    where = [] if bundles in (None, DEFAULT_BUNDLES) else ["--bundles", str(bundles)]
    named = ["--target", target] if target is not None and ":" in target else []
    on = ["--device", device] if device != "cpu" else []
    return shlex.join(["zero-sim", "replay", bundle, *where, *named, *on])


def run_command(path: Path, *, target: str | None = None, device: str = "cpu") -> str:
    """Return the command that runs the cases of a file.

    Args:
        path: The file.
        target: `module:name` of an imported target. Registered names are omitted, because the file
            contains them.
        device: Compute device.
    """
    named = ["--target", target] if target is not None and ":" in target else []
    on = ["--device", device] if device != "cpu" else []
    return shlex.join(["zero-sim", "run", str(path), *named, *on])
