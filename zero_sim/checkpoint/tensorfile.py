"""safetensors files, written tensor by tensor and read span by span.

The library's own writer needs all tensors in memory at once. This writer streams the format: eight
bytes of length, a JSON header, then tensors without gaps.
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
    """A new file in progress. Call `write` for its tensors in the order of `entries`."""

    entries: tuple[Entry, ...]
    """File order: wide dtypes first, so that each tensor starts at a multiple of its itemsize."""

    def __init__(self, path: Path, *, entries: Sequence[Entry]) -> None:
        self.entries = tuple(sort_entries(entries))
        self._path = path
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._written = 0
        # "x": a save never overwrites a file.
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
        """Flush everything to disk and return the file's record."""
        assert self._written == len(self.entries)
        # From Python's buffer to the system, and from there to disk.
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
        """Close the file. No-op after `finish`."""
        self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        # Now, so that the file need not be read again.
        write_bytes(self._file, data)
        self._digest.update(data)
        self._size_bytes += len(data)


def write_bytes(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of `data`. All tensor data is written here, so tests can make it fail."""
    file.write(data)


def check_file(path: Path, *, record: FileRecord) -> str | None:
    """Return the difference between a file and its record; None if there is none."""
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            # The size first, because a wrong size is found without reading the file.
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
    """Tensor positions in a file, computed from its record."""

    header: bytes
    """The file's first bytes."""
    entries: Mapping[str, tuple[Entry, int]]
    """Each tensor by key, with the offset of its first byte."""
    size_bytes: int


class _FileIndex:
    """Index of all tensors in a checkpoint's files."""

    def __init__(self, manifest: Manifest) -> None:
        self.pieces: dict[tuple[str, str], list[tuple[FileRecord, PieceRecord]]] = {}
        """Files and pieces by param and tensor."""
        for file in manifest.files:
            for piece in file.pieces:
                self.pieces.setdefault((piece.param, piece.tensor), []).append((file, piece))
        self.spans = {
            where: [Span(piece.start, piece.stop) for _, piece in held]
            for where, held in self.pieces.items()
        }
        self.indices = {where: PieceIndex(spans) for where, spans in self.spans.items()}
        """Span index by param and tensor."""
        self._tensors = manifest.describe_tensors()
        self._layouts: dict[str, _FileLayout] = {}

    def lay_out(self, file: FileRecord) -> _FileLayout:
        """Return a file's layout. It is cached, because all ranks need it."""
        if file.name not in self._layouts:
            entries = list_entries(file, self._tensors)
            header = build_header(entries)
            sizes = (entry.size_bytes for entry in entries)
            # The last sum is the file's size.
            *starts, size_bytes = accumulate(sizes, initial=len(header))
            placed = zip(entries, starts, strict=True)
            by_key = {entry.piece.key: (entry, start) for entry, start in placed}
            self._layouts[file.name] = _FileLayout(header, by_key, size_bytes)
        return self._layouts[file.name]


# Cached because simulated ranks share a process, see `decode_manifest`.
_index_pieces = lru_cache(maxsize=1)(_FileIndex)


class TensorFileReader:
    """Reader of tensor spans from all files of a checkpoint."""

    def __init__(self, folder: Path, *, manifest: Manifest) -> None:
        self._folder = folder
        self._held = _index_pieces(manifest)
        self._open: dict[str, _OpenFile] = {}

    def __enter__(self) -> TensorFileReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()

    def spans(self) -> dict[tuple[str, str], list[Span]]:
        """Return the spans in the files, by param and tensor."""
        return self._held.spans

    def read(self, output: Tensor, *, param: str, tensor: str, span: Span) -> None:
        """Fill a 1D tensor with a span's elements.

        Raises:
            CheckpointError: If a file differs from the manifest.
        """
        # A span may lie in several pieces and files.
        held = self._held.pieces[param, tensor]
        for part in self._held.indices[param, tensor].find(span):
            file, piece = held[part.piece]
            # 1D view of the file. Only elements copied to `output` are read from disk.
            source = self._read_piece(file, piece)[part.in_piece.start : part.in_piece.stop]
            if source.dtype != output.dtype:
                raise CheckpointError(
                    f"expected dtype {output.dtype} of {piece.key!r} in "
                    f"{self._folder / file.name}, got {source.dtype}."
                )
            output[part.in_wanted.start : part.in_wanted.stop].copy_(source)

    def _read_piece(self, file: FileRecord, piece: PieceRecord) -> Tensor:
        # Keep files open, because many spans are read from the same few files.
        if file.name not in self._open:
            path = self._folder / file.name
            try:
                self._open[file.name] = _OpenFile(path, layout=self._held.lay_out(file))
            except CheckpointError:
                # Its message is complete.
                raise
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"expected {len(file.pieces)} tensors in {path}, got {error!r}."
                ) from error
        return self._open[file.name].find(piece.key)


class _OpenFile:
    """A file mapped into memory.

    The file is not trusted. The manifest gives the positions of tensors, and a file with another
    header is refused without parsing it.

    Raises:
        OSError, ValueError: If it cannot be read.
        CheckpointError: If header or size differ from the layout.
    """

    def __init__(self, path: Path, *, layout: _FileLayout) -> None:
        self._path = path
        self._layout = layout
        with open_regular(path) as opened:
            # ACCESS_COPY, because torch warns about read-only memory; nothing writes to it.
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        if self._bytes[: len(layout.header)] != layout.header or (
            len(self._bytes) != layout.size_bytes
        ):
            raise CheckpointError(
                f"expected {path} to start with the header of the {len(layout.entries)} tensors "
                f"in the manifest and to have {layout.size_bytes} bytes, got "
                f"{len(self._bytes)} bytes or another header."
            )

    def find(self, key: str) -> Tensor:
        """Return a tensor's elements, 1D, read-only.

        Raises:
            CheckpointError: If its bytes are invalid for the dtype.
        """
        entry, start = self._layout.entries[key]
        dtype = find_dtype(entry.dtype)
        # frombuffer refuses a count of 0.
        if not entry.numel:
            return torch.empty(0, dtype=dtype)
        # 1D view of the mapped file, without a copy.
        found = torch.frombuffer(self._bytes, dtype=dtype, count=entry.numel, offset=start)
        if dtype == torch.bool and int(found.view(torch.uint8).max()) > 1:
            raise CheckpointError(
                f"expected bytes of 0 and 1 for {key!r} in {self._path}, a bool tensor, got others."
            )
        return found
