"""Decoding of manifests, which are not trusted: an attacker can also write matching checksums.

The records check single values (`manifest.py`). This module checks values against each other, and
files against the form. The manifest determines everything about files. So no file outside the
checkpoint is opened, and no file longer than its content is read to the end. `compatibility.py`
checks if a manifest fits a run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from zero_sim.checkpoint.entries import (
    CONSOLIDATED_NAME,
    MODULE_NAME,
    build_header,
    build_part,
    build_whole,
    list_entries,
)
from zero_sim.checkpoint.manifest import (
    FORMAT,
    VERSION,
    FileRecord,
    Manifest,
    digest_content,
    take_apart,
)
from zero_sim.errors import CheckpointError
from zero_sim.layout import Span
from zero_sim.untrusted_json import InvalidField, build_record, parse, show

_FIELDS: Final = ("format", "version", "sha256", "content")
_RANK_FILE: Final = re.compile(r"rank-(\d{5,9})-of-(\d{5,9})\.safetensors", re.ASCII)


# Cached, because simulated ranks share a process, and each of a thousand ranks would parse the same
# megabytes.
@lru_cache(maxsize=1)
def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Return the record in a manifest file.

    Raises:
        CheckpointError: If it is no manifest, has another version, was changed, or contains
            something that no save writes. The message names the field.
    """
    try:
        whole = parse(data, where="the manifest")
        content = _open_manifest(whole, where=where)
        manifest = build_record(Manifest, content, where="content")
        _check_params(manifest)
        modules = ((record.kind, record.name) for record in manifest.module)
        _check_unlike(modules, "content.module")
        # As sorted JSON, because dicts are not hashable.
        groups = (json.dumps(take_apart(group), sort_keys=True) for group in manifest.groups)
        _check_unlike(groups, "content.groups")
        _check_files(manifest)
    except InvalidField as invalid:
        raise CheckpointError(f"In {where}, {invalid}.") from invalid
    return manifest


def _open_manifest(whole: Any, *, where: str) -> Any:
    """Check a manifest's version and checksum, and return its content."""
    # Format and version first, because other fields may differ between versions.
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(
            f"expected a manifest with format={FORMAT!r} in {where}, got another file. Choose the "
            f"path of a checkpoint."
        )
    if type(whole.get("version")) is not int or whole["version"] != VERSION:
        raise CheckpointError(
            f"expected version {VERSION} in {where}, got {show(whole.get('version'))}. "
            f"Use the release that wrote it."
        )
    if whole.keys() != set(_FIELDS):
        got = show(", ".join(whole))
        raise InvalidField(f"the manifest: expected {', '.join(_FIELDS)}, got {got}")
    digest = digest_content(whole["content"])
    if whole["sha256"] != digest:
        raise CheckpointError(
            f"expected sha256 {show(whole['sha256'])} of the content of {where}, got "
            f"{digest}: the file was changed after it was written. Restore the original."
        )
    return whole["content"]


def _check_params(manifest: Manifest) -> None:
    """Check that params have unique names, and groups that exist."""
    _check_unlike((param.name for param in manifest.params), "content.params")
    groups = range(len(manifest.groups))
    for index, param in enumerate(manifest.params):
        where = f"content.params[{index}]"
        has_elements = math.prod(param.shape) > 0
        # A param without elements has no master, so no optimizer has it.
        if has_elements and param.group not in groups:
            raise InvalidField(
                f"{where}.group: expected an index into the {len(groups)} groups, got {param.group}"
            )
        if not has_elements and param.group is not None:
            raise InvalidField(
                f"{where}.group: expected null for a param without elements, got {param.group}"
            )
        if not has_elements and param.state:
            raise InvalidField(
                f"{where}.state: expected no state for a param without elements, got some"
            )
        _check_unlike((entry.key for entry in param.state), f"{where}.state")
    # A save only writes groups with params.
    unused = set(groups) - {param.group for param in manifest.params}
    if unused:
        raise InvalidField(
            f"content.groups[{min(unused)}]: expected a group with a param, got one without"
        )


def _check_files(manifest: Manifest) -> None:
    """Check that files belong to the form, and that their sizes follow from their pieces."""
    tensors = manifest.describe_tensors()
    _check_unlike((file.name for file in manifest.files), "content.files")
    for index, file in enumerate(manifest.files):
        where = f"content.files[{index}]"
        if not _belongs(file.name, manifest):
            raise InvalidField(
                f"{where}.name: expected the name of a file of form {manifest.form!r}, as its "
                f"ranks write it, got {show(file.name)}"
            )
        _check_pieces(file, where, tensors=tensors)
        entries = list_entries(file, tensors)
        # The size includes the header, which also follows from the pieces.
        size_bytes = len(build_header(entries)) + sum(entry.size_bytes for entry in entries)
        if file.size_bytes != size_bytes:
            raise InvalidField(
                f"{where}.size_bytes: expected {size_bytes} from its pieces, got {file.size_bytes}"
            )


def _belongs(name: str, manifest: Manifest) -> bool:
    """Return True if a rank of this world writes a file with this name in this form."""
    if manifest.form == "consolidated":
        return name == CONSOLIDATED_NAME
    # Rank and world size, to check against the manifest.
    found = _RANK_FILE.fullmatch(name)
    world_size = manifest.world.world_size
    return name == MODULE_NAME or bool(found and int(found[1]) < int(found[2]) == world_size)


def _check_pieces(
    file: FileRecord, path: str, *, tensors: Mapping[tuple[str, str], tuple[tuple[int, ...], str]]
) -> None:
    if not file.pieces:
        raise InvalidField(f"{path}.pieces: expected the pieces of the file, got none")
    _check_unlike((piece.key for piece in file.pieces), f"{path}.pieces")
    for index, piece in enumerate(file.pieces):
        where = f"{path}.pieces[{index}]"
        if (piece.param, piece.tensor) not in tensors:
            got = show(f"{piece.tensor} of {piece.param}")
            raise InvalidField(f"{where}: expected a tensor of params or module, got {got}")
        # The names and spans that a save would give this piece. All others are refused.
        shape, dtype = tensors[piece.param, piece.tensor]
        entry = build_whole(param=piece.param, tensor=piece.tensor, shape=shape, dtype=dtype)
        is_module = piece.tensor in ("frozen", "buffer")
        if is_module != (file.name == MODULE_NAME) and file.name != CONSOLIDATED_NAME:
            expected = "not trained" if file.name == MODULE_NAME else "trained"
            got = show(piece.tensor)
            raise InvalidField(f"{where}.tensor: expected {expected} in {file.name}, got {got}")
        if file.name not in (CONSOLIDATED_NAME, MODULE_NAME):
            if not piece.start < piece.stop <= entry.numel:
                got = f"[{piece.start}, {piece.stop})"
                raise InvalidField(f"{where}: expected a span of {entry.numel} elements, got {got}")
            span = Span(piece.start, piece.stop)
            # Rank files contain spans, so the piece has a span's name.
            entry = build_part(param=piece.param, tensor=piece.tensor, span=span, dtype=dtype)
        if piece != entry.piece:
            wanted = f"{entry.piece.key!r}, [{entry.piece.start}, {entry.piece.stop})"
            got = f"{show(piece.key)}, [{piece.start}, {piece.stop})"
            raise InvalidField(f"{where}: expected {wanted}, got {got}")


def _check_unlike(items: Iterable[Hashable], path: str) -> None:
    seen: set[Hashable] = set()
    for index, item in enumerate(items):
        if item in seen:
            raise InvalidField(f"{path}[{index}]: expected no duplicates, got {show(item)} again")
        seen.add(item)
