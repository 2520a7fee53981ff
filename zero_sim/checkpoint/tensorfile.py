"""safetensors files, written tensor by tensor and read span by span.

The library's own writer wants all tensors in memory at once. The format is simple enough to be
streamed: eight bytes of length, a JSON header, then the tensors without gaps.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from zero_sim.checkpoint.entries import Entry, build_header, list_entries, sort_entries
from zero_sim.checkpoint.folder import open_regular
from zero_sim.checkpoint.manifest import FileRecord, Manifest, PieceRecord
from zero_sim.checkpoint.pieces import PieceIndex
from zero_sim.checkpoint.values import find_dtype, view_bytes
from zero_sim.errors import CheckpointError
from zero_sim.layout import Span


class TensorFileWriter:
    """One file being written; `write` wants the tensors in the order of `entries`.

    Args:
        path: A new file.
        entries: What it will hold.
    """

    entries: tuple[Entry, ...]
    """In file order: wide dtypes first, so that every tensor lies at a multiple of its width."""

    def __init__(self, path: Path, *, entries: Sequence[Entry]) -> None:
        self.entries = tuple(sort_entries(entries))
        self._path = path
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._written = 0
        self._file: BinaryIO = path.open("xb")
        try:
            self._put(build_header(self.entries))
        except BaseException:
            self._file.close()
            raise

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor."""
        entry = self.entries[self._written]
        data = view_bytes(tensor)
        assert data.nbytes == entry.size_bytes, (entry, tensor.shape, tensor.dtype)
        self._put(data)
        self._written += 1

    def finish(self) -> FileRecord:
        """Bring everything to the disk and return the file's record."""
        assert self._written == len(self.entries)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(
            name=self._path.name,
            size_bytes=self._size_bytes,
            sha256=self._digest.hexdigest(),
            pieces=tuple(entry.piece for entry in self.entries),
        )

    def close(self) -> None:
        """Close the file as it is; nothing after `finish`."""
        self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        write_bytes(self._file, data)
        self._digest.update(data)
        self._size_bytes += len(data)


def write_bytes(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of `data`; the one place where tensors reach the disk."""
    file.write(data)


def check_file(path: Path, *, record: FileRecord) -> str | None:
    """Return how a file differs from its record; None if it does not."""
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != record.size_bytes:
                return f"expected {record.size_bytes} bytes in {path}, got {size_bytes}."
            digest = hashlib.file_digest(file, "sha256")  # pyrefly: ignore[bad-argument-type]
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"expected to read {record.size_bytes} bytes from {path}, got {error!r}."
    if digest.hexdigest() != record.sha256:
        return f"expected sha256 {record.sha256} of {path}, got {digest.hexdigest()}."
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _FileLayout:
    """Where in a file everything lies, as follows from its record."""

    header: bytes
    """What the file begins with."""
    entries: Mapping[str, tuple[Entry, int]]
    """Each tensor by key, with its first byte."""
    size_bytes: int


class _Held:
    """What the files of a checkpoint hold, indexed."""

    def __init__(self, manifest: Manifest) -> None:
        self.pieces: dict[tuple[str, str], list[tuple[FileRecord, PieceRecord]]] = {}
        """Which files hold what of each param and tensor."""
        for file in manifest.files:
            for piece in file.pieces:
                self.pieces.setdefault((piece.param, piece.tensor), []).append((file, piece))
        self.spans = {
            where: [Span(piece.start, piece.stop) for _, piece in held]
            for where, held in self.pieces.items()
        }
        self.indices = {where: PieceIndex(spans) for where, spans in self.spans.items()}
        """The spans to be searched."""
        self._tensors = manifest.describe_tensors()
        self._layouts: dict[str, _FileLayout] = {}

    def lay_out(self, file: FileRecord) -> _FileLayout:
        """Return the layout of a file; that of one rank serves all others."""
        if file.name not in self._layouts:
            entries = list_entries(file, self._tensors)
            header = build_header(entries)
            sizes = (entry.size_bytes for entry in entries)
            *starts, size_bytes = accumulate(sizes, initial=len(header))
            placed = zip(entries, starts, strict=True)
            by_key = {entry.piece.key: (entry, start) for entry, start in placed}
            self._layouts[file.name] = _FileLayout(header, by_key, size_bytes)
        return self._layouts[file.name]


# For the same reason as `decode_manifest`.
_index_pieces = lru_cache(maxsize=1)(_Held)


class TensorFileReader:
    """Spans of tensors, from whichever files hold them.

    Args:
        folder: Where the files are.
        manifest: Which file holds what.
    """

    def __init__(self, folder: Path, *, manifest: Manifest) -> None:
        self._folder = folder
        self._held = _index_pieces(manifest)
        self._open: dict[str, _OpenFile] = {}

    def __enter__(self) -> TensorFileReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()

    def spans(self) -> dict[tuple[str, str], list[Span]]:
        """Return what there is, by param and tensor."""
        return self._held.spans

    def read(self, output: Tensor, *, param: str, tensor: str, span: Span) -> None:
        """Fill a 1D tensor with a span.

        Raises:
            CheckpointError: If a file does not hold what the manifest says.
        """
        held = self._held.pieces[param, tensor]
        for part in self._held.indices[param, tensor].find(span):
            file, piece = held[part.piece]
            source = self._read_piece(file, piece)[part.in_piece.start : part.in_piece.stop]
            if source.dtype != output.dtype:
                raise CheckpointError(
                    f"expected {output.dtype} under {piece.key!r} in {self._folder / file.name}, "
                    f"got {source.dtype}."
                )
            output[part.in_wanted.start : part.in_wanted.stop].copy_(source)

    def _read_piece(self, file: FileRecord, piece: PieceRecord) -> Tensor:
        if file.name not in self._open:
            path = self._folder / file.name
            try:
                self._open[file.name] = _OpenFile(path, layout=self._held.lay_out(file))
            except CheckpointError:
                raise
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"expected {len(file.pieces)} tensors in {path}, got {error!r}."
                ) from error
        return self._open[file.name].find(piece.key)


class _OpenFile:
    """One file in memory, as far as it is looked at.

    Nothing in it is believed: where a tensor lies follows from the manifest, and a file whose
    header says otherwise is refused without being parsed.

    Args:
        path: The file.
        layout: What it must hold.

    Raises:
        OSError, ValueError: If it cannot be read.
        CheckpointError: If it is made otherwise.
    """

    def __init__(self, path: Path, *, layout: _FileLayout) -> None:
        self._path = path
        self._layout = layout
        with open_regular(path) as opened:
            # What is mapped must pass for writable, or torch warns; nothing writes to it.
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        if self._bytes[: len(layout.header)] != layout.header or (
            len(self._bytes) != layout.size_bytes
        ):
            raise CheckpointError(
                f"expected {path} to begin with the header of the {len(layout.entries)} tensors "
                f"that the manifest lists, in all {layout.size_bytes} bytes, got "
                f"{len(self._bytes)} bytes with another."
            )

    def find(self, key: str) -> Tensor:
        """Return all elements of a tensor, 1D, in memory that must not be written.

        Raises:
            CheckpointError: If its bytes are no such tensor.
        """
        entry, start = self._layout.entries[key]
        dtype = find_dtype(entry.dtype)
        if not entry.numel:
            return torch.empty(0, dtype=dtype)
        found = torch.frombuffer(self._bytes, dtype=dtype, count=entry.numel, offset=start)
        if dtype == torch.bool and int(found.view(torch.uint8).max()) > 1:
            raise CheckpointError(
                f"expected bytes of 0 and 1 under {key!r} in {self._path}, as of bools, got others."
            )
        return found
