"""Entries of a tensor file, their offsets, and the file's header."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from zero_sim.checkpoint.manifest import FileRecord, PieceRecord
from zero_sim.checkpoint.values import SAFETENSORS_DTYPES, find_dtype
from zero_sim.layout import Span

CONSOLIDATED_NAME: Final = "consolidated.safetensors"
MODULE_NAME: Final = "module.safetensors"
"""File of frozen params and buffers, in checkpoints with one file per rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor in a file."""

    piece: PieceRecord
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def size_bytes(self) -> int:
        """Data size in bytes."""
        return self.numel * find_dtype(self.dtype).itemsize


def sort_entries(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in file order: wide dtypes first, otherwise in the given order."""
    # So each offset is a multiple of the dtype's size, and a mapped file can be viewed directly.
    return sorted(entries, key=lambda entry: -find_dtype(entry.dtype).itemsize)


def name_whole(tensor: str, param: str) -> str:
    """Return the name of a param's whole tensor."""
    return f"{tensor}/{param}"


def build_whole(*, param: str, tensor: str, shape: tuple[int, ...], dtype: str) -> Entry:
    """Return the entry of a whole tensor, in its own shape."""
    # A whole tensor is the span of all its elements.
    stop = torch.Size(shape).numel()
    key = name_whole(tensor, param)
    piece = PieceRecord(key=key, param=param, tensor=tensor, start=0, stop=stop)
    return Entry(piece=piece, shape=shape, dtype=dtype)


def build_part(*, param: str, tensor: str, span: Span, dtype: str) -> Entry:
    """Return the entry of a tensor's flattened span."""
    key = f"{name_whole(tensor, param)}{span}"
    piece = PieceRecord(key=key, param=param, tensor=tensor, start=span.start, stop=span.stop)
    return Entry(piece=piece, shape=(span.numel,), dtype=dtype)


def build_header(entries: Sequence[Entry]) -> bytes:
    """Return the start of a safetensors file with these tensors: a length, then a JSON header."""
    # "format": "pt" as written by safetensors.torch.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Counted from the end of the header.
    offset = 0
    for entry in entries:
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


def list_entries(
    file: FileRecord, tensors: Mapping[tuple[str, str], tuple[tuple[int, ...], str]]
) -> list[Entry]:
    """Return a file's entries, in file order. The file's name decides their shapes."""
    # Rank files contain flattened spans, the other two files whole tensors.
    is_whole = file.name in (CONSOLIDATED_NAME, MODULE_NAME)
    entries = []
    for piece in file.pieces:
        shape, dtype = tensors[piece.param, piece.tensor]
        shape = shape if is_whole else (piece.stop - piece.start,)
        entries.append(Entry(piece=piece, shape=shape, dtype=dtype))
    return entries
