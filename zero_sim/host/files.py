"""Files that are written whole or not at all: aside first, then put in place.

What stood there before stays where a disk is full, and nobody ever reads half a file.
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
    """Write a file; what is there is replaced at once, or left as it is.

    Args:
        path: The file. Its folder is made; a link is followed; what is no regular file, such as
            `/dev/stdout` or a pipe that somebody reads, is written to.
        data: All that it is to hold.

    Raises:
        OSError: It cannot be written, or is a pipe that nobody reads.
    """
    mode = 0o666
    with contextlib.suppress(FileNotFoundError):
        # Before links are followed: where /dev/stdout leads to may have no path.
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            _write_to(path, data)
            return
        mode = stat.S_IMODE(before.st_mode)
        # Who may not write a file may not replace it either, whoever owns the folder.
        os.close(os.open(path, os.O_WRONLY))
    path = Path(os.path.realpath(path))
    _make_folder(path.parent)
    aside = _aside(path)
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def folder_whole(path: Path) -> Iterator[Path]:
    """A folder to write in, which is put in place when all is written, and goes otherwise.

    Args:
        path: Where it is put; nothing, or an empty folder.

    Raises:
        OSError: It cannot be written.
    """
    _make_folder(path.parent)
    aside = _aside(path)
    aside.mkdir()
    try:
        yield aside
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def unwritten(what: str, path: Path | str, error: OSError) -> ZeroSimError:
    """The error for something that could not be written.

    Args:
        what: It, such as `a page`.
        path: Where it should have gone.
        error: Why not.

    Returns:
        A problem of the machine where the disk is full or fails; else one of the place.
    """
    why = f"expected to write {what} to {path}, got: {error.strerror or error}."
    if error.errno in _OF_MACHINE:
        return EnvironmentProblem(f"{why} What was there is as it was. Try a place with room.")
    return UsageError(f"{why} Try another place.")


def _write_to(path: Path, data: bytes) -> None:
    """Write to a pipe or a device, which is not waited for until somebody reads it."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO and stat.S_ISFIFO(path.stat().st_mode):
            raise OSError(errno.ENXIO, "a pipe that nobody reads", str(path)) from None
        raise
    with open(handle, "wb", buffering=0) as file:
        os.set_blocking(handle, True)
        while data:
            data = data[file.write(data) :]


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}-{os.getpid()}-{secrets.token_hex(4)}")
