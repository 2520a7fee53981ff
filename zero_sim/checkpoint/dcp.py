"""The same content as a checkpoint of `torch.distributed.checkpoint` (DCP), written by it.

Each tensor is known to DCP's planners as flat, of the param's number of elements, under
`master/NAME` or `state.KEY/NAME`, cut where the ranks cut it; any DCP reader can take it into other
cuts. What is no elementwise tensor stays in the manifest.

DCP pickles: its index `.metadata`, and what `torch.save` says of each tensor. Here neither is ever
unpickled. The manifest says in which bytes of which file each piece lies (`containers.py`), and the
index is only compared with it (`dcp_index.py`). DCP's own reader does unpickle the index: it should
not be given a checkpoint of somebody whose code one would not run.

[Note: without DCP's planning]
`torch.distributed.checkpoint.save` lets ranks tell each other, in a dozen collectives of pickled
objects, what each of them holds. That has been agreed on before: here every rank hands its own
part to DCP's writer, and rank 0 writes the index of all.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan as WritePlan,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from zero_sim.checkpoint.containers import find_bytes
from zero_sim.checkpoint.entries import Entry, build_part, name_whole
from zero_sim.checkpoint.files import INDEX_NAME
from zero_sim.checkpoint.manifest import MASTER, FileRecord, PieceRecord, name_state
from zero_sim.checkpoint.save_plan import SavePlan
from zero_sim.checkpoint.tensorfile import hash_file
from zero_sim.checkpoint.values import find_dtype, name_dtype


class _SavePlanner(torch_dcp.DefaultSavePlanner):
    """Hands DCP's writer one piece after the other."""

    def __init__(self, pieces: Mapping[MetadataIndex, tuple[Entry, Tensor]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = pieces

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._pieces[index][1]


def write_own(plan: SavePlan) -> list[FileRecord]:
    """Let DCP write the pieces that are this rank's to write; no collective.

    Returns:
        Records of the files.

    Raises:
        CheckpointError: If DCP writes otherwise than `containers.py` reads.
    """
    pieces: dict[MetadataIndex, tuple[Entry, Tensor]] = {}
    for held in plan.pieces.values():
        for name, tensor in held.tensors.items():
            dtype = name_dtype(tensor.dtype)
            entry = build_part(param=held.param, tensor=name, span=held.span, dtype=dtype)
            pieces[_index(entry.piece)] = (entry, tensor.detach())
    if not pieces:
        return []
    numels = plan.numels
    items = [
        WriteItem(
            index=index,
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_build_chunk(entry.piece),
                properties=TensorProperties.create_from_tensor(tensor),
                size=torch.Size([numels[entry.piece.param]]),
            ),
        )
        for index, (entry, tensor) in pieces.items()
    ]
    writer = _open_writer(plan)
    rank = plan.coordinator.rank
    # The writer names a rank's file by the place of its plan among all.
    own = writer.prepare_global_plan([WritePlan([])] * rank + [WritePlan(items)])[rank]
    written: dict[str, list[tuple[int, int, Entry]]] = {}
    for result in writer.write_data(own, _SavePlanner(pieces)).wait():
        stored, (entry, _) = result.storage_data, pieces[result.index]
        container = (stored.offset, stored.offset + stored.length, entry)
        written.setdefault(stored.relative_path, []).append(container)
    return [_record(plan, name, held) for name, held in written.items()]


def conclude(plan: SavePlan, files: Sequence[FileRecord]) -> FileRecord:
    """Let DCP write its index of what all ranks wrote, on rank 0.

    Args:
        plan: The save.
        files: What `write_own` returned on every rank.

    Returns:
        A record of the index.
    """
    dtypes = {(param.name, MASTER): torch.float32 for param in plan.params}
    for param in plan.params:
        for entry in param.state:
            if entry.dtype is not None:
                dtypes[param.name, name_state(entry.key)] = find_dtype(entry.dtype)
    numels = plan.numels
    index: dict[str, TensorStorageMetadata] = {}
    results: list[WriteResult] = []
    for file in files:
        for piece, (start, stop) in zip(file.pieces, file.containers, strict=True):
            where = _index(piece)
            if where.fqn not in index:
                size = torch.Size([numels[piece.param]])
                properties = TensorProperties(dtype=dtypes[piece.param, piece.tensor])
                whole = TensorStorageMetadata(properties=properties, size=size, chunks=[])
                index[where.fqn] = whole
            chunks = index[where.fqn].chunks
            where = MetadataIndex(where.fqn, where.offset, len(chunks))
            chunks.append(_build_chunk(piece))
            stored = _StorageInfo(file.name, start, stop - start)
            results.append(
                WriteResult(index=where, size_in_bytes=stop - start, storage_data=stored)
            )
    _open_writer(plan).finish(Metadata(dict(index)), [results])
    path = plan.folder.saving / INDEX_NAME
    return FileRecord(name=INDEX_NAME, size_bytes=path.stat().st_size, sha256=hash_file(path))


def _open_writer(plan: SavePlan) -> torch_dcp.FileSystemWriter:
    return torch_dcp.FileSystemWriter(plan.folder.saving)


def _record(plan: SavePlan, name: str, held: list[tuple[int, int, Entry]]) -> FileRecord:
    path = plan.folder.saving / name
    held.sort(key=lambda container: container[:2])
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start, stop, entry in held:
            size_bytes = entry.size_bytes
            find_bytes(data, start=start, stop=stop, size_bytes=size_bytes, where=str(path))
    return FileRecord(
        name=name,
        size_bytes=path.stat().st_size,
        sha256=hash_file(path),
        pieces=tuple(entry.piece for _, _, entry in held),
        containers=tuple((start, stop) for start, stop, _ in held),
    )


def _index(piece: PieceRecord) -> MetadataIndex:
    return MetadataIndex(name_whole(piece.tensor, piece.param), torch.Size([piece.start]))


def _build_chunk(piece: PieceRecord) -> ChunkStorageMetadata:
    offsets, sizes = torch.Size([piece.start]), torch.Size([piece.stop - piece.start])
    return ChunkStorageMetadata(offsets=offsets, sizes=sizes)
