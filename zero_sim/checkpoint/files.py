"""Files of a checkpoint, by its form, and a check that they can hold what the manifest says.

All of it follows from the manifest, so that no file is opened which is not of the checkpoint, and
none is read to its end which claims to be longer than what it holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from zero_sim.checkpoint.entries import (
    CONSOLIDATED_NAME,
    MODULE_NAME,
    build_header,
    build_part,
    build_whole,
    list_entries,
)
from zero_sim.checkpoint.invalid_field import InvalidField
from zero_sim.checkpoint.manifest import FileRecord, Manifest
from zero_sim.layout import Span

_RANK_FILE: Final = re.compile(r"rank-(\d{5,9})-of-(\d{5,9})\.safetensors", re.ASCII)


def check_layout(manifest: Manifest, path: str) -> None:
    """Check that the files are those of the form, and of the size that their pieces make.

    Args:
        manifest: The record.
        path: Of its content, for messages.

    Raises:
        InvalidField: If a record of a file is not what any save writes.
    """
    tensors = manifest.describe_tensors()
    names: set[str] = set()
    for index, file in enumerate(manifest.files):
        where = f"{path}.files[{index}]"
        if file.name in names:
            raise InvalidField(f"{where}.name", "another than those before", repr(file.name))
        names.add(file.name)
        if not _belongs(file.name, manifest):
            expected = f"the name of a file of form {manifest.form!r}, as its ranks would write it"
            raise InvalidField(f"{where}.name", expected, ascii(file.name)[:80])
        _check_pieces(file, where, tensors=tensors)
        entries = list_entries(file, tensors)
        size_bytes = len(build_header(entries)) + sum(entry.size_bytes for entry in entries)
        if file.size_bytes != size_bytes:
            raise InvalidField(
                f"{where}.size_bytes", f"{size_bytes}, by its pieces", str(file.size_bytes)
            )


def _belongs(name: str, manifest: Manifest) -> bool:
    """Whether a file of this name is written in this form by ranks that there were."""
    world_size = manifest.world.world_size
    match manifest.form:
        case "consolidated":
            return name == CONSOLIDATED_NAME
        case "sharded":
            found = _RANK_FILE.fullmatch(name)
            return name == MODULE_NAME or bool(
                found and int(found[1]) < int(found[2]) == world_size
            )


def _check_pieces(
    file: FileRecord, path: str, *, tensors: Mapping[tuple[str, str], tuple[tuple[int, ...], str]]
) -> None:
    if not file.pieces:
        raise InvalidField(f"{path}.pieces", "what the file holds", "nothing")
    keys: set[str] = set()
    for index, piece in enumerate(file.pieces):
        where = f"{path}.pieces[{index}]"
        if (piece.param, piece.tensor) not in tensors:
            expected = "a tensor of params or module"
            raise InvalidField(where, expected, f"{piece.tensor!r} of {piece.param!r}")
        shape, dtype = tensors[piece.param, piece.tensor]
        entry = build_whole(param=piece.param, tensor=piece.tensor, shape=shape, dtype=dtype)
        is_module = piece.tensor in ("frozen", "buffer")
        if is_module != (file.name == MODULE_NAME) and file.name != CONSOLIDATED_NAME:
            expected = "not trained" if file.name == MODULE_NAME else "trained"
            raise InvalidField(f"{where}.tensor", f"{expected} in {file.name}", repr(piece.tensor))
        if file.name not in (CONSOLIDATED_NAME, MODULE_NAME):
            if not piece.start < piece.stop <= entry.numel:
                got = f"[{piece.start}, {piece.stop})"
                raise InvalidField(where, f"a span of {entry.numel} elements", got)
            span = Span(piece.start, piece.stop)
            entry = build_part(param=piece.param, tensor=piece.tensor, span=span, dtype=dtype)
        if piece != entry.piece:
            wanted = f"{entry.piece.key!r}, [{entry.piece.start}, {entry.piece.stop})"
            got = f"{ascii(piece.key)[:80]}, [{piece.start}, {piece.stop})"
            raise InvalidField(where, wanted, got)
        if piece.key in keys:
            raise InvalidField(f"{where}.key", "another than those before", repr(piece.key))
        keys.add(piece.key)
