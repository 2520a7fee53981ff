"""Script bundles: code, settings of both runs, and verdict, for a replay.

A bundle contains the working folder's Python files but no data. A replay executes this code, so a
foreign bundle is only replayed with `--trust`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zero_sim.against.runs import Side
from zero_sim.errors import BundleError, UsageError
from zero_sim.host.files import folder_whole, unwritten
from zero_sim.host.working_folder import files_of
from zero_sim.untrusted import printable
from zero_sim.untrusted_json import InvalidField, build_record, parse

HEAD_FILE = "script.json"
CODE_FOLDER = "code"
FORMAT = "zero_sim script bundle"
VERSION = 1
CODE_BYTES_MAX = 16 << 20
"""Size limit for all copied Python files."""
# A valid head is a few KiB. Read no more, because anybody may have written the file.
_HEAD_BYTES_MAX = 1 << 20
_ID_CHARS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptBundle:
    """Verdict on a script, with the settings to repeat it."""

    expected: Side
    got: Side
    seed: int
    by_rank: bool
    """True if each rank has the same parts of tensors on both sides."""
    feeds: bool
    starts_alike: bool
    all_read_all: bool
    outcome: str
    reason: str
    first: str
    """Description of the first difference; empty without one."""


def write_script_bundle(bundle: ScriptBundle, *, folder: Path) -> Path:
    """Write a bundle with the working folder's Python files to a folder named by its id.

    Raises:
        UsageError: The code is too large, or the folder is not writable.
    """
    code = dict(_code(bundle.got))
    bundle = replace(bundle, expected=_inside(bundle.expected), got=_inside(bundle.got))
    # Write sets as sorted lists, so that equal bundles have equal text.
    head = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(bundle)}
    text = json.dumps(head, indent=2, default=sorted) + "\n"
    # The id is a content hash, so the same finding is written once.
    digest = hashlib.sha256(text.encode())
    for name, data in sorted(code.items()):
        digest.update(name.encode() + b"\0" + data)
    path = folder / digest.hexdigest()[:_ID_CHARS]
    if path.is_dir():
        return path
    try:
        with folder_whole(path) as made:
            (made / HEAD_FILE).write_text(text)
            for name, data in code.items():
                file = made / CODE_FOLDER / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
    except OSError as error:
        raise unwritten("a bundle", path, error) from None
    return path


def _code(side: Side) -> Iterator[tuple[str, bytes]]:
    """Yield the working folder's Python files, and the script if it lies elsewhere."""
    working, total = Path.cwd(), 0
    paths = {str(each.relative_to(working)): each for each in files_of(working)}
    # Nothing but code, because data may be large or private.
    paths = {name: each for name, each in paths.items() if name.endswith(".py")}
    if not side.is_module:
        paths.setdefault(_inside(side).name, Path(side.name))
    for name, path in paths.items():
        data = path.read_bytes()
        total += len(data)
        if total > CODE_BYTES_MAX:
            raise UsageError(
                f"expected at most {CODE_BYTES_MAX >> 20} MiB of Python files in "
                f"{str(working)!r} for --bundles, got more. Run from a smaller folder."
            )
        yield name, data


def _inside(side: Side) -> Side:
    """Return the side with the script's path in the bundle."""
    path = Path(os.path.abspath(side.name))
    if side.is_module:
        return side
    is_inside = path.is_relative_to(Path.cwd())
    return replace(side, name=str(path.relative_to(Path.cwd())) if is_inside else path.name)


def find_script_bundle(name: str, *, folder: Path) -> Path | None:
    """Return a bundle's folder by path or unique id prefix; None if not found."""
    if (Path(name) / HEAD_FILE).is_file():
        return Path(name)
    found = [path.parent for path in folder.glob(f"*/{HEAD_FILE}")]
    found = [path for path in found if name and path.name.startswith(name)]
    # An ambiguous prefix finds nothing.
    return found[0] if len(found) == 1 else None


def read_script_bundle(path: Path) -> ScriptBundle:
    """Read the bundle in a folder.

    Raises:
        BundleError: The folder contains no script bundle, or an unsupported version.
    """
    try:
        data = (path / HEAD_FILE).read_bytes()[:_HEAD_BYTES_MAX]
        table = parse(data, where=HEAD_FILE)
        if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
            raise InvalidField(f"{HEAD_FILE}: expected a bundle of a script, got another file")
        if (version := table.pop("version", None)) != VERSION:
            raise InvalidField(f"version: expected {VERSION}, got {version!r}. Upgrade zero_sim")
        return build_record(ScriptBundle, table, where=HEAD_FILE)
    except (InvalidField, OSError) as unfit:
        # Show no control characters, because the file may be hostile.
        raise BundleError(printable(f"{path}: {unfit}.")) from None
