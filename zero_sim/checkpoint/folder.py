"""A checkpoint's folder, which appears under its name complete or not at all.

[Note: swap]
A save writes into a hidden sibling, `.NAME.saving`. When it is complete and on disk, an existing
checkpoint is renamed to `.NAME.previous`, the sibling gets the name, and the previous checkpoint is
removed. No portable call replaces a full folder in one step, so for a moment the name does not
exist. After a crash at this moment, `load` reads the previous checkpoint, and the next save first
renames it back.
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
"""Size limit, enough for a million pieces. Longer files are not read."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Path of a checkpoint, and the two paths beside it."""

    final: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Folder:
        """Return the folder at a path.

        Raises:
            CheckpointError: If the path does not end with a name.
        """
        final = Path(os.path.abspath(path))
        if not final.name:
            raise CheckpointError(f"expected the path of a checkpoint, got {os.fspath(path)!r}.")
        return cls(final)

    @property
    def saving(self) -> Path:
        """Path for the save in progress."""
        return self.final.with_name(f".{self.final.name}.saving")

    @property
    def previous(self) -> Path:
        """Path for the replaced checkpoint during the swap."""
        return self.final.with_name(f".{self.final.name}.previous")

    def find(self) -> Path:
        """Return the path of the newest complete checkpoint.

        Raises:
            CheckpointError: If there is none.
        """
        for path in (self.final, self.previous):
            # lexists, so that links and pipes count here. Reading refuses them by name.
            if os.path.lexists(path / MANIFEST_NAME):
                return path
            # A folder without a manifest is not a checkpoint, so `previous` does not replace it.
            if path.exists():
                break
        if not self.final.exists():
            raise CheckpointError(
                f"expected a checkpoint at {self.final}, got nothing. If the first save was "
                f"interrupted, {self.saving.name} is left, which is incomplete."
            )
        raise CheckpointError(
            f"expected {MANIFEST_NAME} in {self.final}, got a folder without it. Choose the path "
            f"of a checkpoint."
        )

    def begin(self) -> None:
        """Create an empty folder to write into, and clean up after a crash.

        Raises:
            CheckpointError: If the path exists and is not a checkpoint.
        """
        if self.final.exists():
            is_ours = (self.final / MANIFEST_NAME).is_file()
            is_free = self.final.is_dir() and not any(self.final.iterdir())
            if not is_ours and not is_free:
                raise CheckpointError(
                    f"expected a new path, or a checkpoint to replace, got "
                    f"{self.final}, which has no {MANIFEST_NAME}. Choose another path."
                )
        elif (self.previous / MANIFEST_NAME).is_file():
            # A crash during the swap: rename the previous checkpoint back before the clean-up.
            os.rename(self.previous, self.final)
        for leftover in (self.saving, self.previous):
            if leftover.exists():
                shutil.rmtree(leftover)
        self.saving.mkdir(parents=True)

    def publish(self) -> None:
        """Rename the new checkpoint to its path, replacing an old one; see [Note: swap]."""
        # Content must be on disk before the name, or a crash may leave empty files.
        sync_folder(self.saving)
        if self.final.exists():
            os.rename(self.final, self.previous)
        try:
            os.rename(self.saving, self.final)
        except OSError:
            # Undo the first rename, so that the old checkpoint keeps its name.
            if self.previous.exists():
                os.rename(self.previous, self.final)
            raise
        # The new name must be on disk before the previous checkpoint is removed.
        sync_folder(self.final.parent)
        # The new checkpoint is in place, so a failure to remove the previous one is harmless.
        shutil.rmtree(self.previous, ignore_errors=True)

    def discard(self) -> None:
        """Remove the save in progress."""
        shutil.rmtree(self.saving, ignore_errors=True)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without following links.

    Raises:
        OSError: If it cannot be opened.
        CheckpointError: If it is a link, folder, pipe, socket or device, because these lead out of
            the checkpoint or never end.
    """
    try:
        return untrusted.open_regular(path, follow=False)
    except Unreadable as reason:
        raise CheckpointError(
            f"expected to read {path}, got {reason}. If you made this link, copy the checkpoint "
            f"with `cp -RL`, which follows links."
        ) from None


def read_manifest(folder: Path) -> bytes:
    """Return the bytes of a checkpoint's manifest.

    Raises:
        OSError: If it cannot be read.
        CheckpointError: If it is not a regular file, or too long for a manifest.
    """
    path = folder / MANIFEST_NAME
    with open_regular(path) as file:
        # From the open handle, because the file at the path may change.
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > MANIFEST_BYTES_MAX:
            raise CheckpointError(
                f"expected at most {MANIFEST_BYTES_MAX} bytes in {path}, got {size_bytes}, too "
                f"long for a manifest. Choose the path of a checkpoint."
            )
        return file.read(size_bytes)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file and flush it to disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
