"""Manifests, read with distrust: whoever wrote one may have written its checksums as well.

The records check each value (`manifest.py`); here values are checked against each other, and the
files against the form. All that is known of files follows from the manifest, so that no file is
opened which is not of the checkpoint, and none is read to its end which claims to be longer than
what it holds. Whether a manifest fits a run is checked in `compatibility.py`.
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


# Simulated ranks share a process: a thousand of them would each parse the same megabytes.
@lru_cache(maxsize=1)
def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Return the record that a manifest file holds.

    Args:
        data: Content of the file.
        where: Path of the file, for messages.

    Raises:
        CheckpointError: If it is no manifest, of another version, was changed since, or holds
            something that no save writes; then the message names the field.
    """
    try:
        whole = parse(data, where="the manifest")
        content = _open_manifest(whole, where=where)
        manifest = build_record(Manifest, content, where="content")
        _check_params(manifest)
        modules = ((record.kind, record.name) for record in manifest.module)
        _check_unlike(modules, "content.module")
        groups = (json.dumps(take_apart(group), sort_keys=True) for group in manifest.groups)
        _check_unlike(groups, "content.groups")
        _check_files(manifest)
    except InvalidField as invalid:
        raise CheckpointError(f"In {where}, {invalid}.") from invalid
    return manifest


def _open_manifest(whole: Any, *, where: str) -> Any:
    """Return the content of a manifest of this version with the right checksum."""
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(
            f"expected a manifest with format={FORMAT!r} in {where}, got something else."
        )
    if type(whole.get("version")) is not int or whole["version"] != VERSION:
        raise CheckpointError(
            f"expected version {VERSION} in {where}, got {show(whole.get('version'))}. "
            f"Try the release that wrote it."
        )
    if whole.keys() != set(_FIELDS):
        got = show(", ".join(whole))
        raise InvalidField(f"the manifest: expected {', '.join(_FIELDS)}, got {got}")
    digest = digest_content(whole["content"])
    if whole["sha256"] != digest:
        raise CheckpointError(
            f"expected sha256 {show(whole['sha256'])} of the content of {where}, got "
            f"{digest}: the file was changed after it was written."
        )
    return whole["content"]


def _check_params(manifest: Manifest) -> None:
    """Check that params are told apart, and have the groups that there are."""
    _check_unlike((param.name for param in manifest.params), "content.params")
    groups = range(len(manifest.groups))
    for index, param in enumerate(manifest.params):
        where = f"content.params[{index}]"
        has_elements = math.prod(param.shape) > 0
        # Without elements a param is in no optimizer.
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
                f"{where}.state: expected none for a param without elements, got some"
            )
        _check_unlike((entry.key for entry in param.state), f"{where}.state")
    unused = set(groups) - {param.group for param in manifest.params}
    if unused:
        raise InvalidField(
            f"content.groups[{min(unused)}]: expected the group of a param, got one of none"
        )


def _check_files(manifest: Manifest) -> None:
    """Check that the files are those of the form, and of the size that their pieces make."""
    tensors = manifest.describe_tensors()
    _check_unlike((file.name for file in manifest.files), "content.files")
    for index, file in enumerate(manifest.files):
        where = f"content.files[{index}]"
        if not _belongs(file.name, manifest):
            raise InvalidField(
                f"{where}.name: expected the name of a file of form {manifest.form!r}, as its "
                f"ranks would write it, got {show(file.name)}"
            )
        _check_pieces(file, where, tensors=tensors)
        entries = list_entries(file, tensors)
        size_bytes = len(build_header(entries)) + sum(entry.size_bytes for entry in entries)
        if file.size_bytes != size_bytes:
            raise InvalidField(
                f"{where}.size_bytes: expected {size_bytes}, by its pieces, got {file.size_bytes}"
            )


def _belongs(name: str, manifest: Manifest) -> bool:
    """Return whether a file of this name is written in this form by ranks that there were."""
    if manifest.form == "consolidated":
        return name == CONSOLIDATED_NAME
    found = _RANK_FILE.fullmatch(name)
    world_size = manifest.world.world_size
    return name == MODULE_NAME or bool(found and int(found[1]) < int(found[2]) == world_size)


def _check_pieces(
    file: FileRecord, path: str, *, tensors: Mapping[tuple[str, str], tuple[tuple[int, ...], str]]
) -> None:
    if not file.pieces:
        raise InvalidField(f"{path}.pieces: expected the pieces that the file holds, got none")
    _check_unlike((piece.key for piece in file.pieces), f"{path}.pieces")
    for index, piece in enumerate(file.pieces):
        where = f"{path}.pieces[{index}]"
        if (piece.param, piece.tensor) not in tensors:
            got = show(f"{piece.tensor} of {piece.param}")
            raise InvalidField(f"{where}: expected a tensor of params or module, got {got}")
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
            entry = build_part(param=piece.param, tensor=piece.tensor, span=span, dtype=dtype)
        if piece != entry.piece:
            wanted = f"{entry.piece.key!r}, [{entry.piece.start}, {entry.piece.stop})"
            got = f"{show(piece.key)}, [{piece.start}, {piece.stop})"
            raise InvalidField(f"{where}: expected {wanted}, got {got}")


def _check_unlike(items: Iterable[Hashable], path: str) -> None:
    seen: set[Hashable] = set()
    for index, item in enumerate(items):
        if item in seen:
            raise InvalidField(
                f"{path}[{index}]: expected another than those before, got {show(item)} again"
            )
        seen.add(item)
