"""Atomic writes: files are written under another name, then renamed.

So an older file survives a full disk, and no reader sees half a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from zero_sim.errors import EnvironmentProblem, UsageError, ZeroSimError

# Errors of the disk or the machine, as opposed to errors in the path.
_OF_MACHINE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically.

    Args:
        path: File to write. Creates its folder and follows links. Writes directly to anything but a
            regular file, such as `/dev/stdout` or a pipe with a reader.
        data: Complete contents.

    Raises:
        OSError: The file cannot be written, or is a pipe without a reader.
    """
    mode = 0o666
    with contextlib.suppress(FileNotFoundError):
        # Before links are followed, because /dev/stdout's target may have no path.
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            _write_to(path, data)
            return
        mode = stat.S_IMODE(before.st_mode)
        # A rename only needs a writable folder, so check that the file itself is writable.
        os.close(os.open(path, os.O_WRONLY))
    # Follow links, because a rename would replace the link.
    path = Path(os.path.realpath(path))
    _make_folder(path.parent)
    aside = _aside(path)
    try:
        # Keep the permissions of the replaced file.
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def folder_whole(path: Path) -> Iterator[Path]:
    """Yield a folder to write in. Rename it to `path` at the end, or remove it after an error.

    `path` must not exist, or be an empty folder.

    Raises:
        OSError: The folder cannot be written.
    """
    _make_folder(path.parent)
    aside = _aside(path)
    aside.mkdir()
    try:
        yield aside
        # Fails if the path is a folder with contents, so it overwrites nothing.
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def unwritten(what: str, path: Path | str, error: OSError) -> ZeroSimError:
    """Return the error for a file, `what` (such as `a page`), that could not be written.

    It is an EnvironmentProblem if the disk is full or fails, otherwise a UsageError.
    """
    why = f"expected to write {what} to {path}, got: {error.strerror or error}."
    if error.errno in _OF_MACHINE:
        return EnvironmentProblem(f"{why} An existing file is unchanged. Try a place with room.")
    return UsageError(f"{why} Try another place.")


def _write_to(path: Path, data: bytes) -> None:
    """Write to a pipe or a device, without waiting for a reader."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO and stat.S_ISFIFO(path.stat().st_mode):
            raise OSError(errno.ENXIO, "a pipe without a reader", str(path)) from None
        raise
    with open(handle, "wb", buffering=0) as file:
        # Blocking again, to wait for a slow reader.
        os.set_blocking(handle, True)
        while data:
            # Unbuffered writes may be partial.
            data = data[file.write(data) :]


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # A file in the way: mkdir's "File exists" would mislead.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def _aside(path: Path) -> Path:
    # In the same folder, because a rename cannot cross file systems.
    return path.with_name(f".{path.name[:100]}-{os.getpid()}-{secrets.token_hex(4)}")
