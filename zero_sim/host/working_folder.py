"""Copies of the working folder, so that a script's runs do not affect each other's files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Large folders that a script does not change.
NOT_COPIED = frozenset({".git", ".venv", "__pycache__", ".zero-sim", "node_modules"})


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that a copy contains, in order."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if each not in NOT_COPIED)
        yield from (Path(place, name) for name in sorted(names))


@contextlib.contextmanager
def in_copy_of(folder: Path) -> Iterator[Path]:
    """Work in a copy of a folder, and remove it afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="zero-sim-") as made:
        # With the same name, because a script may use it.
        copy = Path(made, folder.name or "root")
        # Links stay links, because they may lead to large data outside the folder.
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        os.chdir(copy)
        try:
            yield copy
        finally:
            os.chdir(before)
