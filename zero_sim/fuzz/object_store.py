"""A folder in an object store, such as `s3://bucket/nightly`, and the one here that stands for it.

Stores cannot add to a file. So a campaign works in a folder of this machine, which is filled from
the store when it begins; after each batch, what has changed is sent. Shards of a campaign write
files of their own, and so may share a folder in a store.

Any store that fsspec has a package for will do; what comes from one is a stranger's.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.fuzz.corpus import FILE_BYTES_MAX
from zero_sim.host.files import unwritten, write_whole
from zero_sim.untrusted import printable

FILES_MAX = 100_000
"""What has more was not written by us."""
_Version = tuple[int, int]
"""Bytes of a file and when it was written, in ns."""


def is_url(place: str) -> bool:
    """Whether a place is in a store and not a folder of this machine."""
    return "://" in place


def folder_for(url: str, *, within: Path) -> Path:
    """The folder that stands for one in a store, the same each time.

    Args:
        url: Of the folder in the store.
        within: Folder for all that stand for others.
    """
    return within / hashlib.sha256(url.encode()).hexdigest()[:12]


@dataclass(slots=True)
class StoredFolder:
    """A folder in a store; opened by `open_stored`."""

    url: str
    here: Path
    """What stands for it on this machine."""
    _files: Any
    """fsspec's file system."""
    _root: str
    _sent: dict[str, _Version] = field(default_factory=dict)
    """What the store has, as it was here when it was fetched or sent."""

    def send(self) -> None:
        """Write to the store what changed here, and remove there what was removed here.

        Raises:
            EnvironmentProblem: The store refuses; the next time all that is missing is sent.
        """
        now = dict(_versions(self.here))
        for name in sorted(now.keys() | self._sent.keys()):
            path = f"{self._root}/{name}"
            if name not in now:
                _asked(self.url, lambda path=path: self._files.rm_file(path))
                del self._sent[name]
            elif now[name] != self._sent.get(name):
                data = (self.here / name).read_bytes()
                _asked(self.url, lambda path=path, data=data: self._write(path, data))
                self._sent[name] = now[name]

    def _write(self, path: str, data: bytes) -> None:
        try:
            self._files.pipe_file(path, data)
        except FileNotFoundError:
            # Where folders are things, and not parts of names.
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data)

    def _fetch(self) -> None:
        self._files.invalidate_cache()
        found = _asked(self.url, lambda: self._files.find(self._root, detail=True))
        if len(found) > FILES_MAX:
            raise _no_corpus(self.url, f"{len(found)} files")
        for path, told in found.items():
            name = _name_below(self._root, path)
            if name is None:
                raise _no_corpus(self.url, f"a file named {printable(path[:200])!r}")
            size = told.get("size")
            if size is None or size > FILE_BYTES_MAX:
                raise _no_corpus(self.url, f"{size} bytes in {printable(name[:200])!r}")
            data = _asked(self.url, lambda path=path: self._files.cat_file(path))
            try:
                write_whole(self.here / name, data)
            except OSError as error:
                raise unwritten("a corpus", self.here, error) from None
        self._sent = dict(_versions(self.here))


def open_stored(url: str, *, here: Path) -> StoredFolder:
    """Fetch all files of a folder in a store; one that is not there has none.

    Args:
        url: Such as `s3://bucket/nightly`, `gs://...` or `memory://...`.
        here: Folder that stands for it; what was in it is gone.

    Raises:
        UsageError: There is no such kind of store, or what is there is no corpus.
        EnvironmentProblem: Its package is not installed, it cannot be reached, or there is no room.
    """
    shown = printable(url)
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise EnvironmentProblem(
            f"expected a package for the store of {shown}, got: {printable(str(error))}. "
            "Try to install it, or a folder of this machine."
        ) from None
    except ValueError as error:
        raise UsageError(
            f"expected the URL of a folder in a store, such as s3://bucket/nightly, got {shown}: "
            f"{printable(str(error))}. Try one that fsspec knows."
        ) from None
    shutil.rmtree(here, ignore_errors=True)
    stored = StoredFolder(url, here, files, root.rstrip("/"))
    stored._fetch()
    return stored


def _asked(url: str, do: Callable[[], Any]) -> Any:
    """What a store answers, whose packages raise whatever they like."""
    try:
        return do()
    except Exception as error:
        raise EnvironmentProblem(
            f"expected to reach {printable(url)}, got {type(error).__name__}: "
            f"{printable(str(error)[:500])}. Try its address, your rights there, or a folder of "
            "this machine."
        ) from error


def _no_corpus(url: str, got: str) -> UsageError:
    return UsageError(
        f"expected a corpus, or nothing, in {printable(url)}, got {got}. Try another folder of it."
    )


def _name_below(root: str, path: str) -> str | None:
    """The name of a file in a folder; None for one that would lie elsewhere."""
    if not path.startswith(f"{root}/"):
        return None
    name = path.removeprefix(f"{root}/")
    parts = PurePosixPath(name).parts
    is_plain = name == "/".join(parts) and not {"..", "/", "."} & set(parts)
    return name if parts and is_plain and "\\" not in name and "\0" not in name else None


def _versions(folder: Path) -> Iterator[tuple[str, _Version]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            told = path.stat()
            yield path.relative_to(folder).as_posix(), (told.st_size, told.st_mtime_ns)
