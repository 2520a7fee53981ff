"""safetensors files, written tensor by tensor and read span by span.

The library's own writer wants all tensors in memory at once. The format is simple enough to be
streamed: eight bytes of length, a JSON header, then the tensors without gaps.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from zero_sim.errors import CheckpointError
from zero_sim.layout import Span
from zero_sim.zero.checkpoint.manifest import FileRecord, Manifest, PieceRecord
from zero_sim.zero.checkpoint.plan import PieceIndex
from zero_sim.zero.checkpoint.values import SAFETENSORS_DTYPES, find_dtype, view_bytes

_HASH_BYTES = 1 << 22
_DTYPES = {code: find_dtype(name) for name, code in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor of a file."""

    piece: PieceRecord
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * find_dtype(self.dtype).itemsize


def sort_entries(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in file order: wide dtypes first, else as they came."""
    return sorted(entries, key=lambda entry: -find_dtype(entry.dtype).itemsize)


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
            self._put(self._build_header())
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

    def _build_header(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in self.entries:
            stop = offset + entry.size_bytes
            header[entry.piece.key] = {
                "dtype": SAFETENSORS_DTYPES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": [offset, stop],
            }
            offset = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)  # a multiple of 8, so that the data is aligned
        return len(text).to_bytes(8, "little") + text


def write_bytes(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of `data`; the one place where tensors reach the disk."""
    file.write(data)


def check_file(path: Path, *, record: FileRecord) -> str | None:
    """Return how a file differs from its record; None if it does not."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes != record.size_bytes:
            return f"Expected {record.size_bytes} bytes in {path} but got {size_bytes}."
        digest = hash_file(path)
    except OSError as error:
        return f"Expected to read {record.size_bytes} bytes from {path} but got {error!r}."
    if digest != record.sha256:
        return f"Expected sha256 {record.sha256} of {path} but got {digest}."
    return None


def hash_file(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()


class TensorFileReader:
    """Spans of tensors, from whichever files hold them.

    Args:
        folder: Where the files are.
        manifest: Which file holds what.
    """

    def __init__(self, folder: Path, *, manifest: Manifest) -> None:
        self._folder = folder
        self._pieces, self._indices = _index_pieces(manifest)
        self._open: dict[str, _OpenFile] = {}

    def __enter__(self) -> TensorFileReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()

    def spans(self) -> dict[tuple[str, str], list[Span]]:
        """Return what there is, by param and tensor."""
        return {
            where: [Span(piece.start, piece.stop) for _, piece in held]
            for where, held in self._pieces.items()
        }

    def read(self, output: Tensor, *, param: str, tensor: str, span: Span) -> None:
        """Fill a 1D tensor with a span.

        Raises:
            CheckpointError: If a file does not hold what the manifest says.
        """
        held = self._pieces[param, tensor]
        for part in self._indices[param, tensor].find(span):
            file, piece = held[part.piece]
            source = self._read_piece(file, piece, part.in_piece)
            if source.dtype != output.dtype:
                raise CheckpointError(
                    f"Expected {output.dtype} under {piece.key!r} in {self._folder / file} but "
                    f"got {source.dtype}."
                )
            output[part.in_wanted.start : part.in_wanted.stop].copy_(source)

    def _read_piece(self, file: str, piece: PieceRecord, span: Span) -> Tensor:
        path = self._folder / file
        try:
            if file not in self._open:
                self._open[file] = _OpenFile(path)
            whole = self._open[file].find(piece.key)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"Expected {piece.key!r} in {path} but got {error!r}.") from error
        if whole.numel() != piece.stop - piece.start:
            raise CheckpointError(
                f"Expected {piece.stop - piece.start} elements under {piece.key!r} in {path} "
                f"but got {whole.numel()}."
            )
        return whole[span.start : span.stop]


class _OpenFile:
    """One safetensors file in memory, as far as it is looked at; the library takes far longer.

    Args:
        path: The file.

    Raises:
        OSError, ValueError: If it cannot be read, or begins with no header.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # What is mapped must pass for writable, or torch warns; nothing writes to it.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header_bytes = int.from_bytes(self._bytes[:8], "little")
        self._start = 8 + header_bytes
        self._header = json.loads(self._bytes[8 : self._start])

    def find(self, key: str) -> Tensor:
        """Return all elements of a tensor, 1D, in memory that must not be written.

        Raises:
            KeyError, TypeError, ValueError: If there is none, or it is not where the header says.
        """
        entry = self._header[key]
        start, stop = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        numel = torch.Size(entry["shape"]).numel()
        if stop - start != numel * dtype.itemsize or not 0 <= start <= stop <= self._size_bytes:
            raise ValueError(f"{numel} elements of {dtype} in bytes {start} to {stop}")
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._bytes, dtype=dtype, count=numel, offset=self._start + start)

    @property
    def _size_bytes(self) -> int:
        return len(self._bytes) - self._start


_Held = dict[tuple[str, str], list[tuple[str, PieceRecord]]]


# For the same reason as `decode_manifest`.
@lru_cache(maxsize=1)
def _index_pieces(manifest: Manifest) -> tuple[_Held, dict[tuple[str, str], PieceIndex]]:
    """Return which files hold what of each param and tensor, and the same to be searched."""
    pieces: _Held = {}
    for file in manifest.files:
        for piece in file.pieces:
            pieces.setdefault((piece.param, piece.tensor), []).append((file.name, piece))
    indices = {
        where: PieceIndex(Span(piece.start, piece.stop) for _, piece in held)
        for where, held in pieces.items()
    }
    return pieces, indices
