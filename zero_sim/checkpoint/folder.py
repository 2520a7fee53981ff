"""A checkpoint appears under its name whole or not at all.

[Note: swap]
Everything is written into a hidden sibling, `.NAME.saving`. Once it is complete and on the disk,
the checkpoint that has the name is renamed to `.NAME.previous`, the sibling takes the name, and
only then the previous one is removed. There is no portable way to replace one full folder by
another in one step, so for a moment nothing has the name. If a crash comes in it, the previous one
is what is read; the next save gives it its name back before it begins.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from zero_sim import untrusted
from zero_sim.checkpoint.manifest import MANIFEST_NAME
from zero_sim.errors import CheckpointError
from zero_sim.untrusted import Unreadable

MANIFEST_BYTES_MAX: Final = 1 << 28
"""Of a million pieces; what is longer is not even read."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The name of a checkpoint, and the two names beside it."""

    final: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Folder:
        """Return the folder of a path.

        Raises:
            CheckpointError: If the path has no last part that could be a name.
        """
        final = Path(os.path.abspath(path))
        if not final.name:
            raise CheckpointError(f"expected the path of a checkpoint, got {os.fspath(path)!r}.")
        return cls(final)

    @property
    def saving(self) -> Path:
        """Where the next one is written."""
        return self.final.with_name(f".{self.final.name}.saving")

    @property
    def previous(self) -> Path:
        """Where the last one waits until the next has its name."""
        return self.final.with_name(f".{self.final.name}.previous")

    def find(self) -> Path:
        """Return where the newest complete checkpoint lies.

        Raises:
            CheckpointError: If there is none.
        """
        for path in (self.final, self.previous):
            # Whatever it is; a link or a pipe is refused by name when it is read.
            if os.path.lexists(path / MANIFEST_NAME):
                return path
            if path.exists():
                break
        if not self.final.exists():
            raise CheckpointError(
                f"expected a checkpoint at {self.final} but there is nothing. A run that was cut "
                f"off while it saved its first one leaves {self.saving.name}, which is incomplete."
            )
        raise CheckpointError(
            f"expected {MANIFEST_NAME} in {self.final} but there is none: it is no checkpoint."
        )

    def begin(self) -> None:
        """Make an empty folder to write into; what a crash left behind goes.

        Raises:
            CheckpointError: If the name belongs to something that is no checkpoint.
        """
        if self.final.exists():
            is_ours = (self.final / MANIFEST_NAME).is_file()
            is_free = self.final.is_dir() and not any(self.final.iterdir())
            if not is_ours and not is_free:
                raise CheckpointError(
                    f"expected a new name, or that of a checkpoint to be replaced, got "
                    f"{self.final}, which holds no {MANIFEST_NAME}. Try another name."
                )
        elif (self.previous / MANIFEST_NAME).is_file():
            os.rename(self.previous, self.final)
        for leftover in (self.saving, self.previous):
            if leftover.exists():
                shutil.rmtree(leftover)
        self.saving.mkdir(parents=True)

    def publish(self) -> None:
        """Give the new checkpoint its name, and remove the one that had it; see [Note: swap]."""
        sync_folder(self.saving)
        if self.final.exists():
            os.rename(self.final, self.previous)
        try:
            os.rename(self.saving, self.final)
        except OSError:
            if self.previous.exists():
                os.rename(self.previous, self.final)
            raise
        sync_folder(self.final.parent)
        # The new one is in place: a previous one that cannot be removed is no failure.
        shutil.rmtree(self.previous, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self.saving, ignore_errors=True)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, if it is one and lies where its path says.

    Raises:
        OSError: If it cannot be opened.
        CheckpointError: If it is a link, a folder, a pipe, a socket or a device: those lead out of
            a checkpoint, or are read without end.
    """
    try:
        return untrusted.open_regular(path, follow=False)
    except Unreadable as reason:
        raise CheckpointError(
            f"expected to read {path}, got {reason}. If it is a link of yours, try a copy with "
            f"`cp -RL`, which follows links."
        ) from None


def read_manifest(folder: Path) -> bytes:
    """Return the content of a checkpoint's manifest.

    Raises:
        OSError: If it cannot be read.
        CheckpointError: If it is no regular file, or longer than any manifest.
    """
    path = folder / MANIFEST_NAME
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > MANIFEST_BYTES_MAX:
            raise CheckpointError(
                f"expected at most {MANIFEST_BYTES_MAX} bytes in {path}, got {size_bytes}: it "
                f"is no manifest."
            )
        return file.read(size_bytes)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file and bring it to the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
